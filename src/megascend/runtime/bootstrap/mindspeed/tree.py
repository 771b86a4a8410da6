"""Identify the MindSpeed on the path from its files, without importing it; prerequisites of its import.

From core_r0.17.0 on, ``import mindspeed`` imports MegatronAdaptor, which patches Megatron-Core at once. So a tree is identified
by its files: the version in ``mindspeed/__init__.py``, in ``setup.py`` next to the package or in pip's metadata, and the imports
of the package. The version is not sufficient: core_r0.17.0 and core_r0.18.0 still state 0.12.1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megascend.errors import PlatformError, VersionError
from megascend.runtime.bootstrap import ascend
from megascend.runtime.bootstrap.ascend import Prerequisite
from megascend.runtime.bootstrap.versions import STACKS, Stack, installed_version

PACKAGE = "mindspeed"
BRANCHES = {"0.16": "core_r0.16.0", "0.15": "core_r0.15.3"}
"""The branch for each row of the version table that runs on MindSpeed alone. Both support the same torch versions, because
``feature.py`` fixes ``get_device_capability`` of core_r0.15.3."""
ADAPTOR_BRANCHES = {"0.18": "core_r0.18.0"}
"""The branch that builds on MegatronAdaptor, for each row that can use one (provider ``megatron_adaptor``)."""
ADAPTOR_PACKAGE = "megatron_adaptor"
ADAPTOR_REQUIREMENTS = (
    "Megatron-Core 0.17.1, CANN 9.0, torch 2.7.1, torch_npu 26.0.0, MegatronAdaptor core_r0.17.0 and "
    "TransformerEngineNPU"
)
ADAPTOR_BRANCH_FILES = {
    "core/context_parallel/tenpu_adaptor.py": "core_r0.18.0",
    "core/context_parallel/adaptor.py": "core_r0.17.0",
}
"""Files that exist in only one of the branches that build on MegatronAdaptor."""

OLDER_BRANCHES = {
    "0.14": "branch core_r0.14.0 or dev, for Megatron-Core 0.14",
    "0.12": "one of the branches for Megatron-Core 0.12.1 (master, experimental, 1.x, 2.x and 26.x)",
    "1.1": "branch 1.0.RC2, for Megatron-Core 0.6",
    "0.0": "branch 1.0.RC1",
}
"""Descriptions of stated versions (major and minor) from which the branch's name does not follow."""

HOW_MINDSPEED = (
    "git clone -b {branch} https://gitcode.com/Ascend/MindSpeed.git, and pip install --no-deps -e MindSpeed (it is not on PyPI), "
    "or put the checkout on PYTHONPATH; see docs/npu.md"
)

# Hard imports that MindSpeed does not declare: (module, who needs it, what to do, in which stacks).
UNDECLARED = (
    ("scipy", "MindSpeed", "pip install scipy", ("0.15", "0.16")),
    ("torchair", "MindSpeed", "it comes with torch_npu's wheel: reinstall torch_npu", ("0.15", "0.16")),
    ("triton", "MindSpeed", "pip install triton-ascend", ("0.16",)),
    ("einops", "MindSpeed", "pip install einops", ("0.15", "0.16")),
    ("acl", "MindSpeed", "it comes with CANN: source its set_env.sh, which extends PYTHONPATH", ("0.15", "0.16")),
)


@dataclass(frozen=True)
class Tree:
    """A MindSpeed tree, described by its files.

    Attributes:
        folder: folder of the package ``mindspeed``.
        stated_versions: those stated in its files; more than one if ``__init__.py`` chooses between several.
        imports: third-party packages that ``import mindspeed`` would import.
    """

    folder: Path
    stated_versions: tuple[Version, ...]
    imports: tuple[str, ...]

    def version_for(self, stack: Stack) -> Version | None:
        """Return the stated version that matches ``stack``, or None if this is not the stack's MindSpeed."""
        if self.imports:
            return None
        required = version_of(stack).release[:2]
        return next((version for version in self.stated_versions if version.release[:2] == required), None)

    @property
    def branch(self) -> str | None:
        """Return the branch on MegatronAdaptor that only this tree's files can belong to, or None."""
        if ADAPTOR_PACKAGE not in self.imports:
            return None
        branches = [branch for file, branch in ADAPTOR_BRANCH_FILES.items() if (self.folder / file).is_file()]
        return branches[0] if len(branches) == 1 else None

    @property
    def name(self) -> str:
        """Return a name for messages: the branch if the files identify it, else the stated version."""
        version = " or ".join(map(str, self.stated_versions))
        if ADAPTOR_PACKAGE in self.imports:
            branch = f"branch {self.branch}" if self.branch else "a branch on MegatronAdaptor (core_r0.17.0 or later)"
            return f"{branch} (which gives itself version {version})" if version else branch
        if self.imports:
            return f"{version or 'of an unknown version'}, which imports {', '.join(self.imports)} when it is imported"
        return version or "of an unknown version"

    @property
    def needs(self) -> str:
        """Return a sentence about the stack that this tree is made for; empty if unknown."""
        if ADAPTOR_PACKAGE in self.imports:
            for stack, branch in ADAPTOR_BRANCHES.items():
                if branch == self.branch:
                    return f"It is that of stack {stack}, with provider megatron_adaptor. "
            return f"It needs {ADAPTOR_REQUIREMENTS}, which is no stack of megascend's. "
        if self.imports or not self.stated_versions:
            return ""
        minor = ".".join(map(str, self.stated_versions[0].release[:2]))
        supported = {version_of(stack).release[:2]: stack for stack in STACKS if stack.name in BRANCHES}
        if stack := supported.get(self.stated_versions[0].release[:2]):
            return f"It is that of stack {stack.name}, which needs Megatron-Core {stack.requirement('megatron-core')}. "
        return f"It is {OLDER_BRANCHES.get(minor, f'branch core_r{minor}.0, for Megatron-Core {minor}')}. "


def branch_of(stack: Stack) -> str:
    """Return the branch for ``stack`` that runs without MegatronAdaptor; raise VersionError if there is none."""
    if stack.name not in BRANCHES:
        raise VersionError(
            f"stack {stack.name} does not run on NPUs with provider 'mindspeed', which belongs to "
            f"{' or '.join(f'stack {name}' for name in BRANCHES)}; use 'megatron_adaptor', the default"
        )
    return BRANCHES[stack.name]


def version_of(stack: Stack) -> Version:
    """Return the version that the branch for ``stack`` states."""
    return Version(branch_of(stack).removeprefix("core_r"))


def find() -> Tree | None:
    """Return the MindSpeed that ``import mindspeed`` would find, or None."""
    spec = find_spec(PACKAGE)  # for a top-level name this imports nothing
    if spec is None or spec.origin is None:  # without origin: a folder of that name on sys.path that is not a package
        return None
    return read(Path(spec.origin))


def read(init: Path) -> Tree:
    """Read the tree whose package has the ``__init__.py`` ``init``."""
    module = _parse(init)
    versions = _stated_versions(module)
    setup = init.parent.parent / "setup.py"
    if not versions and setup.is_file():
        versions = _stated_versions(_parse(setup))
    if not versions and (installed := installed_version(PACKAGE)):
        versions = (Version(installed),)
    return Tree(init.parent, versions, tuple(dict.fromkeys(_foreign_imports(module))))


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise VersionError(
            f"{path} cannot be parsed as Python ({error}), so the version of MindSpeed is unknown"
        ) from error


def _stated_versions(module: ast.Module) -> tuple[Version, ...]:
    """Return the valid versions among the strings that a module assigns to ``__version__``."""
    versions = []
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets):
            try:
                versions.append(Version(str(node.value.value)))
            except InvalidVersion:
                continue
    return tuple(versions)


def _foreign_imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            package = name.partition(".")[0]
            if package != PACKAGE and package not in sys.stdlib_module_names:
                yield package


def _check_mindspeed(stack: Stack) -> str:
    mindspeed, branch = find(), branch_of(stack)
    instructions = HOW_MINDSPEED.format(branch=branch)
    if mindspeed is None:
        raise PlatformError(f"platform 'npu' needs MindSpeed ({branch}), which is not installed: {instructions}")
    version = mindspeed.version_for(stack)
    if version is None:
        supported = " and ".join(BRANCHES.values())
        raise VersionError(
            f"MindSpeed {mindspeed.name} is on the path ({mindspeed.folder / '__init__.py'}); stack {stack.name} needs branch "
            f"{branch}. {mindspeed.needs}Supported branches: {supported}. To get it: {instructions}"
        )
    return f"{version} ({mindspeed.folder})"


def _check_undeclared_imports(stack: Stack) -> str:
    return ascend.check_undeclared([row[:3] for row in UNDECLARED if stack.name in row[3]])


def _check_transformer_engine(stack: Stack) -> str:
    """Check that no Transformer Engine is installed: it would be imported instead of MindSpeed's dummy, and crash."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return "none is installed, as it must be"
    if spec.origin is not None and ascend.is_for_npu(Path(spec.origin).parent):
        raise PlatformError(
            f"TransformerEngineNPU is installed as transformer_engine ({spec.origin}), which MindSpeed would import in place of "
            "its layers: pip uninstall transformer-engine"
        )
    raise PlatformError(
        f"CUDA's Transformer Engine is installed ({spec.origin}); it cannot run on NPUs: pip uninstall transformer-engine "
        "transformer-engine-torch transformer-engine-cu12"
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
