"""verl's own Megatron engine on a CPU, for ``bench_verl.py``: verl imports this module (``VERL_USE_EXTERNAL_MODULES``)."""

import megascend
from megascend.integrations.verl.cpu_platform import register

register()
megascend.bootstrap("cpu", engine="megatron-core")
