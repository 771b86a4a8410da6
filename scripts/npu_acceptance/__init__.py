"""The acceptance run: what somebody with Ascend cards runs once, and sends back.

``scripts/npu_acceptance.sh`` starts it. :mod:`plan` lists the sections, :mod:`runner` runs each in processes of its own under a
deadline, a file per section measures, and :mod:`report` packs the results, without private data.
"""
