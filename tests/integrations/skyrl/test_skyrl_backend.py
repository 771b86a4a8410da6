"""megascend as a backend of SkyRL's Tinker engine, with SkyRL's abstract class, types and preparation of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "skyrl.tinker.engine", reason="no SkyRL here: bash scripts/test_integrations.sh skyrl", exc_type=ImportError
)

import skyrl_calls as calls
from skyrl.tinker import types

from megascend.integrations.skyrl.ranks import Ranks
from megascend.testing import write_tiny_checkpoint

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def batch_sizes() -> list[int]:
    """Record the number of models in the batch of every finished command."""
    return []


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, batch_sizes: list[int]) -> Iterator[Any]:
    model = tmp_path_factory.mktemp("skyrl") / "model"
    write_tiny_checkpoint(model, "qwen3")
    report = Ranks._report

    def watched(self: Ranks, outcomes: Any) -> None:
        batch_sizes.extend(outcome.batch_adapters for outcome in outcomes)
        report(self, outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_report", watched)
        built = calls.backend(model)
        yield built
        built.close()


def test_two_tenants_in_one_batch_learn_as_in_separate_batches(backend: Any, batch_sizes: list[int]) -> None:
    single = {name: calls.train(backend, [name])[name] for name in calls.TENANTS}
    assert 2 not in batch_sizes
    mixed = calls.train(backend, list(calls.TENANTS))
    assert batch_sizes.count(2) == 2 * calls.STEPS
    for name, losses in mixed.items():
        assert losses == pytest.approx(single[name], rel=1e-5)
        assert losses[2] < losses[0]


def test_policy_losses_and_unsupported_requests(backend: Any) -> None:
    backend.create_model("ann", calls.TENANTS["ann"])
    try:
        result = backend.forward(calls.batch_of(["ann"], 0, "importance_sampling"))["r-ann"]
        for output in result.loss_fn_outputs:
            expected = [-0.5 * 2.718281828 ** (value + 5.0) for value in output["logprobs"]["data"]]
            assert output["elementwise_loss"]["data"] == pytest.approx(expected, rel=1e-4)
        refused = backend.forward_backward(calls.batch_of(["ann"], 0, "dppo"))["r-ann"]
        assert isinstance(refused, types.ErrorResponse)
        assert "dppo" in refused.error
        with pytest.raises(ValueError, match="critic"):
            backend.create_model("eve", calls.TENANTS["ann"], model_role="critic")
    finally:
        backend.delete_model("ann")


def test_checkpoints_and_sampling(backend: Any, tmp_path: Path) -> None:
    backend.create_model("ann", calls.TENANTS["ann"])
    try:
        for step in range(2):
            backend.forward_backward(calls.batch_of(["ann"], step))
            backend.optim_step("ann", calls.adam(1e-2))
        backend.save_checkpoint(tmp_path / "c.tar.gz", "ann")
        backend.save_sampler_checkpoint(tmp_path / "s.tar.gz", "ann")
        saved = backend.forward(calls.batch_of(["ann"], 0))["r-ann"].loss_fn_outputs
        backend.forward_backward(calls.batch_of(["ann"], 0))
        backend.optim_step("ann", calls.adam(1e-1))
        other = backend.forward(calls.batch_of(["ann"], 0))["r-ann"].loss_fn_outputs
        assert other[0]["logprobs"]["data"] != pytest.approx(saved[0]["logprobs"]["data"], abs=1e-3)

        tokens = calls.request_of("ann", 0).data[0].model_input
        targets = calls.request_of("ann", 0).data[0].loss_fn_inputs.target_tokens.data
        prompt = types.ModelInput(chunks=[*tokens.chunks, types.EncodedTextChunk(tokens=targets[-1:])])
        sample_input = types.SampleInput(
            prompt=prompt, num_samples=2, checkpoint_id="s", prompt_logprobs=True,
            sampling_params=types.SamplingParams(temperature=1.0, max_tokens=3, seed=5),
        )  # fmt: skip
        batch = _sample_batch({"r": ("ann", sample_input)}, str(tmp_path / "s.tar.gz"))
        answer = backend.sample(batch)["r"]
        assert [len(sequence.tokens) for sequence in answer.sequences] == [3, 3]
        # what is sampled from is what was saved, not what was trained since
        assert answer.prompt_logprobs[1:] == pytest.approx(saved[0]["logprobs"]["data"], abs=1e-4)

        backend.load_checkpoint(tmp_path / "c.tar.gz", "ann")
        repeated = backend.forward(calls.batch_of(["ann"], 0))["r-ann"].loss_fn_outputs
        assert repeated[0]["logprobs"]["data"] == pytest.approx(saved[0]["logprobs"]["data"], abs=1e-6)
    finally:
        backend.delete_model("ann")


def _sample_batch(requests: dict[str, Any], path: str) -> types.PreparedSampleBatch:
    from skyrl.tinker.engine import prepare_sample_batch

    batch = prepare_sample_batch(requests)
    batch.all_checkpoint_paths = [path] * len(batch.all_checkpoint_paths)
    return batch
