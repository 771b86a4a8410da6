"""Router replay: layouts and engines route by the experts of a sample, against transformers with the same choice by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megascend import Sample
from megascend.config import Parallel, Recompute
from megascend.errors import DataError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint, token_lists
from support.forked_programs import run_forked

pytestmark = [pytest.mark.usefixtures("megatron_imported")]
PROGRAM = Path(__file__).with_name("replayed_routing.py")
PROMPT = 3
FAMILIES = {"qwen3_moe": 4, "deepseek_v3": 8, "ernie4_5_moe": 4}
"""Experts of the tiny models: softmax, sigmoid with groups and a bias, softmax with a bias."""
CASES = [
    Case("single"),
    Case("padded", packing=False, micro_batch_tokens=200),
    Case("full recompute", recompute=Recompute(granularity="full")),
    Case("EP2", 2, Parallel(expert=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("CP2", 2, Parallel(context=2)),
    Case("PP2, full recompute", 2, Parallel(pipeline=2), recompute=Recompute(granularity="full")),
    Case("grouped experts", experts="grouped"),
]
IN_CI = ("full recompute", "TP2 + SP", "CP2", "PP2, full recompute")


def choices(arch: str, layers: int = 4) -> list[torch.Tensor]:
    """Random experts [tokens, layers, 2] for each sample of the parity job; some tokens' are not known."""
    generator = torch.Generator().manual_seed(3)
    routed = []
    for ids in token_lists():
        scores = torch.rand(len(ids) - 1, layers, FAMILIES[arch], generator=generator)
        experts = scores.topk(2).indices
        experts[1::5] = -1
        routed.append(experts)
    return routed


def samples(arch: str) -> list[Sample]:
    return [
        Sample.causal(ids, PROMPT, routed_experts=experts)
        for ids, experts in zip(token_lists(), choices(arch), strict=True)
    ]


@pytest.fixture(scope="module")
def references(parity_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loss and gradient norm of transformers, whose routers are replaced by a formula written out here."""
    folder = tmp_path_factory.mktemp("replay")

    def compute(arch: str) -> dict[str, float]:
        result, job = folder / f"{arch}.json", folder / f"{arch}.safetensors"
        if not result.exists():
            tensors = {f"experts.{i}": experts.contiguous() for i, experts in enumerate(choices(arch))}
            save_file(tensors | {f"tokens.{i}": torch.tensor(ids) for i, ids in enumerate(token_lists())}, job)
            completed = run_forked(PROGRAM, case_checkpoint(parity_folder, arch), job, result, timeout_s=240)
            assert completed.returncode == 0, completed.stderr[-3000:]
        return json.loads(result.read_text(encoding="utf-8"))

    return compute


@pytest.mark.difference_cases("qwen3_moe, EP2")  # differs: hook of routers
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        pytest.param(arch, case, id=f"{arch}, {case.name}", marks=marks)
        for arch in FAMILIES
        for case in CASES
        if arch == "qwen3_moe" or case.name in ("single", "EP2")
        for marks in ([] if arch == "qwen3_moe" and case.name in IN_CI else [pytest.mark.nightly],)
    ],
)
def test_gradients_are_those_of_transformers_with_the_same_experts(
    arch: str, case: Case, references: Any, parity_folder: Path
) -> None:
    checkpoint, expected = case_checkpoint(parity_folder, arch), references(arch)

    def on_rank() -> Any:
        with case_backend(replace(case, arch=arch), checkpoint) as backend:
            routed = samples(arch)
            plain = [replace(sample, routed_experts=None) for sample in routed]
            figures = []
            for batch in (plain, routed):
                logprobs = backend.forward(batch).logprobs
                total = sum(-float((s.weights * values).sum()) for s, values in zip(batch, logprobs, strict=True))
                figures.append(total / sum(float(sample.weights.sum()) for sample in batch))
            backend.forward(routed[:1])  # of another share, which must not enter that of the step
            result = backend.forward_backward(backend.shard(routed))
            assert result.loss == pytest.approx(figures[1], abs=1e-5)
            return result.loss, backend.optimizer_step().grad_norm, result.metrics["router_replay_changed"], figures[0]

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=120)
    assert all(rank == pytest.approx(ranks[0], abs=1e-6) for rank in ranks)
    loss, norm, changed, plain_loss = ranks[0]
    assert loss == pytest.approx(expected["loss"], abs=1e-5)
    assert norm == pytest.approx(expected["grad_norm"], abs=1e-4)
    assert plain_loss == pytest.approx(expected["plain_loss"], abs=1e-5)
    assert abs(loss - plain_loss) > 1e-3
    assert changed == pytest.approx(expected["changed"], abs=1e-9)


@pytest.mark.parametrize(("engine", "ranks"), [("single", 1), ("fsdp", 2)])
@pytest.mark.parametrize("arch", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
@pytest.mark.nightly_cases("qwen3_moe-single-1")  # covered: qwen3_moe-fsdp-2
def test_engines_without_megatron_replay_too(
    arch: str, engine: str, ranks: int, references: Any, parity_folder: Path, tmp_path: Path
) -> None:
    """Replay with engine single, and on expert parallel ranks, with and without recomputation."""
    expected, result = references(arch), tmp_path / "result.json"
    code = """
import json, sys
from pathlib import Path
import megascend
from megascend.testing import run_distributed
sys.path.insert(0, sys.argv[6])
from test_router_replay import samples
engine, arch, ranks, checkpoint, result = sys.argv[1:6]
ranks, packed = int(ranks), engine == "fsdp"
batching = megascend.Batching(packing=packed, micro_batch_tokens=64 if packed else 200)
def on_rank():
    rows = []
    for granularity in ("none", "full"):
        with megascend.make_backend(engine, model=checkpoint, precision="fp32", platform="cpu", batching=batching,
                                    parallel=megascend.Parallel(expert=ranks), self_check=False,
                                    recompute=megascend.Recompute(granularity=granularity)) as backend:
            step = backend.forward_backward(samples(arch)[backend.rank :: ranks])
            rows.append((step.loss, backend.optimizer_step().grad_norm, step.metrics["router_replay_changed"]))
    return rows
Path(result).write_text(json.dumps(sum(run_distributed(on_rank, ranks, init=False, timeout_s=120), [])))
"""
    arguments = (engine, arch, ranks, case_checkpoint(parity_folder, arch), result, Path(__file__).parent)
    completed = run_forked(code, *arguments, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = json.loads(result.read_text(encoding="utf-8"))
    assert len(rows) == 2 * ranks
    for loss, norm, changed in rows:
        assert loss == pytest.approx(expected["loss"], abs=1e-5)
        assert norm == pytest.approx(expected["grad_norm"], abs=1e-4)
        assert changed == pytest.approx(expected["changed"], abs=1e-9)


REFUSED = [
    (
        torch.zeros(5, 3, 2, dtype=torch.int64),
        r"shape \[5, 3, 2\]; this model needs \[tokens, layers, 2\] with 4 layers",
    ),
    (torch.tensor([[[0, 4]] * 4] * 5), r"must be in \[0, 4\)"),
    (torch.tensor([[[0, -1]] * 4] * 5), r"must be in \[0, 4\)"),
    (torch.tensor([[[1, 1]] * 4] * 5), "names an expert twice"),
]


def test_choices_that_do_not_fit_the_model_are_refused(parity_folder: Path) -> None:
    experts, dense = (case_checkpoint(parity_folder, arch) for arch in ("qwen3_moe", "qwen3"))

    def on_rank() -> None:
        with case_backend(Case("single"), experts) as backend:
            for choice, message in REFUSED:
                with pytest.raises(DataError, match=message):
                    backend.forward_backward([Sample.causal(list(range(6)), routed_experts=choice)])
        with case_backend(Case("single"), dense) as backend, pytest.raises(DataError, match="has no experts"):
            backend.forward_backward(samples("qwen3_moe"))

    run_distributed(on_rank, 1, init=False)


@pytest.mark.parametrize("experts", [[[1, 2]], torch.rand(5, 4, 2), torch.zeros(4, 4, 2, dtype=torch.int64)])
def test_sample_checks_its_experts(experts: Any) -> None:
    with pytest.raises(DataError, match="routed_experts"):
        Sample(list(range(5)), list(range(5)), [1.0] * 5, routed_experts=experts)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_experts_of_vllm_and_skyrl_are_taken_as_they_are(dtype: str) -> None:
    """Both return a numpy array of unsigned integers, with a row for each token but the last."""
    rows = np.arange(5 * 4 * 2).reshape(5, 4, 2).astype(dtype) + (300 if dtype != "uint8" else 0)
    sample = Sample.causal(list(range(6)), routed_experts=rows)
    assert sample.routed_experts.dtype == torch.int16
    assert sample.routed_experts.tolist() == rows.tolist()
