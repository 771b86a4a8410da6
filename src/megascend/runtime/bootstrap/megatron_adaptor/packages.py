"""Identify the packages of the stack from their files, without importing them; prerequisites of their imports."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from megascend.errors import PlatformError, VersionError
from megascend.runtime.bootstrap import ascend
from megascend.runtime.bootstrap.ascend import Prerequisite
from megascend.runtime.bootstrap.mindspeed import tree
from megascend.runtime.bootstrap.versions import Stack, installed_version
from megascend.surroundings import is_installed

ADAPTOR = "megatron_adaptor"
ADAPTOR_DISTRIBUTION = "megatron-adaptor"
TRANSFORMER_ENGINE = "transformer_engine"
TRANSFORMER_ENGINE_DISTRIBUTION = "transformer-engine"
CUDA_PARTS = ("transformer_engine_torch", "transformer_engine_cu12", "transformer_engine_cu13")
"""Packages that CUDA's Transformer Engine consists of, beside ``transformer_engine``."""
SOURCE = "https://gitcode.com/Ascend"
BRANCH = re.compile(r"core_[rv](\d+\.\d+)")


def adaptor_folder() -> Path | None:
    """Return the folder of the ``megatron_adaptor`` that an import would find, or None."""
    return _folder(ADAPTOR)


def transformer_engine_folders() -> list[Path]:
    """Return the folders of all packages ``transformer_engine`` on the path, the one that an import would find first."""
    first = _folder(TRANSFORMER_ENGINE)
    folders = [] if first is None else [first]
    for entry in sys.path:
        spec = PathFinder.find_spec(TRANSFORMER_ENGINE, [entry])
        if spec is not None and spec.origin is not None and Path(spec.origin).parent not in folders:
            folders.append(Path(spec.origin).parent)
    return folders


def _folder(package: str) -> Path | None:
    spec = find_spec(package)  # for a top-level name this imports nothing
    # Without origin: a folder of that name on sys.path that is not a package.
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def checkout_branch(folder: Path) -> str | None:
    """Return the branch of the git checkout that contains the package in ``folder``, or None if none is checked out."""
    head = folder.parent / ".git" / "HEAD"
    if not head.is_file():
        return None
    return head.read_text(encoding="utf-8").strip().partition("refs/heads/")[2] or None


def _check_adaptor(stack: Stack) -> str:
    branch = f"core_r{stack.name}.0"
    remedy = f"git clone -b {branch} {SOURCE}/MegatronAdaptor.git, and pip install --no-deps -e MegatronAdaptor"
    folder = adaptor_folder()
    if folder is None:
        raise PlatformError(f"stack {stack.name} on an NPU needs MegatronAdaptor, which is not installed: {remedy}")
    if not (folder / "utils" / "args_utils.py").is_file():
        # MindSpeed-LLM has a module of the same name.
        raise VersionError(
            f"{folder} is a {ADAPTOR} without utils/args_utils.py, and so not Ascend's MegatronAdaptor; remove it from the "
            f"path. To get the package: {remedy}"
        )
    checked_out = checkout_branch(folder)
    match = BRANCH.search(checked_out or "")
    if match and match.group(1) != stack.name:
        raise VersionError(
            f"MegatronAdaptor in {folder} is branch {checked_out}, for Megatron-Core {match.group(1)}; stack {stack.name} needs "
            f"branch {branch}: {remedy}"
        )
    return f"{adaptor_label(folder)} ({folder})"


def _check_transformer_engine(stack: Stack) -> str:
    remedy = f"git clone {SOURCE}/TransformerEngineNPU.git, and pip install --no-deps -e TransformerEngineNPU"
    folders = transformer_engine_folders()
    cuda = [folder for folder in folders if not ascend.is_for_npu(folder)]
    cuda_names = [str(folder) for folder in cuda] + [name for name in CUDA_PARTS if is_installed(name)]
    if not folders:
        raise PlatformError(
            f"stack {stack.name} on an NPU needs TransformerEngineNPU, and no {TRANSFORMER_ENGINE} is installed: {remedy}"
        )
    if cuda_names:
        mixed = len(folders) > len(cuda)
        engines = (
            "both TransformerEngineNPU and CUDA's Transformer Engine are" if mixed else "CUDA's Transformer Engine is"
        )
        raise PlatformError(
            f"{engines} installed ({', '.join(cuda_names)}); CUDA's cannot run on an NPU host: pip uninstall transformer-engine "
            "transformer-engine-torch transformer-engine-cu12" + ("" if mixed else f", then {remedy}")
        )
    return f"{installed_version(TRANSFORMER_ENGINE_DISTRIBUTION) or 'of an unknown version'} ({folders[0]})"


def _check_mindspeed(stack: Stack) -> str:
    mindspeed = tree.find()
    if mindspeed is None:
        return "not installed; it is optional"
    branch = tree.ADAPTOR_BRANCHES.get(stack.name)
    if branch is None or mindspeed.branch != branch:
        requirement = f"needs branch {branch}, or none" if branch else "is used without MindSpeed"
        raise VersionError(
            f"MindSpeed {mindspeed.name} is on the path ({mindspeed.folder / '__init__.py'}); stack {stack.name} {requirement}. "
            f"{mindspeed.needs}Remove it from the path, or check the branch out"
        )
    ascend.check_undeclared(MINDSPEED_IMPORTS)
    return f"{branch} ({mindspeed.folder})"


MINDSPEED_IMPORTS = (
    ("scipy", "MindSpeed", "pip install scipy"),
    ("triton", "MindSpeed", "pip install triton-ascend"),
    ("einops", "MindSpeed", "pip install einops"),
)

PREREQUISITES = (
    ascend.TORCH_NPU,
    ascend.CANN,
    ascend.TORCH_PAIR,
    Prerequisite("MegatronAdaptor", _check_adaptor),
    Prerequisite("TransformerEngineNPU", _check_transformer_engine),
    Prerequisite("MindSpeed", _check_mindspeed),
    ascend.MEGATRON,
)
"""Prerequisites in the order of checking: the failure of one explains those of later ones."""


def versions() -> dict[str, str]:
    """Return the branches or versions of the stack's packages, read from files; for reports."""
    adaptor, folders, mindspeed = adaptor_folder(), transformer_engine_folders(), tree.find()
    engine = installed_version(TRANSFORMER_ENGINE_DISTRIBUTION) or "of an unknown version"
    return {
        "MegatronAdaptor": "none" if adaptor is None else adaptor_label(adaptor),
        "TransformerEngineNPU": engine if folders else "none",
        "MindSpeed": "none" if mindspeed is None else mindspeed.name,
    }


def adaptor_label(folder: Path) -> str:
    """Return the branch of the MegatronAdaptor in ``folder``, or the version in its metadata, for reports."""
    # The metadata usually does not identify the branch: MindSpeed's has 0.12.1 on every branch from core_r0.12.1 on.
    return checkout_branch(folder) or installed_version(ADAPTOR_DISTRIBUTION) or "of an unknown branch"
