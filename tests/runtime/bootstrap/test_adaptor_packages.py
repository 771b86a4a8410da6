"""Prerequisites of provider ``megatron_adaptor``, read from files without an import, and what it refuses; a choice by stack."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megascend.config import Parallel
from megascend.config.rules import enforce
from megascend.errors import ConfigError, PlatformError, VersionError
from megascend.runtime.bootstrap import providers
from megascend.runtime.bootstrap.ascend import findings
from megascend.runtime.bootstrap.megatron_adaptor import packages
from megascend.runtime.bootstrap.megatron_adaptor.provider import RULES, ModelFields, check_batching
from megascend.runtime.bootstrap.providers import ProviderSetup, create, names
from megascend.runtime.bootstrap.versions import STACKS
from megascend.runtime.platforms import load

STACK = {stack.name: stack for stack in STACKS}
TRAP = "raise SystemExit('a package was imported')\n"
ADAPTOR = {"megatron_adaptor/__init__.py": TRAP, "megatron_adaptor/utils/args_utils.py": TRAP}
ENGINE = {"transformer_engine/__init__.py": TRAP + "import torch_npu\n"}
CUDA = {"transformer_engine/__init__.py": TRAP + "import transformer_engine_torch\n"}
MINDSPEED = {"mindspeed/__init__.py": "import megatron_adaptor\n" + TRAP}
MINDSPEED_0_18 = {"mindspeed/core/context_parallel/tenpu_adaptor.py": TRAP}
MINDSPEED_0_17 = {"mindspeed/core/context_parallel/adaptor.py": TRAP}
TOP = ("megatron_adaptor", "transformer_engine", "mindspeed", "transformer_engine_torch")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is first on ``sys.path``; the packages are not imported."""
    for name in [module for module in sys.modules if module.partition(".")[0] in TOP]:
        monkeypatch.delitem(sys.modules, name)
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.syspath_prepend(first)
    return first


def write(folder: Path, *files: dict[str, str]) -> None:
    for name, text in {name: text for part in files for name, text in part.items()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    importlib.invalidate_caches()


def look(name: str, stack: str = "0.18") -> str:
    (prerequisite,) = [entry for entry in packages.PREREQUISITES if entry.name == name]
    return prerequisite.check(STACK[stack])


def refusal(name: str, error: type[Exception], stack: str = "0.18") -> str:
    with pytest.raises(error) as raised:
        look(name, stack)
    assert not [module for module in sys.modules if module.partition(".")[0] in TOP]
    return str(raised.value)


@pytest.mark.parametrize("stack", ["0.18", "0.19"])
def test_missing_packages_are_named_with_their_branches(stack: str, folder: Path) -> None:
    message = refusal("MegatronAdaptor", PlatformError, stack)
    assert (
        f"stack {stack} on an NPU needs MegatronAdaptor, which is not installed: git clone -b core_r{stack}.0"
        in message
    )
    message = refusal("TransformerEngineNPU", PlatformError, stack)
    assert "needs TransformerEngineNPU, and no transformer_engine is installed" in message
    assert look("MindSpeed", stack) == "not installed; it is optional"


def test_packages_are_identified_by_files(folder: Path) -> None:
    write(folder, ADAPTOR, ENGINE, MINDSPEED, MINDSPEED_0_18, {".git/HEAD": "ref: refs/heads/core_r0.18.0\n"})
    assert look("MegatronAdaptor") == f"core_r0.18.0 ({folder / 'megatron_adaptor'})"
    assert look("TransformerEngineNPU").endswith(f"({folder / 'transformer_engine'})")
    assert packages.versions()["MegatronAdaptor"] == "core_r0.18.0"
    assert packages.versions()["MindSpeed"] == "branch core_r0.18.0"


def test_adaptor_of_another_core_is_a_wrong_pair(folder: Path) -> None:
    write(folder, ADAPTOR, {".git/HEAD": "ref: refs/heads/core_r0.17.0\n"})
    message = refusal("MegatronAdaptor", VersionError)
    assert "is branch core_r0.17.0, for Megatron-Core 0.17; stack 0.18 needs branch core_r0.18.0" in message
    write(folder, {".git/HEAD": "1234567890abcdef\n"})  # no branch is checked out, which tells nothing
    assert look("MegatronAdaptor").startswith("of an unknown branch (")


def test_module_of_the_same_name_is_not_the_adaptor(folder: Path) -> None:
    write(folder, {"megatron_adaptor/__init__.py": TRAP})
    assert "and so not Ascend's MegatronAdaptor" in refusal("MegatronAdaptor", VersionError)


def test_cudas_transformer_engine_is_refused(folder: Path) -> None:
    write(folder, CUDA)
    message = refusal("TransformerEngineNPU", PlatformError)
    assert message.startswith(f"CUDA's Transformer Engine is installed ({folder / 'transformer_engine'})")
    assert "pip uninstall transformer-engine" in message
    assert "then git clone" in message


@pytest.mark.parametrize("first", ["npu", "cuda"])
def test_both_transformer_engines_are_refused(
    first: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    write(folder, ENGINE if first == "npu" else CUDA)
    write(second, CUDA if first == "npu" else ENGINE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    message = refusal("TransformerEngineNPU", PlatformError)
    cuda = second if first == "npu" else folder
    assert message.startswith("both TransformerEngineNPU and CUDA's Transformer Engine are installed ")
    assert str(cuda / "transformer_engine") in message


def test_part_of_cudas_transformer_engine_beside_the_npus_is_refused(folder: Path) -> None:
    write(folder, ENGINE, {"transformer_engine_torch/__init__.py": TRAP})
    message = refusal("TransformerEngineNPU", PlatformError)
    assert "both TransformerEngineNPU and CUDA's Transformer Engine are installed (transformer_engine_torch)" in message


@pytest.mark.parametrize(
    ("files", "stack", "parts"),
    [
        (MINDSPEED_0_17, "0.18", ["branch core_r0.17.0", "stack 0.18 needs branch core_r0.18.0, or none"]),
        (
            MINDSPEED_0_18,
            "0.19",
            ["branch core_r0.18.0", "stack 0.19 is used without MindSpeed", "It is that of stack 0.18"],
        ),
        ({}, "0.18", ["a branch on MegatronAdaptor", "needs branch core_r0.18.0, or none"]),
    ],
)
def test_mindspeed_of_another_branch_is_a_wrong_pair(
    files: dict[str, str], stack: str, parts: list[str], folder: Path
) -> None:
    write(folder, MINDSPEED, files)
    message = refusal("MindSpeed", VersionError, stack)
    for part in (*parts, f"is on the path ({folder / 'mindspeed' / '__init__.py'})"):
        assert part in message


def test_mindspeed_without_the_adaptor_is_a_wrong_pair(folder: Path) -> None:
    write(folder, {"mindspeed/__init__.py": "", "setup.py": "__version__ = '0.16.0'\n"})
    message = refusal("MindSpeed", VersionError)
    assert "MindSpeed 0.16.0 is on the path" in message
    assert "It is that of stack 0.16" in message


def test_all_prerequisites_are_reported(folder: Path) -> None:
    report = {finding.name: finding for finding in findings(packages.PREREQUISITES, STACK["0.18"])}
    assert list(report) == [prerequisite.name for prerequisite in packages.PREREQUISITES]
    assert report["MegatronAdaptor"].problem
    assert not report["MindSpeed"].problem


# --- choice by stack ---


@pytest.mark.parametrize(
    ("stack", "default"),
    [("0.19", "megatron_adaptor"), ("0.18", "megatron_adaptor"), ("0.16", "mindspeed"), ("0.15", "mindspeed")],
)
def test_stack_decides_the_default_provider(stack: str, default: str) -> None:
    setup = ProviderSetup(load("npu"), STACK[stack], Parallel())
    assert create(None, setup).name == create(default, setup).name == default
    assert names("npu", stack)[0] == default
    other = ({"mindspeed", "megatron_adaptor"} - {default}).pop()
    with pytest.raises(
        VersionError, match=rf"provider '{other}' is for stack .*, and stack {stack} is installed; .*'npu': {default}"
    ):
        create(other, setup)
    assert set(providers.packages()) == {"mindspeed", "megatron_adaptor"}


# --- models and batches ---


def model(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{"context_parallel_size": 1, "attention_dropout": 0.0, "softmax_type": "vanilla"} | settings
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_size": (128, 0)}, "window_size: 128, 0 with TransformerEngineNPU"),
        ({"softmax_type": "learnable"}, "softmax_type: learnable with TransformerEngineNPU"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1 with TransformerEngineNPU: its random stream"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant: dsa with"),
        ({"is_hybrid_model": True}, "is_hybrid_model: true with TransformerEngineNPU"),
        ({"context_parallel_size": 4, "cp_window_size": 2}, "cp_window_size: 2 with MindSpeed: it reads this from"),
        ({"context_parallel_size": 2, "use_cp_send_recv_overlap": True}, "use_cp_send_recv_overlap: true with"),
    ],
)
def test_model_that_may_be_computed_otherwise_is_refused(settings: dict[str, object], message: str) -> None:
    enforce(RULES, ModelFields(model()))
    enforce(RULES, ModelFields(model(cp_window_size=2)))  # without context parallelism it has no effect
    assert sum(rule.when(ModelFields(model(**settings))) for rule in RULES) == 1
    with pytest.raises(ConfigError) as raised:
        enforce(RULES, ModelFields(model(**settings)))
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) <= 160


def test_packed_samples_by_all_to_all_are_refused() -> None:
    for size, algorithm, packing in (
        (1, "ulysses", True),
        (2, "ring", True),
        (2, "all_gather", True),
        (2, "ulysses", False),
    ):
        check_batching(size, algorithm, packing=packing)
    with pytest.raises(ConfigError, match=r"batching\.packing with parallel\.context=2 and .*ulysses"):
        check_batching(2, "ulysses", packing=True)
