"""Bad input raises the same megascend error on every rank within seconds and leaves no partial results.

``tests/apps/cli/test_bad_inputs.py`` covers the command line; this file the Python API on real ranks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adam, Batching, MegatronBackend, Parallel, Sample, SingleBackend
from megascend.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegascendError,
    TopologyError,
)
from megascend.testing import run_distributed, tiny_config
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")
LIMIT_S = 60.0
"""Longest time until all ranks raise; half of the groups' timeout, so that none has run into it."""
WORLDS = {
    "single": (1, Parallel()),
    "TP2": (2, Parallel(tensor=2)),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
}


@pytest.fixture(scope="module")
def checkpoint(parity_folder) -> Path:
    return case_checkpoint(parity_folder, "qwen3")


def build(model: Path, parallel: Parallel | None = None, **options: Any):
    from megascend.backends import MegatronBackend

    settings = {
        "precision": "fp32",
        "timeout_s": 2 * LIMIT_S,
        "batching": Batching(micro_batch_tokens=64),
        "self_check": False,
    }
    settings |= options  # the self-check is tested separately
    return MegatronBackend(model=model, parallel=parallel, **settings)


def errors(world_size: int, attempt: Callable[[], Any]) -> list[tuple[type, str]]:
    """Return class and message of the error that ``attempt`` raises on every rank within :data:`LIMIT_S`."""

    def on_rank() -> tuple[type, str]:
        try:
            attempt()
        except MegascendError as error:
            return type(error), str(error)
        return type(None), ""

    return run_distributed(on_rank, world_size, init=False, timeout_s=LIMIT_S)


def assert_all(raised: list[tuple[type, str]], kind: type, *words: str) -> None:
    assert len({message for _, message in raised}) == 1, raised
    for error, message in raised:
        assert error is kind, message
        for word in words:
            assert word in message, message


# --- settings ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Parallel(tensor=0), ["tensor", "greater than or equal to 1", "got 0"]),
        (lambda: Adam(lr=-1.0), ["lr", "got -1.0"]),
        (lambda: Adam(overlap_param_gather=True), ["overlap_param_gather: true", "set both to true"]),
        (lambda: Batching(micro_batch_tokens="many"), ["micro_batch_tokens", "'many'"]),
        (lambda: Adam(learning_rate=1e-4), ["learning_rate: unknown setting", "did you mean lr?"]),
        (lambda: Parallel(tp=2), ["tp: unknown setting", "did you mean tensor?"]),
        (lambda: SingleBackend("m", optimizer=1e-4), ["optimizer: a section of settings is expected", "got 0.0001"]),
        (lambda: MegatronBackend("m", parallel=2), ["parallel: a section of settings is expected", "got 2"]),
    ],
)
def test_value_out_of_range_error_names_limit(make, words):
    with pytest.raises(ConfigError) as raised:
        make()
    assert all(word in str(raised.value) for word in words), raised.value


# --- layouts ---


def test_unsupported_layout_raises_topology_error(checkpoint):
    """``runtime/topology/test_topology.py`` has the table of layouts."""
    raised = errors(2, lambda: build(checkpoint, Parallel(tensor=4)))
    assert_all(raised, TopologyError, "world size 2", "parallel.tensor=4", "start 4 processes")


# --- checkpoints ---


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(word: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda all: {n: t for n, t in all.items() if word not in n})


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["model.layers.3.mlp.up_proj.weight"][-1, -1] = math.nan
    return tensors


def lose_a_shard(folder: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / first)
    index = {"metadata": {}, "weight_map": {name: second if "norm" in name else first for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_config(arch: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(tiny_config(arch)))


def truncate(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return change


LAYERS = {"layer_types": None}  # transformers compares its length with the number of layers
DAMAGED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "unknown model_type": (lambda f: change_config(f, model_type="frobnicate"), ["config.json", "`frobnicate`"]),
    "truncated": (truncate(-100), ["model.safetensors is truncated", "expected"]),
    "missing shard": (lose_a_shard, ["model-00002-of-00002.safetensors is listed in", "but missing"]),
    "llama config": (other_config("llama"), ["no place for", "k_norm.weight", "correct config.json"]),
    "MoE config": (other_config("qwen3_moe"), ["no tensor"]),
    "no q_norm": (without("q_norm"), ["no tensor 'q_norm.weight'", "last one read was model.layers."]),
    "no embedding": (without("embed_tokens"), ["holds lm_head.weight and no embedding"]),
    "vocabulary larger": (lambda f: change_config(f, vocab_size=384), ["(320, 64)", "(384, 64)"]),
    "fewer layers": (lambda f: change_config(f, num_hidden_layers=2, **LAYERS), ["no place for: model.layers.2."]),
    "NaN": (lambda f: change_tensors(f, with_nan), ["NaN", "mlp.linear_fc1.weight"]),
    "foreign tensor": (
        lambda f: change_tensors(f, lambda all: all | {"model.layers.0.x.weight": torch.ones(2)}),
        ["no place for: model.layers.0.x.weight"],
    ),
}


@pytest.mark.parametrize(
    ("damage", "layout"), [(damage, [*WORLDS][number % len(WORLDS)]) for number, damage in enumerate(DAMAGED)]
)
def test_damaged_checkpoint_raises_same_error_on_every_rank(checkpoint, tmp_path, damage, layout):
    change, words = DAMAGED[damage]
    damaged = tmp_path / "model"
    shutil.copytree(checkpoint, damaged)
    change(damaged)
    world_size, parallel = WORLDS[layout]
    assert_all(errors(world_size, lambda: build(damaged, parallel)), CheckpointError, *words)


@pytest.mark.parametrize("experts", [2, 8])
def test_wrong_number_of_experts_raises_checkpoint_error(parity_folder, tmp_path, experts):
    damaged = tmp_path / "model"
    shutil.copytree(case_checkpoint(parity_folder, "qwen3_moe"), damaged)
    change_config(damaged, num_experts=experts, num_local_experts=experts)
    for parallel in (Parallel(tensor=2), Parallel(expert=2)):
        raised = errors(2, lambda parallel=parallel: build(damaged, parallel))
        assert_all(raised, CheckpointError, "does not fit the model that config.json describes")


def test_process_can_build_a_model_after_an_error(checkpoint, tmp_path):
    damaged = tmp_path / "model"
    shutil.copytree(checkpoint, damaged)
    without("q_norm")(damaged)

    def on_rank():
        with pytest.raises(CheckpointError):
            build(damaged, Parallel(tensor=2))
        return build(checkpoint, Parallel(tensor=2)).forward(causal_samples(token_lists())[:1]).logprobs[0].shape[0]

    assert run_distributed(on_rank, 2, init=False) == [len(token_lists()[0]) - 1] * 2


# --- batches ---


def forward_backward(samples: Callable[[int], list[Sample]], loss: Any = "cross_entropy") -> Callable[[Any], Any]:
    return lambda backend: backend.forward_backward(samples(backend.rank), loss)


def good(rank: int) -> list[Sample]:
    return causal_samples(token_lists())[rank::2]


def on_rank_1(bad: Callable[[], Sample]) -> Callable[[int], list[Sample]]:
    return lambda rank: [*good(rank), bad()] if rank == 1 else good(rank)


def sample(*ids: int, **changes: Any) -> Sample:
    fields = {"input_ids": ids, "target_ids": ids, "weights": [1.0] * len(ids)} | changes
    return Sample(**fields)


def weights_gone_nan() -> Sample:
    broken = sample(1, 2, 3)
    broken.weights[1] = math.nan
    return broken


BAD_BATCHES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "input id too large": (
        forward_backward(on_rank_1(lambda: sample(5, 320, 6))),
        ["rank 1: sample 4 has input_ids 320", "vocabulary [0, 320)"],
    ),
    "input id negative": (
        forward_backward(on_rank_1(lambda: sample(-100, 5))),
        ["rank 1: sample 4 has input_ids -100", "[0, 320)"],
    ),
    "target id too large": (
        forward_backward(on_rank_1(lambda: sample(5, 6, target_ids=[6, 4000]))),
        ["rank 1: sample 4 has target_ids 4000", "[0, 320)"],
    ),
    "ignored target with a weight": (
        forward_backward(on_rank_1(lambda: sample(5, 6, target_ids=[6, -100]))),
        ["rank 1: sample 4 has target_ids -100", "set its weight to 0"],
    ),
    "token ids in place of a sample": (
        forward_backward(lambda rank: [*good(rank), [1, 2, 3]] if rank == 1 else good(rank)),
        ["rank 1: sample 4 is of type list", "Sample.causal(token_ids)"],
    ),
    "no samples anywhere": (forward_backward(lambda rank: []), ["empty on every rank"]),
    "all masked": (
        forward_backward(lambda rank: [sample(1, 2, 3, weights=[0.0] * 3)]),
        ["all targets have weight 0", "global batch", "'cross_entropy'"],
    ),
    "longer than the context": (
        forward_backward(on_rank_1(lambda: sample(*[7] * 513))),
        ["rank 1: sample 4 has 513 tokens", "limit of 512", "max_position_embeddings"],
    ),
    "over the token budget": (
        forward_backward(on_rank_1(lambda: sample(*[7] * 65))),
        ["rank 1: sample 4 needs 65 tokens", "batching.micro_batch_tokens=64"],
    ),
    "weights gone NaN": (forward_backward(on_rank_1(weights_gone_nan)), ["rank 1: sample 4", "weights", "not finite"]),
    "field missing": (forward_backward(good, "ppo"), ["'ppo'", "old_logprobs, advantages", "sample 0"]),
    "no such loss": (
        forward_backward(good, "hinge"),
        ["'hinge'", "cross_entropy, importance_sampling, ppo,", "dpo"],
    ),
    "no pairs": (
        forward_backward(lambda rank: [sample(1, 2, ref_logprobs=[0.0, 0.0])], "dpo"),
        ["'dpo'", "pair=... and chosen=..."],
    ),
    "half a pair": (
        forward_backward(
            lambda rank: [sample(1, 2, ref_logprobs=[0.0, 0.0], pair="a", chosen=True)] * (2 if rank else 1), "dpo"
        ),
        ["pair 'a'", "exactly one chosen and one rejected"],
    ),
    "forward too long": (
        lambda backend: backend.forward(on_rank_1(lambda: sample(*[7] * 600))(backend.rank)),
        ["rank 1: sample 4 has 600 tokens"],
    ),
}


def test_bad_batch_on_one_rank_raises_on_all_ranks_and_leaves_training_unaffected(checkpoint):
    def norm(bad_batches: bool) -> Callable[[], tuple[float, dict[str, tuple[type, str]]]]:
        def on_rank() -> tuple[float, dict[str, tuple[type, str]]]:
            backend, raised = build(checkpoint), {}
            for name, (act, _) in BAD_BATCHES.items() if bad_batches else ():
                with pytest.raises((ConfigError, DataError)) as caught:
                    act(backend)
                raised[name] = type(caught.value), str(caught.value)
            backend.forward_backward(good(backend.rank))
            return backend.optimizer_step().grad_norm, raised

        return on_rank

    undisturbed = run_distributed(norm(False), 2, init=False)
    ranks = run_distributed(norm(True), 2, init=False)
    assert [value for value, _ in ranks] == pytest.approx([value for value, _ in undisturbed], rel=1e-6)
    for name, (_, words) in BAD_BATCHES.items():
        assert_all([raised[name] for _, raised in ranks], ConfigError if name == "no such loss" else DataError, *words)


# --- export ---


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def a_file(path: Path) -> None:
    path.write_text("precious")


def a_foreign_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("precious")


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("precious")


@pytest.mark.parametrize("obstacle", [a_file, a_foreign_directory, below_a_file])
def test_export_to_invalid_target_raises_and_changes_nothing(checkpoint, tmp_path, obstacle):
    target = tmp_path / "runs" / "out"
    target.parent.mkdir()
    obstacle(target)
    before = tree(tmp_path)
    raised = errors(2, lambda: build(checkpoint, Parallel(tensor=2)).export_hf(target))
    assert_all(raised, CheckpointError, f"export: {target}")
    assert tree(tmp_path) == before
    assert "precious" in str(before)
