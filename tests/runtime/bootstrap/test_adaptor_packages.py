"""Prerequisites of provider ``megatron_adaptor``, read from files without an import, and what it refuses; a choice by stack."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megascend.config import Parallel
from megascend.config.rules import enforce
from megascend.errors import ConfigError, PlatformError, VersionError
from megascend.runtime.bootstrap import providers
from megascend.runtime.bootstrap.megatron_adaptor import packages
from megascend.runtime.bootstrap.megatron_adaptor.provider import RULES, check_batching
from megascend.runtime.bootstrap.mindspeed.arguments import Arguments
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


def test_packages_are_identified_by_files(folder: Path) -> None:
    write(folder, ADAPTOR, ENGINE, MINDSPEED, MINDSPEED_0_18, {".git/HEAD": "ref: refs/heads/core_r0.18.0\n"})
    assert look("MegatronAdaptor") == f"core_r0.18.0 ({folder / 'megatron_adaptor'})"
    assert look("TransformerEngineNPU").endswith(f"({folder / 'transformer_engine'})")
    assert packages.versions()["MegatronAdaptor"] == "core_r0.18.0"
    assert packages.versions()["MindSpeed"] == "branch core_r0.18.0"
    write(folder, {".git/HEAD": "1234567890abcdef\n"})  # no branch is checked out, which tells nothing
    assert look("MegatronAdaptor").startswith("of an unknown branch (")


HEAD_0_17 = {".git/HEAD": "ref: refs/heads/core_r0.17.0\n"}
PLAIN_MINDSPEED = {"mindspeed/__init__.py": "", "setup.py": "__version__ = '0.16.0'\n"}
PART_OF_CUDA = {"transformer_engine_torch/__init__.py": TRAP}
REFUSED: list[tuple[str, str, type[Exception], dict[str, str], list[str]]] = [
    ("MegatronAdaptor", "0.18", PlatformError, {}, ["which is not installed: git clone -b core_r0.18.0"]),
    ("MegatronAdaptor", "0.19", PlatformError, {}, ["stack 0.19 on an NPU needs MegatronAdaptor", "-b core_r0.19.0"]),
    (
        "MegatronAdaptor",
        "0.18",
        VersionError,
        ADAPTOR | HEAD_0_17,
        ["is branch core_r0.17.0", "needs branch core_r0.18.0"],
    ),
    (
        "MegatronAdaptor",
        "0.18",
        VersionError,
        {"megatron_adaptor/__init__.py": TRAP},
        ["so not Ascend's MegatronAdaptor"],
    ),
    ("TransformerEngineNPU", "0.18", PlatformError, {}, ["and no transformer_engine is installed"]),
    ("TransformerEngineNPU", "0.18", PlatformError, CUDA, ["CUDA's Transformer Engine is installed", "then git clone"]),
    (
        "TransformerEngineNPU",
        "0.18",
        PlatformError,
        ENGINE | PART_OF_CUDA,
        ["are installed (transformer_engine_torch)"],
    ),
    ("MindSpeed", "0.18", VersionError, MINDSPEED | MINDSPEED_0_17, ["branch core_r0.17.0", "core_r0.18.0, or none"]),
    ("MindSpeed", "0.19", VersionError, MINDSPEED | MINDSPEED_0_18, ["stack 0.19 is used without MindSpeed"]),
    (
        "MindSpeed",
        "0.18",
        VersionError,
        MINDSPEED,
        ["a branch on MegatronAdaptor", "needs branch core_r0.18.0, or none"],
    ),
    (
        "MindSpeed",
        "0.18",
        VersionError,
        PLAIN_MINDSPEED,
        ["MindSpeed 0.16.0 is on the path", "It is that of stack 0.16"],
    ),
]


@pytest.mark.parametrize(("name", "stack", "error", "files", "parts"), REFUSED)
def test_wrong_packages_are_refused_by_name(
    name: str, stack: str, error: type[Exception], files: dict[str, str], parts: list[str], folder: Path
) -> None:
    write(folder, files)
    message = refusal(name, error, stack)
    assert [part for part in parts if part not in message] == []


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


def model(**settings: object) -> Arguments:
    return Arguments({"context_parallel_size": 1, "attention_dropout": 0.0, "softmax_type": "vanilla"} | settings)


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
    enforce(RULES, model())
    enforce(RULES, model(cp_window_size=2))  # without context parallelism it has no effect
    assert sum(rule.when(model(**settings)) for rule in RULES) == 1
    with pytest.raises(ConfigError) as raised:
        enforce(RULES, model(**settings))
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
