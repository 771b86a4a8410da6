"""No request of one tenant holds the event loop, a thread of another tenant, or the ranks for longer than a batch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from recording_backend import KEYS, RecordingBackend, Served, served, train_body
from tinker.proto import tinker_public_pb2 as messages

import megascend
from megascend.apps.serve.api.wire import Datum
from megascend.apps.serve.checkpoints import Checkpoints
from megascend.apps.serve.samples import RequestSamples, TrainResult, loss_of
from megascend.apps.serve.scheduler import runner as runner_module
from megascend.apps.serve.scheduler.commands import Command, Create, Forward, ForwardBackward, OptimizerStep, Outcome
from megascend.apps.serve.scheduler.runner import MAX_SAMPLES, CommandRunner
from megascend.config import Adam, Adapters, Lora
from megascend.testing import write_tiny_checkpoint
from megascend.training.lora.queue import AdapterQueue

LOOP_S = 0.25
"""CPU seconds of one callback of the event loop; a request of 4,096 x 64 columns took 22 there."""


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """Collect (CPU seconds, callback) of every callback of event loops; CPU time, which a busy machine does not change."""
    run, taken = asyncio.Handle._run, []

    def measured(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        taken.append((time.thread_time() - start, repr(handle)[:200]))

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    yield taken
    assert len(taken) > 10
    assert max(taken)[0] < LOOP_S, max(taken)


def protobuf(model: str, number: int, datums: int, columns: int, **fields: Any) -> bytes:
    request = messages.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy", **fields)
    for _ in range(datums):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5], np.int32).tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype, tensor.dense = messages.DTYPE_INT64, np.arange(3, 3 + columns, dtype=np.int64).tobytes()
        tensor.shape.extend([1, columns])
    return request.SerializeToString()


def post_protobuf(system: Served, body: bytes) -> Any:
    headers = {"X-API-Key": KEYS["alice"], "content-type": "application/x-protobuf", "content-encoding": "zstd"}
    packed = zstandard.compress(body)
    return system.client.post("/api/v1/forward_backward", content=packed, headers=headers)


def columns_of_a_small_body(system: Served, model: str) -> None:
    body = protobuf(model, 1, 256, 64)
    assert len(zstandard.compress(body)) < 400
    answer = system.alice.fetch(post_protobuf(system, body).json()["request_id"])
    assert answer["metrics"]["loss:sum"] == 256 * sum(range(3, 67))
    outputs = [output["logprobs"] for output in answer["loss_fn_outputs"]]
    assert len(outputs) == 256
    assert (outputs[-1]["data"], outputs[-1]["shape"]) == ([-float(token) for token in range(3, 67)], [1, 64])


def more_columns_than_the_limit(system: Served, model: str) -> None:
    refused = post_protobuf(system, protobuf(model, 1, 1025, 64))
    assert (refused.status_code, "columns" in refused.text) == (413, True)


def long_samples_in_json(system: Served, model: str) -> None:
    body = train_body(model, 1, *([7] * 400))
    body["forward_backward_input"]["data"] *= 1000
    answer = system.alice.ask("forward_backward", body)
    assert answer["metrics"]["loss:sum"] == 7 * 400 * 1000


def wide_sparse_targets_of_a_prompt(system: Served, model: str) -> None:
    tensor = {"dtype": "int64", "data": [], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}
    for shape, reason in (([1, 2**24], "at most"), ([2**20, 1], "the prompt has 1 positions"), ([1, 2**20], "")):
        body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}}
        body["target_prompt_logprobs"] = {**tensor, "shape": shape}
        assert reason in str(system.alice.ask("asample", body))


def long_prompt(system: Served, model: str) -> None:
    body = {"prompt": {"chunks": [{"tokens": [1] * 2_000_000}]}, "sampling_params": {"max_tokens": 1}}
    assert "exceed the maximum length" in system.alice.ask("asample", body)["error"]


def many_responses(system: Served, model: str) -> None:
    session, _, _ = model.partition(":")
    sampler = {"session_id": session, "sampling_session_seq_id": 0}
    name = system.alice.post("create_sampling_session", sampler).json()["sampling_session_id"]
    body = {"sampling_session_id": name, "seq_id": 1, "num_samples": 1024, "record_stability_info": True}
    body |= {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 200}}
    assert len(system.alice.ask("asample", body)["sequences"]) == 1024


@pytest.mark.parametrize(
    "send",
    [
        columns_of_a_small_body, more_columns_than_the_limit, long_samples_in_json, wide_sparse_targets_of_a_prompt,
        long_prompt, many_responses,
    ],
)  # fmt: skip
def test_no_request_holds_the_event_loop(tmp_path: Path, longest, send: Callable[[Served, str], None]) -> None:
    with served(tmp_path) as system:
        model = system.alice.model()
        longest.clear()
        send(system, model)


def test_checkpoints_are_read_and_written_off_the_event_loop(tmp_path: Path, monkeypatch) -> None:
    threads: list[tuple[str, int]] = []
    for name in ("list_records", "commit", "change", "delete", "remove_expired"):
        original = getattr(Checkpoints, name)

        def noted(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            threads.append((_name, threading.get_ident()))
            return _original(*args, **options)

        monkeypatch.setattr(Checkpoints, name, noted)
    with served(tmp_path) as system:
        model = system.alice.model()
        system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
        route = f"training_runs/{model}/checkpoints/weights/one"
        for method, path in (
            ("GET", "checkpoints"), ("GET", "training_runs"), ("GET", f"training_runs/{model}"),
            ("GET", f"training_runs/{model}/checkpoints"), ("POST", f"{route}/publish"), ("DELETE", route),
        ):  # fmt: skip
            assert system.alice.get(path, method).status_code in (200, 204)
        system.tick(1)
        system.service.swept -= 1000
        system.tick(1)
        assert system.client.portal is not None
        loop = system.client.portal.call(threading.get_ident)
    assert {name for name, _ in threads} == {"list_records", "commit", "change", "delete", "remove_expired"}
    assert loop not in {thread for _, thread in threads}


# --- large requests run in parts ---


def datum(length: int, columns: int | None, seed: int) -> Datum:
    generator = np.random.default_rng(seed)
    shape = (length,) if columns is None else (length, columns)
    inputs = {"target_tokens": generator.integers(3, 90, shape), "weights": generator.random(shape, np.float32)}
    return Datum(generator.integers(3, 90, length), inputs)


def run(runner: CommandRunner, commands: list[Command]) -> list[Outcome]:
    outcomes = runner.add(commands)
    while not runner.idle:
        outcomes += runner.run_once()
    return outcomes


def test_large_request_lets_others_through_after_a_batch() -> None:
    backend = RecordingBackend()
    backend.adapters = {name: Lora(rank=1) for name in ("a", "b")}
    loss = loss_of("cross_entropy", {})
    large = RequestSamples([datum(1, 64, number) for number in range(80)], loss)
    small = RequestSamples([datum(3, None, 1)], loss)
    runner = CommandRunner(backend, AdapterQueue(backend), None)  # type: ignore[arg-type]
    commands = [ForwardBackward(1, "a", large, loss), OptimizerStep(2, "a", Adam()), Forward(3, "b", small, loss)]
    outcomes = run(runner, commands)
    assert [outcome.number for outcome in outcomes] == [3, 1, 2]
    assert next(outcome for outcome in outcomes if outcome.number == 3).wait_units == 1
    batches = [len(call[1][1]) for call in backend.calls if call[0] == "forward_backward"]
    assert batches == [MAX_SAMPLES] * 5
    value = next(outcome.value for outcome in outcomes if outcome.number == 1)
    assert [array.shape for array in value.logprobs] == [(1, 64)] * 80


def test_invalid_sample_in_a_later_part_fails_the_request_and_its_step() -> None:
    backend = RecordingBackend()
    backend.adapters = {"a": Lora(rank=1)}
    loss = loss_of("cross_entropy", {})
    wrong = Datum(np.array([1]), {"target_tokens": np.array([5000])})
    samples = RequestSamples([*[datum(1, None, number) for number in range(MAX_SAMPLES)], wrong], loss)
    runner = CommandRunner(backend, AdapterQueue(backend), None)  # type: ignore[arg-type]
    outcomes = run(runner, [ForwardBackward(1, "a", samples, loss), OptimizerStep(2, "a", Adam())])
    assert f"counted from sample {MAX_SAMPLES}" in str(outcomes[0].error)
    assert outcomes[1].error is not None
    assert ("discard", "a") in backend.calls


def test_forward_whose_loss_fails_leaves_gradients_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordingBackend()
    backend.adapters = {"a": Lora(rank=1)}
    loss = loss_of("cross_entropy", {})
    good = [datum(3, None, 1)]
    monkeypatch.setattr(runner_module, "value_of", lambda *_: 1 / 0)
    runner = CommandRunner(backend, AdapterQueue(backend), None)  # type: ignore[arg-type]
    commands = [
        ForwardBackward(1, "a", RequestSamples(good, loss), loss),
        Forward(2, "a", RequestSamples(good, loss), loss),
        OptimizerStep(3, "a", Adam()),
    ]
    errors = {outcome.number: outcome.error for outcome in run(runner, commands)}
    assert [number for number, error in errors.items() if error is not None] == [2]


def test_interrupted_removals_are_finished_at_the_next_start(tmp_path: Path) -> None:
    trash = tmp_path / "tenant" / "session.0" / "weights" / ".step-0123abcd"
    trash.mkdir(parents=True)
    (trash / "adapter_model.safetensors").write_bytes(b"x")
    Checkpoints(tmp_path)
    assert not trash.exists()


@pytest.mark.usefixtures("runtime")
def test_request_in_parts_gives_the_numbers_of_one_batch(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    loss = loss_of("ppo", {})  # which has metrics, too
    data = [datum(length, columns, length) for length, columns in ((7, None), (5, 3), (9, None), (4, 2))]
    for entry in data:
        for name, value in {"logprobs": -3.0, "advantages": 0.5}.items():
            entry.inputs[name] = np.full(entry.inputs["weights"].shape, value, np.float32)
    results: dict[int, tuple[TrainResult, TrainResult, float]] = {}
    adapters = Adapters(max_count=2, max_rank=4, targets="all-linear")
    with megascend.MegatronBackend(model, precision="fp32", platform="cpu", adapters=adapters) as backend:
        for max_tokens in (10, 10_000):
            name = f"a{max_tokens}"
            runner = CommandRunner(backend, AdapterQueue(backend, max_batch_tokens=max_tokens), None)
            samples = RequestSamples(data, loss)
            commands: list[Command] = [
                Create(1, name, Lora(rank=4, targets="all-linear", seed=1)), Forward(2, name, samples, loss),
                ForwardBackward(3, name, samples, loss), OptimizerStep(4, name, Adam(lr=1e-3)),
            ]  # fmt: skip
            values = {outcome.number: (outcome.value, outcome.error) for outcome in run(runner, commands)}
            assert [error for _, error in values.values()] == [None] * 4
            results[max_tokens] = values[2][0], values[3][0], values[4][0].grad_norm
    parts, whole = results[10], results[10_000]
    for part, expected in zip(parts[:2], whole[:2], strict=True):
        assert part.loss == pytest.approx(expected.loss, rel=1e-5)
        assert part.tokens == expected.tokens
        assert part.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for array, reference in zip(part.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(array, reference, rtol=1e-5, atol=1e-5)
    assert parts[2] == pytest.approx(whole[2], rel=1e-5)
    assert parts[2] > 0
