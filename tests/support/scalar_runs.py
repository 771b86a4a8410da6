"""Programs of ranks for tests of scalar heads; as a script for engines that must run without Megatron in the process.

    python scalar_runs.py JOB RESULT

JOB and RESULT are files of ``torch.save``: a function's name, world size and arguments, and its results on all ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascend import Adam, Batching, Parallel, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import MAX_GRAD_NORM, WEIGHT_DECAY, case_checkpoint, reference, token_lists

SCALAR_REFERENCE = Path(__file__).with_name("scalar_reference.py")
STEPS, LR = 3, 5e-4
TOKENS = token_lists()
TOKEN = {"architectures": ["Qwen3ForTokenClassification"], "num_labels": 1, "classifier_dropout": 0.0}
SEQUENCE = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
TIED = {"tie_word_embeddings": True}
MODELS = {
    "critic": ("qwen3", TOKEN, "clipped_value"),
    "tied critic": ("qwen3", TOKEN | TIED, "value"),
    "reward model": ("llama", SEQUENCE, "bradley_terry"),
}


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    packing: bool = True
    engine: str = "megatron"
    adam: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "single": Layout(),
    "single, padded": Layout(packing=False),
    "TP2": Layout(2, Parallel(tensor=2)),
    "TP2 + SP": Layout(2, Parallel(tensor=2, sequence=True)),
    "PP2": Layout(2, Parallel(pipeline=2)),
    "DP2": Layout(2),
    "DP2, overlapped": Layout(2, adam={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "CP2": Layout(2, Parallel(context=2)),
    "engine single": Layout(engine="single"),
    "engine fsdp": Layout(engine="fsdp"),
    "engine fsdp, DP2": Layout(2, engine="fsdp"),
    "engine fsdp, CP2": Layout(2, Parallel(context=2, context_algorithm="ulysses"), engine="fsdp"),
    "TP2 x PP2 + SP": Layout(4, Parallel(tensor=2, pipeline=2, sequence=True)),
}


def samples_of(kind: str) -> list[dict[str, Any]]:
    """Build the training samples, in the reference's form."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index, ids in enumerate(TOKENS):
        returns, old = torch.randn(2, len(ids), generator=generator).tolist()
        weights = [0.0] * 3 + [1.0 + position % 2 for position in range(len(ids) - 3)]
        value_fields = {"weights": weights, "returns": returns, "old_values": old}
        pair_fields = {"pair": index // 2, "chosen": index % 2 == 1}
        samples.append({"token_ids": ids} | (pair_fields if kind == "reward model" else value_fields))
    return samples


def expected(folder: Path, checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return what transformers' classifier and torch's AdamW give."""
    job = {"checkpoint": str(checkpoint), "samples": samples_of(kind), "loss": MODELS[kind][2], "steps": STEPS}
    job |= {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM}
    return load_file(reference(folder, SCALAR_REFERENCE, job))


def assert_equal_to_transformers(ranks: list[Any], plain: dict[str, torch.Tensor], kind: str) -> None:
    """Compare the results of :func:`trained` on every rank with :func:`expected`."""
    for losses, norms, values, weights in ranks:
        assert losses == pytest.approx(plain["losses"].tolist(), rel=2e-5, abs=1e-7)
        assert norms == pytest.approx(plain["grad_norms"].tolist(), rel=5e-5, abs=1e-6)
        for index, sample_values in enumerate(values):
            actual = sample_values if kind != "reward model" else sample_values[-1:]
            torch.testing.assert_close(actual, plain[f"values.{index}"], rtol=1e-4, atol=1e-5)
        expected_weights = {name: t for name, t in plain.items() if name.startswith("weights.")}
        assert {f"weights.{name}" for name in weights} == set(expected_weights)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[f"weights.{name}"], rtol=1e-3, atol=2e-4)


def checkpoint_of(folder: Path, kind: str) -> Path:
    """Return the checkpoint of one of :data:`MODELS`."""
    arch, overrides, _ = MODELS[kind]
    return case_checkpoint(folder / kind.replace(" ", "-"), arch, **overrides)


def make_backend(checkpoint: Any, layout: Layout, head: Any = "scalar", **options: Any) -> Any:
    from megascend.backends import make_backend

    settings = {"parallel": layout.parallel, "batching": Batching(packing=layout.packing, micro_batch_tokens=90)}
    if layout.engine == "single":
        settings.pop("parallel")
    if layout.engine == "megatron":
        settings["self_check"] = False
    adam = Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, **layout.adam)
    settings |= {"model": checkpoint, "precision": "fp32", "optimizer": adam, "timeout_s": 60, "head": head}
    return make_backend(layout.engine, **settings | options)


def trained(
    checkpoint: Any, layout: Layout, kind: str, resumed_from: Path | None = None
) -> tuple[list[float], list[float], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses, norms, initial values of every sample, and final weights; check the values returned with the gradients."""
    backend = make_backend(checkpoint, layout)
    global_batch = [Sample.scored(**fields) for fields in samples_of(kind)]
    samples = backend.shard(global_batch)
    values, losses, norms = [sample_values.cpu() for sample_values in backend.values(global_batch)], [], []
    for step in range(STEPS):
        if resumed_from is not None and step == 1:
            backend.save(resumed_from, wait=True)
            backend.close()
            backend = make_backend(checkpoint, layout)
            backend.load(resumed_from)
        result = backend.forward_backward(samples, MODELS[kind][2], values=step == 0)
        if step == 0:
            indices = [next(i for i, other in enumerate(global_batch) if other is sample) for sample in samples]
            for index, sample_values in zip(indices, result.values, strict=True):
                torch.testing.assert_close(sample_values.cpu(), values[index], rtol=1e-5, atol=1e-5)
        norms.append(backend.optimizer_step().grad_norm)
        losses.append(result.loss)
    weights = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
    backend.close()
    return losses, norms, values, weights


def with_a_new_head(
    checkpoint: Any, layout: Layout, head: str, out: Path
) -> tuple[torch.Tensor, float, list[list[float]]]:
    """Return a new head's initial weight, the norm of a step, and the values after it; export the model."""
    backend = make_backend(checkpoint, layout, head, seed=5)
    samples = [Sample.scored(ids, returns=[1.0] * len(ids)) for ids in TOKENS]
    weights = dict(backend.named_weights())["score.weight"].clone()
    backend.forward_backward(backend.shard(samples), "value")
    norm = backend.optimizer_step().grad_norm
    values = [sample_values.tolist() for sample_values in backend.values(samples)]
    backend.export_hf(out)
    backend.close()
    return weights, norm, values


def main() -> None:
    name, world_size, arguments = torch.load(sys.argv[1], weights_only=False)
    results = run_distributed(globals()[name], world_size, *arguments, init=False)
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
