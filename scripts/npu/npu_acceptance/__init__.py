"""The acceptance run: a user with Ascend cards runs it once and sends the results back.

``scripts/npu/acceptance.sh`` starts it. :mod:`plan` lists the sections, :mod:`runner` runs each in its own processes under a
deadline, a file per section measures, and :mod:`report` packs the results, without private data.
"""
