"""The acceptance run: what somebody with Ascend cards runs once, and sends back.

``scripts/npu_acceptance.sh`` starts it. :mod:`plan` says which sections there are, :mod:`runner` runs each in processes of its
own under a deadline, a file per section measures, and :mod:`bundle` packs what was found, without private data.
"""
