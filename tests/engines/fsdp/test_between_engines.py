"""A run goes from one engine to another: weights to the bit, moments and counters with them; and both engines train alike.

Ranks of Megatron are forks of this process, those of FSDP2 of one in which there is no Megatron. The reference is
Hugging Face and torch AdamW, uninterrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from legs import run_leg
from test_fsdp import in_process

from megascend import Adam, Adapters, Batching, Fsdp, Parallel
from megascend.config import Precision
from megascend.testing import run_distributed
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY, case_checkpoint, hf_reference, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")


@dataclass(frozen=True)
class Pair:
    """One model on two layouts.

    Attributes:
        fsdp: options of that engine; ``ranks`` among them.
        steps: half of them before the checkpoint.
        bounds: of losses, norms, and weights.
    """

    name: str
    arch: str
    world_size: int
    megatron: Parallel
    fsdp: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    precision: Precision = "fp32"
    steps: int = 10
    bounds: tuple[float, float, float] = (1e-5, 1e-4, 1e-3)


TIED = {"tie_word_embeddings": True}
TP2_EP2 = Parallel(tensor=2, expert=2, expert_tensor=1)
PAIRS = [
    Pair(
        *("tied MoE, TP2 EP2 and DP2", "qwen3_moe", 2, TP2_EP2, {"ranks": 2}, TIED | {"num_hidden_layers": 2}),
        steps=4,
    ),
]
MORE = [
    Pair("tied MoE, TP2 EP2 and DP2", "qwen3_moe", 2, TP2_EP2, {"ranks": 2}, TIED, steps=4),
    Pair(
        *("MoE, EP2 and EP2 x FSDP2", "qwen3_moe", 2, Parallel(expert=2), {"ranks": 4, "parallel": Parallel(expert=2)}),
        steps=4,
    ),
    Pair("TP2 PP2 and HSDP 2x2", "qwen3", 4, Parallel(tensor=2, pipeline=2), {"ranks": 4, "fsdp": Fsdp(replicate=2)}),
    Pair("tied PP2 and DP3", "qwen3", 2, Parallel(pipeline=2), {"ranks": 3}, TIED),
    Pair(
        *("shared expert, TP2 EP2 and DP4", "qwen2_moe", 4, Parallel(tensor=2, expert=2), {"ranks": 4}),
        steps=4,
    ),
    Pair(
        *("TP2 and the single engine", "qwen3_moe", 2, Parallel(tensor=2), {"ranks": 1, "engine": "single"}),
        steps=4,
    ),
    Pair("GLM-4-MoE", "glm4_moe", 2, Parallel(expert=2), {"ranks": 2}, steps=4),
    Pair("bf16", "qwen3", 2, Parallel(tensor=2), {"ranks": 2}, precision="bf16", bounds=(2e-2, 0.1, 5e-2)),
    Pair("fp16", "qwen3", 2, Parallel(), {"ranks": 2}, precision="fp16", bounds=(1e-2, 0.1, 5e-2)),
]


def on_megatron(pair: Pair, checkpoint: Path, *leg: Any, **options: Any) -> dict[str, Any]:
    def make() -> Any:
        from megascend.backends import MegatronBackend

        return MegatronBackend(
            checkpoint,
            pair.megatron,
            pair.precision,
            optimizer=Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM),
            batching=Batching(micro_batch_tokens=64),
            timeout_s=60,
            self_check=False,
            **options,
        )

    return run_distributed(run_leg, pair.world_size, make, *leg, init=False, timeout_s=120)[0]


def exchanged(pairs: list[Pair], parity_folder: Path, folder: Path) -> None:
    """Train with both engines and save half way; continue each checkpoint with the other engine."""
    legs, paths = {}, {pair.name: case_checkpoint(parity_folder, pair.arch, **pair.overrides) for pair in pairs}
    jobs = []
    for number, pair in enumerate(pairs):
        saved, half = folder / f"megatron-{number}", pair.steps // 2
        legs["megatron", pair.name] = on_megatron(pair, paths[pair.name], pair.steps, None, (half, str(saved)))
        options = {key: value for key, value in pair.fsdp.items() if key != "ranks"} | {"precision": pair.precision}
        leg = (str(paths[pair.name]), pair.fsdp["ranks"])
        jobs += [
            ("leg", (*leg, pair.steps, None, (half, str(folder / f"fsdp-{number}"))), options),
            ("leg", (*leg, half, str(saved)), options),
        ]
    results = in_process(folder, *jobs)
    for number, pair in enumerate(pairs):
        legs["fsdp", pair.name], legs["megatron to fsdp", pair.name] = results[2 * number : 2 * number + 2]
        legs["fsdp to megatron", pair.name] = on_megatron(
            pair, paths[pair.name], pair.steps // 2, str(folder / f"fsdp-{number}")
        )
    problems = []
    for pair in pairs:
        complete = {name: legs[name, pair.name] for name in ("megatron", "fsdp")}
        for name in ("megatron", "fsdp", "megatron to fsdp", "fsdp to megatron"):
            leg = legs[name, pair.name]
            reference = hf_reference(parity_folder, paths[pair.name], token_lists(), steps=pair.steps)
            since = pair.steps - len(leg["losses"])
            loss, norm = (
                max(abs(a - b) for a, b in zip(actual, expected[since:], strict=True))
                for actual, expected in ((leg["losses"], reference.losses), (leg["norms"], reference.grad_norms))
            )
            weights = furthest(leg["weights"], complete["fsdp" if name == "megatron" else "megatron"]["weights"])
            print(f"{pair.name}, {name}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}")
            if not all(value <= bound for value, bound in zip((loss, norm, weights), pair.bounds, strict=True)):
                problems.append((pair.name, name, loss, norm, weights))
            assert leg["steps"] == pair.steps
        for name, source in (("megatron to fsdp", "megatron"), ("fsdp to megatron", "fsdp")):
            leg = legs[name, pair.name]
            assert leg["progress"] == {"at": pair.steps // 2}
            assert furthest(leg["loaded"], complete[source]["saved"]) == 0.0, (pair.name, name)
    assert not problems


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest Euclidean norm of a difference of weights of the same names, relative to the weight's norm."""
    assert len(first) > 20
    assert first.keys() == second.keys()
    return max(
        float((first[name].float() - second[name].float()).norm() / second[name].float().norm()) for name in first
    )


def test_a_run_goes_from_engine_to_engine(parity_folder, tmp_path):
    exchanged(PAIRS, parity_folder, tmp_path)


@pytest.mark.nightly
def test_more_runs_go_from_engine_to_engine(parity_folder, tmp_path):
    exchanged(MORE, parity_folder, tmp_path)


@pytest.mark.nightly
def test_adapters_go_with_the_checkpoint(parity_folder, tmp_path):
    """Move from Megatron to FSDP2 and back with moments: losses equal those of a run without the change."""
    pair = Pair("adapters", "qwen3", 2, Parallel(tensor=2), {"ranks": 2}, {"num_hidden_layers": 2})
    checkpoint = case_checkpoint(parity_folder, pair.arch, **pair.overrides)
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    options = {"adapters": Adapters(max_count=1, max_rank=4)}
    complete = on_megatron(pair, checkpoint, 6, None, (2, first), "a", **options)
    middle, *_ = in_process(tmp_path, ("leg", (str(checkpoint), 2, 4, first, (2, second), "a"), options))
    last = on_megatron(pair, checkpoint, 2, second, None, "a", **options)
    for leg, since in ((middle, 2), (last, 4)):
        assert leg["steps"] == 6
        for key in ("losses", "norms"):
            assert leg[key] == pytest.approx(complete[key][since:], abs=1e-5, rel=1e-4), key
        assert furthest(leg["weights"], complete["weights"]) < 1e-4
