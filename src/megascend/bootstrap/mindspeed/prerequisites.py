"""Prerequisites of the import of MindSpeed's adaptor. Each error says what to install or to source."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from megascend.bootstrap import ascend
from megascend.bootstrap.ascend import Prerequisite
from megascend.bootstrap.mindspeed import tree
from megascend.bootstrap.versions import Stack
from megascend.errors import PlatformError, VersionError

HOW_MINDSPEED = (
    "git clone -b {branch} MindSpeed from its repository (it is not on PyPI), pip install --no-deps -e it, or put the "
    "checkout on PYTHONPATH; see docs/npu.md"
)

# Hard imports that MindSpeed does not declare: (module, who needs it, what to do, in which stacks).
UNDECLARED = (
    ("scipy", "MindSpeed", "pip install scipy", ("0.15", "0.16")),
    ("torchair", "MindSpeed", "it comes with torch_npu's wheel: reinstall torch_npu", ("0.15", "0.16")),
    ("triton", "MindSpeed", "pip install triton-ascend", ("0.16",)),
    ("einops", "MindSpeed", "pip install einops", ("0.15", "0.16")),
    ("acl", "MindSpeed", "it comes with CANN: source its set_env.sh, which extends PYTHONPATH", ("0.15", "0.16")),
)


def _check_mindspeed(stack: Stack, environment: Mapping[str, str]) -> str:
    mindspeed, branch = tree.find(), tree.branch_of(stack)
    instructions = HOW_MINDSPEED.format(branch=branch)
    if mindspeed is None:
        raise PlatformError(f"platform 'npu' needs MindSpeed ({branch}), which is not installed: {instructions}")
    version = mindspeed.version_for(stack)
    if version is None:
        supported = " and ".join(tree.BRANCHES.values())
        raise VersionError(
            f"MindSpeed {mindspeed.name} is on the path ({mindspeed.folder / '__init__.py'}); stack {stack.name} needs branch "
            f"{branch}. {mindspeed.needs}Supported branches: {supported}. To get it: {instructions}"
        )
    return f"{version} ({mindspeed.folder})"


def _check_undeclared_imports(stack: Stack, environment: Mapping[str, str]) -> str:
    return ascend.check_undeclared([row[:3] for row in UNDECLARED if stack.name in row[3]])


def _check_transformer_engine(stack: Stack, environment: Mapping[str, str]) -> str:
    """Check that no Transformer Engine is installed: it would be imported instead of MindSpeed's dummy, and crash."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return "none is installed, as it must be"
    if spec.origin is not None and ascend.is_for_npu(Path(spec.origin).parent):
        raise PlatformError(
            f"TransformerEngineNPU is installed as transformer_engine ({spec.origin}). It belongs to MegatronAdaptor, with "
            "stack 0.18 or 0.19 and provider megatron_adaptor; this stack's MindSpeed would import it instead of its own layers: "
            "pip uninstall transformer-engine"
        )
    raise PlatformError(
        f"CUDA's Transformer Engine is installed ({spec.origin}). MindSpeed would import it instead of its own layers, and "
        "it cannot run on an NPU host: pip uninstall transformer-engine transformer-engine-torch transformer-engine-cu12"
    )


PREREQUISITES = (
    ascend.TORCH_NPU,
    ascend.CANN,
    ascend.TORCH_PAIR,
    Prerequisite("MindSpeed", _check_mindspeed),
    Prerequisite("MindSpeed's imports", _check_undeclared_imports),
    Prerequisite("Transformer Engine", _check_transformer_engine),
    ascend.MEGATRON,
)
"""Prerequisites in the order of checking: the failure of one explains those of later ones."""
