"""Traps of MindSpeed's patches: what patching again would undo stays done, and what is lost is found.

Those of the environment are in ``test_traps_environment.py``, those of models in ``test_traps_models.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascend.bootstrap import Runtime
from megascend.config import Parallel
from megascend.testing import run_distributed
from megascend.topology.topology import plan

EXTENSIONS = "megatron.core.extensions.transformer_engine"

# --- patching again ---

LAYOUTS = {
    "ring": (Parallel(context=2), 2),
    "single": (Parallel(), 1),
    "all_gather": (Parallel(context=2, context_algorithm="all_gather"), 2),
    "last": (Parallel(), 1),
}


def place(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def state() -> dict[str, Any]:
    """What MindSpeed's patches would change and must not."""
    extensions, arguments = import_module(EXTENSIONS), import_module("mindspeed.args_utils").get_full_args()
    rotary = {
        name: place(vars(module)["apply_rotary_pos_emb"])
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
    """The state after each layout, and what every repatch was given and found."""
    adaptor, args_utils = import_module("mindspeed.megatron_adaptor"), import_module("mindspeed.args_utils")
    repatch, repatches = adaptor.repatch, []

    def recording(arguments: dict[str, Any]) -> None:
        kept = vars(args_utils._MINDSPEED_ARGS)  # None, were nothing seeded: "args is not initialized" upstream
        repatches.append(
            {name: (kept[name], arguments[name]) for name in ("context_parallel_size", "optimization_level")}
        )
        repatch(arguments)

    adaptor.repatch = recording
    found = {}
    for name, (parallel, world_size) in LAYOUTS.items():
        runtime.configure_topology(plan(parallel, world_size))
        found[name] = state()
    return found, repatches


@pytest.fixture(scope="module")
def states(npu: Runtime) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (found,) = run_distributed(states_in_turn, 1, npu, init=False)
    return found


def test_mcore_bridges_rotary_embedding_survives_every_repatch(states) -> None:
    """MindSpeed's lacks ``mla_rotary_interleaved``, and is put into each module that imported the name."""
    first = states[0]["single"]["rotary"]
    assert len(first) >= 3
    assert all(owner.startswith("mcore_bridge.") for owner in first.values()), first
    assert all(found["rotary"] == first for found in states[0].values())


def test_parallel_linears_are_megatrons_own_after_every_repatch(states) -> None:
    for found in states[0].values():
        assert found["linears"] == ["megatron.core.tensor_parallel.layers"] * 2


def test_the_attention_class_follows_the_algorithm(states) -> None:
    """Branch 0.15 would take the class that knows no ring ("Unsupported CP strategy")."""
    kinds = {name: found["attention"] for name, found in states[0].items()}
    assert kinds["ring"] == "MindSpeedCPDotProductAttention"
    assert kinds["single"] == kinds["last"] == kinds["all_gather"] != kinds["ring"]
    assert kinds["single"].endswith("TEDotProductAttention")


def test_context_parallelism_is_never_patched_at_level_0_and_arguments_are_always_there(states) -> None:
    assert [found["level"] for found in states[0].values()] == [2, 0, 2, 0]
    assert len(states[1]) == len(LAYOUTS)
    for seen in states[1]:
        (kept, given), (level_kept, level) = seen["context_parallel_size"], seen["optimization_level"]
        assert kept == given
        assert level_kept == level == (2 if given > 1 else 0)


def test_the_device_capability_may_be_asked_for_a_device(states) -> None:
    """Branch 0.15 replaces it by a function without parameters, of which torch 2.13's ``broadcast`` dies."""
    assert {tuple(found["capability"]) for found in states[0].values()} == {(9, 0)}

    def work() -> list[float]:
        tensor = torch.full((2,), float(dist.get_rank()), device="npu")
        dist.broadcast(tensor, src=1)
        return tensor.tolist()

    assert run_distributed(work, 2, backend="hccl") == [[1.0, 1.0]] * 2


class Lazy(ModuleType):
    """A lazy module, as transformers is one: whatever is asked of it, it tries to import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__.setdefault("asked", []).append(name)
        raise RuntimeError(f"{name} needs torchvision, which is not installed")


def fires(runtime: Runtime, guarded: bool) -> bool:
    """Whether patching again asks a lazy module for what it does not hold; transformers' own may be the first to crash."""
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
def test_lazy_modules_are_not_fired_by_the_scan(guarded: bool, npu: Runtime) -> None:
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
    from megascend.bootstrap.mindspeed import arguments, verification

    for parallel, world_size in LAYOUTS.values():
        runtime.configure_topology(plan(parallel, world_size))
    provider: Any = runtime.provider
    wanted = arguments.seed(provider._defaults, 1, "ring")
    config = type("Config", (), dict(wanted))()

    def problems(cause: Callable[[Any], None] | None) -> list[str]:
        if cause is not None:
            cause(config)
        return verification.problems(config, wanted, provider._feature.rotary)

    return [problems(None)] + [run_distributed(problems, 1, cause, init=False)[0] for cause, _ in BROKEN]


def test_whatever_of_the_patches_is_lost_is_found_by_name(npu: Runtime) -> None:
    ((none, *found),) = run_distributed(problems_by_cause, 1, npu, init=False)
    assert none == []
    for problems, (_, message) in zip(found, BROKEN, strict=True):
        assert len(problems) == 1
        assert message in problems[0]
