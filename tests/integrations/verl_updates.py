"""Updates through verl's own registry: two actors and two rollout workers, forked after verl is imported.

Prints what happened, as JSON.

    PYTHON_WITH_VERL tests/integrations/verl_updates.py

The driver does what verl's CheckpointEngineManager does with Ray: it asks every worker for ``prepare``, lays out the
topology with the class's own ``build_topology``, and calls the workers by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

BUCKET = 10_000
ACTORS, ROLLOUTS = 2, 2
FLIPPED = 5
"""The full bucket of which a bit is flipped on its way: five tensors are in batches before its own."""
DEADLINE_S = 60.0


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Build tensors of several dtypes; some are larger than a bucket, one is empty, one has no dimension."""
    generator = torch.Generator().manual_seed(version)
    for name, dtype, shape in [
        ("embed", torch.bfloat16, (300, 70)),
        ("odd", torch.int8, (7,)),
        ("norm", torch.float32, (64,)),
        ("none", torch.float32, (0, 4)),
        ("scale", torch.float32, ()),
        ("head", torch.float32, (50, 100)),
    ]:
        yield name, (torch.randn(shape, generator=generator) * 9).to(dtype)


class Work:
    """A work that flips a bit of its buffer when it is done."""

    def __init__(self, buffer: torch.Tensor, work: Any) -> None:
        self.buffer, self.work = buffer, work

    def wait(self, timeout_s: float) -> None:
        self.work.wait(timeout_s)
        self.buffer[-1] ^= 1


def worker(pipe: Any, is_actor: bool, rank: int) -> None:
    """Answer the driver's calls until it hangs up."""
    torch.set_num_threads(1)
    extra = {"is_master": rank == 0} if is_actor else {}
    engine = CheckpointEngineRegistry.new(
        "megascend", bucket_size=BUCKET, transport="gloo", host="127.0.0.1", timeout_s=5.0, **extra
    )
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send(("ok", answer(engine, method, arguments)))
        except Exception as error:  # noqa: BLE001  # the driver reports it
            pipe.send((type(error).__name__, str(error)))


def answer(engine: CheckpointEngine, method: str, arguments: dict[str, Any]) -> Any:
    if method == "send":
        return asyncio.run(send(engine, **arguments))
    if method == "receive":
        return asyncio.run(receive(engine, **arguments))
    return getattr(engine, method)(**arguments)


async def send(engine: Any, version: int, stamp: int | None = None, die_after: int | None = None) -> int:
    """Send tensors; return the names taken from the generator."""
    names = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights(version):
            if die_after == len(names):
                os._exit(9)
            names.append(item[0])
            yield item

    await engine.send_weights(counted(), global_steps=version if stamp is None else stamp)
    return len(names)


async def receive(engine: Any, version: int, flip: bool = False, stage: bool = False) -> list[str]:
    """Return the received names; ``*`` marks a tensor that differs from the sender's."""
    engine._stage = stage
    if flip:
        receive_bucket, observed = engine._transport.receive, []

        def flipped(buffer: torch.Tensor) -> Any:
            work = receive_bucket(buffer)
            observed.append(buffer.numel())
            return Work(buffer, work) if observed.count(BUCKET) == FLIPPED + 1 and buffer.numel() == BUCKET else work

        engine._transport.receive = flipped
    names, expected = [], dict(weights(version))
    try:
        async for name, tensor in engine.receive_weights(global_steps=version):
            names.append(name if torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype else "*")
    except Exception as error:
        raise type(error)(f"after {len(names)} tensors: {error}") from error
    return names


class Workers:
    """Two actors, then two rollout workers."""

    def __init__(self) -> None:
        context = get_context("fork")
        self.pipes, self.processes = [], []
        for index in range(ACTORS + ROLLOUTS):
            parent_pipe, child_pipe = context.Pipe()
            arguments = child_pipe, index < ACTORS, index if index < ACTORS else index - ACTORS
            process = context.Process(target=worker, args=arguments, daemon=True)
            process.start()
            child_pipe.close()
            self.pipes.append(parent_pipe)
            self.processes.append(process)

    def call(self, calls: list[tuple[str, dict[str, Any]] | None]) -> list[Any]:
        """Call all workers at once, as Ray does; return by worker ``ok`` and a value, or an error's class and text."""
        for pipe, call in zip(self.pipes, calls, strict=True):
            if call is not None:
                pipe.send(call)
        answers: list[Any] = []
        for pipe, call in zip(self.pipes, calls, strict=True):
            try:
                answers.append(None if call is None else pipe.recv() if pipe.poll(DEADLINE_S) else ["hangs", ""])
            except EOFError:
                answers.append(["ended", ""])
        return answers

    def connect(self, absent: int | None = None) -> list[Any]:
        """Do the same as ``CheckpointEngineManager.build_process_group``."""
        cls = CheckpointEngineRegistry.get("megascend")
        metadata = [value for _, value in self.call([("prepare", {})] * len(self.pipes))]
        topology = cls.build_topology(ACTORS, ROLLOUTS, metadata)
        calls = [
            ("init_process_group", {name: values[index] for name, values in arguments.items()})
            for arguments in topology
            for index in range(len(arguments["rank"]))
        ]
        return self.call([None if index == absent else call for index, call in enumerate(calls)])

    def update(self, version: int, send: dict[str, Any] | None = None, **receive: Any) -> list[Any]:
        sends = ("send", {"version": version, **(send or {})})
        actors = [sends, ("send", {"version": version})]
        return self.call(actors + [("receive", {"version": version, **receive})] * ROLLOUTS)

    def finalize(self) -> list[Any]:
        return self.call([("finalize", {})] * len(self.pipes))


def main() -> None:
    import_external_libs("megascend.integrations.verl_checkpoint_engine")
    report: dict[str, Any] = {"registered": sorted(CheckpointEngineRegistry._registry)}
    workers = Workers()
    for version in (1, 2):
        report[f"connect {version}"] = workers.connect()
        report[f"update {version}"] = workers.update(version, stage=version == 2)
        report[f"finalize {version}"] = workers.finalize()
    workers.connect()
    report["flipped"] = workers.update(3, flip=True)
    workers.connect()  # without finalize, as verl after an error
    report["flipped, staged"] = workers.update(4, flip=True, stage=True)
    workers.connect()
    report["another version"] = workers.update(5, send={"stamp": 4})
    workers.finalize()
    report["a worker is missing"] = workers.connect(absent=3)
    workers.connect()
    report["update 6"] = workers.update(6)
    workers.finalize()
    workers.connect()
    report["the sender dies"] = workers.update(7, send={"die_after": 4})
    for pipe, process in zip(workers.pipes[1:], workers.processes[1:], strict=True):
        pipe.send(None)
        process.join(DEADLINE_S)
    report["exit codes"] = [process.exitcode for process in workers.processes]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
