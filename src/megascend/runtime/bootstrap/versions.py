"""The version table: combinations of package versions that were tested together. Everything here is pure data.

A combination outside the table is refused, because its errors might only show hours later, in the numbers. The bounds in
pyproject.toml are written from it (scripts/docs_tables.py), so that pip installs nothing that is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megascend.errors import MissingDependencyError, VersionError
from megascend.surroundings import is_installed

PACKAGES = ("torch", "megatron-core", "mcore-bridge", "transformers", "peft", "numpy")


@dataclass(frozen=True)
class Stack:
    """One row: versions that were tested together.

    Attributes:
        undeclared: modules that Megatron-Core imports without declaring them as requirements.
        further: requirements of this row's extra that need no check at run time.
    """

    name: str
    megatron_core: str
    mcore_bridge: str
    torch: str
    torch_npu: str
    transformers: str
    peft: str
    numpy: str
    undeclared: tuple[str, ...] = ()
    further: tuple[str, ...] = ()

    def requirement(self, package: str) -> SpecifierSet:
        """Return the versions of ``package`` (its PyPI name) that this row admits."""
        # By default a SpecifierSet excludes release candidates and nightly builds.
        return SpecifierSet(getattr(self, package.replace("-", "_")), prereleases=True)

    def __str__(self) -> str:
        parts = ", ".join(f"{package}{self.requirement(package)}" for package in PACKAGES)
        return f"stack {self.name}: {parts}"


# torch_npu's minor version always equals torch's. The first row is the recommended one. Its extra installs the lowest versions of
# Megatron-Core and mcore-bridge, those that were tested, and of the others the newest in range.
STACKS = (
    Stack(
        name="0.16",
        megatron_core=">=0.16.1,<0.17",
        mcore_bridge=">=1.6.5,<1.7",
        torch=">=2.6,<2.16",
        torch_npu=">=2.6,<2.15",
        transformers=">=4.57,<5.25",
        peft=">=0.19,<0.21",
        numpy=">=1.26,<3",
    ),
    # From 0.17 on Megatron-Core needs Python 3.12.
    Stack(
        name="0.19",
        megatron_core=">=0.19.2,<0.20",
        mcore_bridge=">=1.6.5,<1.7",
        torch=">=2.9,<2.16",
        torch_npu=">=2.9,<2.15",
        transformers=">=4.57,<5.25",
        peft=">=0.19,<0.21",
        numpy=">=1.26,<3",
        undeclared=("triton",),
    ),
    Stack(
        name="0.18",
        megatron_core=">=0.18,<0.19",
        mcore_bridge=">=1.6.5,<1.7",
        torch=">=2.9,<2.16",
        torch_npu=">=2.9,<2.15",
        transformers=">=4.57,<5.25",
        peft=">=0.19,<0.21",
        numpy=">=1.26,<3",
        undeclared=("triton",),
    ),
    Stack(
        name="0.15",
        megatron_core=">=0.15.3,<0.16",
        mcore_bridge=">=1.4.3,<1.5",
        torch=">=2.6,<2.16",
        torch_npu=">=2.6,<2.15",
        transformers=">=4.57,<5.11",
        peft=">=0.19,<0.20",
        numpy=">=1.26,<2",  # Megatron-Core 0.15 requires it
        further=("pyarrow<22",),  # the last one that takes numpy 1
    ),
)


CANN = (
    ("8.2.RC1", "8.0.RC2", ("2.6.0",)),
    ("8.3.RC1", "8.0.RC2", ("2.6.0.post3", "2.7.1", "2.8.0")),
    ("8.5.0", "8.0.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0")),
    ("9.0.0", "8.1.RC1", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0")),
    ("9.1.0", "8.5.0", ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0")),
    (
        "9.2.0",
        "8.5.0",
        ("2.7.1.post11", "2.9.0.post9", "2.10.0.post7", "2.11.0.post3", "2.12.0.post3", "2.13.0", "2.14.0"),
    ),
)
"""Releases of CANN, the oldest that torch_npu's release notes call compatible, and the first torch_npu of each torch for it."""


def cann_for(torch_npu: Version) -> tuple[str, str] | None:
    """Return the CANN that ``torch_npu`` was released with and the oldest that it works with; None if the table lacks it."""
    first = [(Version(wheel), cann, oldest) for cann, oldest, wheels in CANN for wheel in wheels]
    same = [row for row in first if row[0].release[:2] == torch_npu.release[:2] and row[0] <= torch_npu]
    return max(same)[1:] if same else None


@dataclass(frozen=True)
class PackageCheck:
    """Result of comparing one installed package with a row of the table; ``problem`` is empty if the row admits it."""

    package: str
    installed: str | None
    required: str
    problem: str


def installed_version(package: str) -> str | None:
    """Return a package's version in pip's metadata; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """Return the version of every package of the table, None if it is not installed."""
    return {package: installed_version(package) for package in PACKAGES}


def nearest_stack(versions: dict[str, str | None], packages: Sequence[str] = PACKAGES) -> Stack:
    """Return the row that admits most of the ``versions`` of ``packages``; Megatron-Core's version decides a tie."""
    core = versions.get("megatron-core")
    series = "" if core is None else ".".join(map(str, Version(core).release[:2]))

    def score(stack: Stack) -> tuple[int, bool, bool]:
        admitted = [package for package in packages if _admits(stack, package, versions.get(package))]
        return len(admitted), "megatron-core" in admitted, stack.name == series

    return max(STACKS, key=score)


def findings(versions: dict[str, str | None], packages: Sequence[str] = PACKAGES) -> list[PackageCheck]:
    """Compare ``versions`` of ``packages`` with the nearest row."""
    stack = nearest_stack(versions, packages)
    result = []
    for package in packages:
        version, requirement = versions.get(package), str(stack.requirement(package))
        state = "is not installed" if version is None else f"{version} is installed"
        problem = f"{package} {state}; stack {stack.name} needs {package}{requirement}"
        result.append(PackageCheck(package, version, requirement, "" if _admits(stack, package, version) else problem))
    return result


def require_package(package: str, versions: dict[str, str | None]) -> None:
    """Raise VersionError if the version of ``package`` is outside the table, regardless of other packages."""
    (problem,) = [finding.problem for finding in findings(versions) if finding.package == package]
    if problem:
        raise VersionError(f"{problem}. Install a version inside the table of docs/versions.md")


def require_supported(versions: dict[str, str | None], packages: Sequence[str] = PACKAGES) -> Stack:
    """Return the row that admits ``versions`` of ``packages``, regardless of other packages; raise VersionError if none does."""
    stack = nearest_stack(versions, packages)
    problems = [finding.problem for finding in findings(versions, packages) if finding.problem]
    if problems:
        raise VersionError(
            "; ".join(problems)
            + f". Nearest supported row: {stack}. Install it with: pip install 'megascend[stack-{stack.name.replace('.', '-')}]'"
        )
    return stack


def require_undeclared(stack: Stack) -> None:
    """Raise MissingDependencyError for a module that Megatron-Core of ``stack`` imports and that is not installed."""
    missing = [module for module in stack.undeclared if not is_installed(module)]
    if missing:
        raise MissingDependencyError(
            f"megatron-core of stack {stack.name} imports {', '.join(missing)} without declaring it, and it is not installed: "
            f"pip install {' '.join(missing)}, or 'megascend[stack-{stack.name.replace('.', '-')}]'"
        )


def _admits(stack: Stack, package: str, version: str | None) -> bool:
    return version is not None and Version(version) in stack.requirement(package)
