"""Work between two units of training, waiting times of requests, and effects of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from recording_backend import RecordingBackend

from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.apps.serve.scheduler.commands import (
    Cancel,
    Command,
    ForwardBackward,
    OptimizerStep,
    Outcome,
    Remove,
    Respond,
)
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.scheduler.runner import CANCELLED, SLICE_TOKENS, Cancelled, CommandRunner
from megascend.config import Adam, Lora
from megascend.errors import OutOfDeviceMemoryError
from megascend.training.batch.sample import Sample
from megascend.training.lora.queue import AdapterQueue


class SlowSampler:
    """Takes a slice for every 16 tokens, notes each, and has room for ``room`` requests at a time."""

    def __init__(self, calls: list[Any], room: int = 99) -> None:
        self.calls, self.room = calls, room

    def in_slices(
        self, requests: Sequence[SampleRequest], tokens: int, cancelled: Cancelled = lambda: ()
    ) -> Iterator[Mapping[int, SampleResult]]:
        left = {number: request.params.max_tokens for number, request in enumerate(requests)}
        while left:
            self.calls.append(("slice", len(left)))
            if len(requests) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            left = {number: 0 if number in cancelled() else remaining - tokens for number, remaining in left.items()}
            ended = {number: SampleResult(error=f"{number}") for number, remaining in left.items() if remaining <= 0}
            left = {number: remaining for number, remaining in left.items() if remaining > 0}
            yield ended


@pytest.fixture
def backend() -> RecordingBackend:
    recording = RecordingBackend()
    recording.adapters = {name: Lora(rank=1) for name in ("a", "b", "p")}
    return recording


def lines_of(backend: RecordingBackend, room: int = 99) -> CommandRunner:
    generate = SlowSampler(backend.calls, room).in_slices
    return CommandRunner(backend, AdapterQueue(backend), generate=generate)  # type: ignore[arg-type]


def step(number: int, adapter: str) -> list[Command]:
    sample = Sample([1, 2], [2, 3], [1.0, 1.0])
    return [ForwardBackward(number, adapter, [sample], None), OptimizerStep(number + 1, adapter, Adam())]


def respond(number: int, adapter: str, tokens: int) -> Respond:
    return Respond(number, adapter, SampleRequest([1], SamplingParams(tokens), adapter))


def run(lines: CommandRunner, commands: Sequence[Command]) -> list[Outcome]:
    outcomes = lines.add(commands)
    while not lines.idle:
        outcomes += lines.run_once()
    return outcomes


def test_steps_run_between_the_slices_of_long_responses(backend) -> None:
    commands = [respond(1, "p", 3 * SLICE_TOKENS), respond(2, "base", SLICE_TOKENS), *step(3, "a"), *step(5, "a")]
    outcomes = run(lines_of(backend), commands)
    assert [call[0] for call in backend.calls] == [
        "slice", "forward_backward", "slice", "optimizer_step", "slice", "forward_backward", "optimizer_step",
    ]  # fmt: skip
    assert [outcome.number for outcome in outcomes] == [2, 3, 4, 1, 5, 6]  # an answer is sent as soon as it exists
    waited = {outcome.number: outcome.wait_units for outcome in outcomes}
    assert waited == {1: None, 2: None, 3: 1, 4: 1, 5: 1, 6: 0}


def test_an_adapter_is_removed_once_it_is_not_sampled_from(backend) -> None:
    lines = lines_of(backend)
    assert lines.add([respond(1, "p", 2 * SLICE_TOKENS)]) == []
    assert lines.run_once() == []
    assert lines.add([Remove(2, "p"), Remove(3, "b")]) == [Outcome(3)]
    assert [outcome.number for outcome in lines.run_once()] == [1, 2]
    assert [call for call in backend.calls if call[0] != "discard"] == [
        ("slice", 1), ("remove", "b"), ("slice", 1), ("remove", "p"),
    ]  # fmt: skip
    assert set(backend.adapters) == {"a"}
    assert lines.idle


def test_sampling_out_of_memory_is_retried_one_by_one(backend) -> None:
    outcomes = run(lines_of(backend, room=1), [respond(number, "p", 5) for number in (1, 2, 3)])
    assert [(outcome.number, outcome.error) for outcome in outcomes] == [(1, None), (2, None), (3, None)]
    assert [call for call in backend.calls if call[0] == "slice"] == [("slice", 3), *[("slice", 1)] * 3]
    (single,) = run(lines_of(backend, room=0), [respond(4, "p", 5)])
    assert isinstance(single.error, OutOfDeviceMemoryError)
    backend.recover_memory = lambda: False
    with pytest.raises(OutOfDeviceMemoryError):
        run(lines_of(backend, room=0), [respond(5, "p", 5)])


def test_request_that_raises_in_sampling_fails_alone(backend, caplog) -> None:
    """Fail only the faulty request on one rank; with several ranks, which may be waiting, end the service."""
    broken = 7

    class Sampler(SlowSampler):
        def in_slices(self, requests: Any, tokens: int, cancelled: Cancelled = lambda: ()) -> Any:
            for ended in super().in_slices(requests, tokens, cancelled):
                if any(request.params.max_tokens == broken for request in requests):
                    raise TypeError("a fault of ours")
                yield ended

    def lines() -> CommandRunner:
        return CommandRunner(backend, AdapterQueue(backend), generate=Sampler(backend.calls).in_slices)  # type: ignore[arg-type]

    requests = [respond(1, "p", 5), respond(2, "p", broken), respond(3, "p", 5)]
    outcomes = run(lines(), requests)
    assert [(outcome.number, type(outcome.error)) for outcome in outcomes] == [
        (1, type(None)), (2, TypeError), (3, type(None)),
    ]  # fmt: skip
    assert "a fault of ours" in caplog.text, "with its traceback"
    backend.recover_memory = lambda: False
    with pytest.raises(TypeError, match="a fault of ours"):
        run(lines(), requests)


def test_batch_waits_for_models_that_return_at_once() -> None:
    """Wait briefly: else two groups of tenants alternate, each with half a batch."""
    inbox = Inbox(window_s=20.0, max_tokens=100)

    def came_again(number: int) -> list[Command] | None:
        inbox.mark_answered(["a"])
        taker = ThreadPoolExecutor(1)
        pending = taker.submit(inbox.take, wait=False, ready=10)
        inbox.submit(step(number, "a")[0])
        return pending.result(20)

    inbox.mark_answered(["a", "thinks"])
    inbox.submit(step(1, "a")[0])  # at once, and "thinks" has sent nothing yet
    assert [command.number for command in inbox.take(wait=False) or ()] == [1]
    for number in (2, 3):
        assert [command.number for command in came_again(number) or ()] == [number]
    inbox.mark_answered(["a"])
    assert (
        inbox.take(wait=False, ready=100) == inbox.take(wait=False, ready=0) == []
    )  # the batch is full; there is none
    inbox.submit(Remove(4, "a"))
    assert [command.number for command in inbox.take(wait=False, ready=10) or ()] == [4]


def test_cancelled_requests_are_skipped_or_end_with_the_slice(backend) -> None:
    lines = lines_of(backend, room=2)
    lines.add([respond(1, "a", 10 * SLICE_TOKENS), respond(2, "a", 2 * SLICE_TOKENS)])
    lines.run_once()
    lines.add([respond(3, "b", SLICE_TOKENS), respond(4, "b", SLICE_TOKENS)])
    outcomes = lines.add([Cancel(3, ""), Cancel(1, ""), Cancel(99, "")])
    assert [(outcome.number, outcome.error) for outcome in outcomes] == [(3, CANCELLED)]
    while not lines.idle:
        outcomes += lines.run_once()
    ended = {outcome.number: outcome.error for outcome in outcomes}
    assert ended == {1: CANCELLED, 2: None, 3: CANCELLED, 4: None}
    assert backend.calls.count(("slice", 2)) == 2
