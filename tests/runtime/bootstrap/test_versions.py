"""The version table: comparison of versions, not of strings."""

from __future__ import annotations

import pytest

from megascend.errors import MissingDependencyError, VersionError
from megascend.runtime.bootstrap import versions
from megascend.runtime.bootstrap.mindspeed import tree
from megascend.runtime.bootstrap.versions import (
    PACKAGES,
    STACKS,
    installed_versions,
    nearest_stack,
    require_supported,
)

GOOD = {
    "0.19": {
        "torch": "2.13.0",
        "megatron-core": "0.19.2",
        "mcore-bridge": "1.6.5",
        "transformers": "5.24.0",
        "peft": "0.20.0",
        "numpy": "2.4.6",
    },
    "0.18": {
        "torch": "2.13.0",
        "megatron-core": "0.18.0",
        "mcore-bridge": "1.6.5",
        "transformers": "5.24.0",
        "peft": "0.20.0",
        "numpy": "2.4.6",
    },
    "0.16": {
        "torch": "2.13.0",
        "megatron-core": "0.16.1",
        "mcore-bridge": "1.6.5",
        "transformers": "5.23.0",
        "peft": "0.20.0",
        "numpy": "2.4.6",
    },
    "0.15": {
        "torch": "2.13.0",
        "megatron-core": "0.15.3",
        "mcore-bridge": "1.4.3",
        "transformers": "5.10.4",
        "peft": "0.19.1",
        "numpy": "1.26.4",
    },
}


def change(stack: str, **changes: str | None) -> dict[str, str | None]:
    return GOOD[stack] | {name.replace("_", "-"): version for name, version in changes.items()}


@pytest.mark.difference  # differs: versions of packages
def test_this_environment_is_a_row_of_the_table():
    assert require_supported(installed_versions()) in STACKS


def test_a_row_names_its_branch_of_mindspeed_or_raises():
    for stack in STACKS:
        if stack.name in ("0.16", "0.15"):
            assert tree.branch_of(stack).startswith(f"core_r{stack.name}.")
            continue
        with pytest.raises(
            VersionError,
            match=rf"stack {stack.name} does not run on NPUs with provider 'mindspeed'.*stack 0\.16 or stack 0\.15",
        ):
            tree.branch_of(stack)


@pytest.mark.parametrize(
    ("stack", "package", "version", "accepted"),
    [
        ("0.15", "megatron_core", "0.15.10", True),  # below 0.15.3 as a string
        ("0.15", "megatron_core", "0.15.2", False),
        ("0.16", "mcore_bridge", "1.6.10", True),
        ("0.16", "mcore_bridge", "1.10.0", False),  # below 1.7 as a string
        ("0.16", "torch", "2.10.0", True),  # below 2.6 as a string
        ("0.16", "torch", "2.5.1", False),
        ("0.16", "torch", "2.15.0", True),
        ("0.16", "torch", "2.16.0", False),
        ("0.16", "torch", "2.8.0+cu128", True),  # local versions: the build does not matter
        ("0.16", "torch", "2.9.0.dev20250901", True),
        ("0.16", "transformers", "4.9.0", False),
        ("0.16", "transformers", "4.57.0", True),
        ("0.15", "transformers", "5.9.0", True),
        ("0.15", "transformers", "5.11.0", False),
        ("0.15", "peft", "0.20.0", False),
        ("0.15", "numpy", "2.0.0", False),
        ("0.16", "megatron_core", "0.16.2rc1", True),  # newer than 0.16.1
        ("0.16", "megatron_core", "0.16.1rc0", False),  # older than 0.16.1
        ("0.16", "megatron_core", "0.16.0", False),
        ("0.19", "megatron_core", "0.19.1", False),
        ("0.18", "megatron_core", "0.18.2", True),
        ("0.19", "mcore_bridge", "1.6.4", False),
    ],
)
def test_versions_are_compared_as_versions(stack, package, version, accepted):
    versions_found = change(stack, **{package: version})
    if accepted:
        assert require_supported(versions_found).name == stack
        return
    with pytest.raises(VersionError) as raised:
        require_supported(versions_found)
    requirement = next(s for s in STACKS if s.name == stack).requirement(package)
    message = str(raised.value)
    assert f"{package.replace('_', '-')} {version} is installed; stack {stack} needs" in message
    assert f"{package.replace('_', '-')}{requirement}" in message
    assert f"Nearest supported row: stack {stack}:" in message
    assert f"pip install 'megascend[stack-{stack.replace('.', '-')}]'" in message


@pytest.mark.parametrize(
    ("installed", "nearest"),
    [
        (change("0.16", mcore_bridge="1.4.3"), "0.16"),
        (change("0.15", mcore_bridge="1.6.5"), "0.15"),
        (change("0.16", megatron_core="0.15.3", peft="0.19.1"), "0.16"),
        (change("0.15", megatron_core="0.14.0"), "0.15"),
        (change("0.19", mcore_bridge="1.4.3"), "0.19"),
        (dict.fromkeys(PACKAGES), "0.16"),
    ],
)
def test_mixed_installation_error_names_the_nearest_row(installed, nearest):
    assert nearest_stack(installed).name == nearest
    with pytest.raises(VersionError, match=f"Nearest supported row: stack {nearest}:"):
        require_supported(installed)


@pytest.mark.difference  # differs: triton, which Megatron-Core imports from 0.17 on
def test_missing_undeclared_module_is_named(monkeypatch):
    rows = {stack.name: stack for stack in STACKS}
    monkeypatch.setattr(versions, "is_installed", lambda module: False)
    versions.require_undeclared(rows["0.16"])
    with pytest.raises(MissingDependencyError, match=r"stack 0\.19 imports triton .* pip install triton.*stack-0-19"):
        versions.require_undeclared(rows["0.19"])
    monkeypatch.setattr(versions, "is_installed", lambda module: module == "triton")
    versions.require_undeclared(rows["0.19"])
