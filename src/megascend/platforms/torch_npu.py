"""Whether torch_npu works here, and what its failures mean. It makes ``torch.npu``; torch loads it by itself."""

from __future__ import annotations

import re
from importlib import import_module

from megascend.surroundings import is_installed

WITHOUT_CANN = (
    "On an NPU host: source CANN's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh). Elsewhere: pip uninstall "
    "torch_npu, or run on the simulated device: megascend simnpu -- COMMAND. TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch "
    "start without torch_npu"
)
ASCEND_LIBRARY = re.compile(r"lib(hccl|ascend|acl|ge_|graph|opapi|runtime)\S*\.so")


def torch_npu_problem() -> str | None:
    """Why torch_npu does not work here, or None. Imports torch and torch_npu."""
    if not is_installed("torch_npu"):
        return "torch_npu is not installed: pip install 'megascend[npu]' on a host with Ascend's driver and CANN"
    try:
        torch_npu = import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        return explain_torch_npu_failure(error)
    torch = import_module("torch")
    if not torch.npu.is_available():
        return (
            f"torch_npu {torch_npu.__version__} imports, but torch.npu.is_available() is False: no card is visible "
            "(npu-smi info; ASCEND_RT_VISIBLE_DEVICES; in a container, /dev/davinci* must be passed in)"
        )
    return None


def explain_torch_npu_failure(error: BaseException) -> str:
    """What the failed import of torch_npu (or, through its auto-loading, of torch) means, and what to do."""
    first = _root_cause(error)
    if ASCEND_LIBRARY.search(first):
        return f"torch_npu cannot load Ascend's libraries ({first}). {WITHOUT_CANN}"
    return f"torch_npu is installed but cannot be imported: {first}"


def _root_cause(error: BaseException) -> str:
    """The first line of the error at the beginning of the chain: torch wraps torch_npu's in one of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
