"""Traps of MindSpeed's patches: repatching does not undo megascend's patches, and lost patches are detected.

Those of the environment are in ``test_traps_environment.py``, those of models in ``test_traps_models.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megascend
from megascend.config import Parallel
from megascend.runtime.bootstrap import Runtime
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed

EXTENSIONS = "megatron.core.extensions.transformer_engine"

# --- patching again ---

LAYOUTS = {
    "ring": (Parallel(context=2), 2),
    "single": (Parallel(), 1),
    "all_gather": (Parallel(context=2, context_algorithm="all_gather"), 2),
    "last": (Parallel(), 1),
}


def qualified_name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def state() -> dict[str, Any]:
    """Return state that MindSpeed's patches must not change."""
    extensions, arguments = import_module(EXTENSIONS), import_module("mindspeed.args_utils").get_full_args()
    rotary = {
        name: qualified_name(vars(module)["apply_rotary_pos_emb"])
        for name, module in sys.modules.copy().items()
        if name.startswith("mcore_bridge.") and "apply_rotary_pos_emb" in vars(module)
    }
    return {
        "rotary": rotary,
        "linears": [extensions.TEColumnParallelLinear.__module__, extensions.TERowParallelLinear.__module__],
        "attention": extensions.TEDotProductAttention.__qualname__,
        "level": arguments.optimization_level,
        "capability": torch.cuda.get_device_capability(torch.device("npu", 0)),  # as torch's collectives ask
    }


def states_in_turn(runtime: Runtime) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state after each layout, and stored and passed arguments of every repatch."""
    adaptor, args_utils = import_module("mindspeed.megatron_adaptor"), import_module("mindspeed.args_utils")
    repatch, repatches = adaptor.repatch, []

    def recording(arguments: dict[str, Any]) -> None:
        current = vars(args_utils._MINDSPEED_ARGS)  # None, were nothing seeded: "args is not initialized" upstream
        repatches.append(
            {name: (current[name], arguments[name]) for name in ("context_parallel_size", "optimization_level")}
        )
        repatch(arguments)

    adaptor.repatch = recording
    states_by_layout = {}
    for name, (parallel, world_size) in LAYOUTS.items():
        runtime.configure_topology(plan(parallel, world_size))
        states_by_layout[name] = state()
    return states_by_layout, repatches


@pytest.fixture(scope="module")
def states(npu: Runtime) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (result,) = run_distributed(states_in_turn, 1, npu, init=False)
    return result


def test_mcore_bridges_rotary_embedding_survives_every_repatch(states) -> None:
    """MindSpeed's function lacks ``mla_rotary_interleaved`` and would replace it in each importing module."""
    first = states[0]["single"]["rotary"]
    assert len(first) >= 3
    assert all(owner.startswith("mcore_bridge.") for owner in first.values()), first
    assert all(layout_state["rotary"] == first for layout_state in states[0].values())


def test_parallel_linears_are_megatrons_after_every_repatch(states) -> None:
    for layout_state in states[0].values():
        assert layout_state["linears"] == ["megatron.core.tensor_parallel.layers"] * 2


def test_attention_class_follows_the_algorithm(states) -> None:
    """Branch 0.15 would choose the class without ring attention ("Unsupported CP strategy")."""
    kinds = {name: layout_state["attention"] for name, layout_state in states[0].items()}
    assert kinds["ring"] == "MindSpeedCPDotProductAttention"
    assert kinds["single"] == kinds["last"] == kinds["all_gather"] != kinds["ring"]
    assert kinds["single"].endswith("TEDotProductAttention")


def test_context_parallelism_is_patched_at_level_2_with_arguments_set(states) -> None:
    assert [layout_state["level"] for layout_state in states[0].values()] == [2, 0, 2, 0]
    assert len(states[1]) == len(LAYOUTS)
    for observed in states[1]:
        (stored, passed), (level_stored, level) = observed["context_parallel_size"], observed["optimization_level"]
        assert stored == passed
        assert level_stored == level == (2 if passed > 1 else 0)


def test_device_capability_accepts_a_device(states) -> None:
    """Branch 0.15 replaces it by a function without parameters, which breaks ``broadcast`` of torch 2.13."""
    assert {tuple(layout_state["capability"]) for layout_state in states[0].values()} == {(9, 0)}

    def work() -> list[float]:
        torch.npu.set_device(dist.get_rank())  # hccl takes one rank a card
        tensor = torch.full((2,), float(dist.get_rank()), device="npu")
        dist.broadcast(tensor, src=1)
        return tensor.tolist()

    assert run_distributed(work, 2, backend="hccl") == [[1.0, 1.0]] * 2


class Lazy(ModuleType):
    """Lazy module, like transformers: any attribute lookup tries an import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__.setdefault("asked", []).append(name)
        raise RuntimeError(f"{name} needs torchvision, which is not installed")


def fires(runtime: Runtime, guarded: bool) -> bool:
    """Check whether repatching looks up missing names in lazy modules; transformers' own may crash first."""
    lazy = sys.modules["lazy_for_a_test"] = Lazy("lazy_for_a_test")
    if not guarded:
        del import_module("mindspeed.patch_utils").hasattr
    try:
        runtime.configure_topology(plan(Parallel(context=2), 2))
    except (RuntimeError, ImportError):
        if guarded:
            raise
        return True
    return "asked" in vars(lazy)


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "as MindSpeed comes"])
def test_scan_does_not_trigger_lazy_modules(guarded: bool, npu: Runtime) -> None:
    assert run_distributed(fires, 1, npu, guarded, init=False) == [not guarded]


# --- the checks after patching ---


def lose_transformer_engine(config: Any) -> None:
    import_module(EXTENSIONS).HAVE_TE = False


def other_attention(config: Any) -> None:
    import_module(EXTENSIONS).TEDotProductAttention = torch.nn.Module


def other_linear(config: Any) -> None:
    import_module(EXTENSIONS).TERowParallelLinear = torch.nn.Linear


def compile_for_cuda(config: Any) -> None:
    import_module("megatron.core.jit").jit_fuser = torch.compiler.disable


def other_optimizer(config: Any) -> None:
    import_module("megatron.core.optimizer").Adam = torch.optim.AdamW


def other_rotary(config: Any) -> None:
    name = next(
        n for n, m in sys.modules.items() if n.startswith("mcore_bridge.") and "apply_rotary_pos_emb" in vars(m)
    )
    sys.modules[name].apply_rotary_pos_emb = len


def lose_a_field(config: Any) -> None:
    config.use_flash_attn = False


BROKEN: list[tuple[Callable[[Any], None], str]] = [
    (lose_transformer_engine, "HAVE_TE is False"),
    (other_attention, "TEDotProductAttention is torch.nn.modules.module.Module, not MindSpeed's"),
    (other_linear, "TERowParallelLinear is torch.nn.modules.linear.Linear, not Megatron's own RowParallelLinear"),
    (compile_for_cuda, "jit_fuser is torch.compiler.disable, which would compile for CUDA"),
    (other_optimizer, "the optimizer's Adam is torch.optim.adamw.AdamW, not MindSpeed's"),
    (other_rotary, "is no longer mcore-bridge's"),
    (lose_a_field, "use_flash_attn=False instead of True: its class has lost MindSpeed's patch"),
]


def problems_by_cause(runtime: Runtime) -> list[list[str]]:
    from megascend.runtime.bootstrap.mindspeed import arguments, verification

    for parallel, world_size in LAYOUTS.values():
        runtime.configure_topology(plan(parallel, world_size))
    provider: Any = runtime.provider
    expected = arguments.seed(provider._defaults, 1, "ring")
    config = type("Config", (), dict(expected))()

    def problems(cause: Callable[[Any], None] | None) -> list[str]:
        if cause is not None:
            cause(config)
        return verification.problems(config, expected, provider._feature.rotary)

    return [problems(None)] + [run_distributed(problems, 1, cause, init=False)[0] for cause, _ in BROKEN]


def test_lost_patches_are_reported_by_name(npu: Runtime) -> None:
    ((none, *problems_found),) = run_distributed(problems_by_cause, 1, npu, init=False)
    assert none == []
    for problems, (_, message) in zip(problems_found, BROKEN, strict=True):
        assert len(problems) == 1
        assert message in problems[0]


def test_kernels_are_not_selected_by_is_cuda() -> None:
    """``transfer_to_npu`` makes ``is_cuda`` True for tensors on an NPU, where CUDA's Triton kernels must not run."""
    source = Path(megascend.__file__).parent
    assert [path for path in source.rglob("*.py") if ".is_cuda" in path.read_text(encoding="utf-8")] == []
