"""Workers in processes of their own, which forward chunks: one that is killed or stopped is named, the others drop."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from engine_process import EngineProcess, engines
from in_process import TIMEOUT_S
from sharding import ShardedTrainer, model

from weightwire.errors import TransportError, UpdateError
from weightwire.offer import Offer, Seal

OLD, NEW = model(1), model(2)


class Worker:
    """A worker in another process, called like a receiver in this one."""

    def __init__(self, process: EngineProcess) -> None:
        self.name, self.process = process.name, process

    def open(self, offer: Offer) -> None:
        self.process.now("begin", offer=offer.to_json())

    def verify(self, seal: Seal, timeout_s: float) -> None:
        self.process.now("verify", seal=seal.to_json(), timeout_s=timeout_s)


def holds(process: EngineProcess, weights: Any) -> bool:
    (worker,) = process.weights()[0]
    return all(
        (worker[name] == tensor).all() and worker[name].dtype == tensor.dtype for name, tensor in weights.items()
    )


def updated(processes: list[EngineProcess], version: int, weights: Any) -> ShardedTrainer:
    """Run an update with forwarding, and commit it."""
    workers: Any = [Worker(process) for process in processes]
    trainer = ShardedTrainer(workers, relay=True)
    seal = trainer.push(version, weights)
    for process in processes:
        process.now("commit", update=seal.update)
    return trainer


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.nightly), 3])  # covered: the fourth message
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_forwarding_worker_that_is_gone_is_named(tmp_path, number, signal_number):
    with engines(tmp_path, "engine-1", "engine-2", "engine-3") as processes:
        trainer = updated(processes, 1, OLD)
        assert trainer.plan is not None
        assert sum(trainer.plan.traffic[2]) > 0, "nothing is forwarded"
        trainer.timeout_s = 4.0
        victim = processes[1]

        def adjust(sender: Any) -> None:
            hand_over = sender._hand_over

            def kill(index: int, *rest: Any) -> Any:
                if index == number:
                    victim.kill(signal_number)
                return hand_over(index, *rest)

            if sender._group.rank == 0:
                sender._hand_over = kill

        with pytest.raises(TransportError, match=r"engine-2, process \d+ on \S+\)+ (is gone|is stopped|has failed)"):
            trainer.send(2, NEW, adjust=adjust)
        for process in (processes[0], processes[2]):
            assert holds(process, OLD)
            with pytest.raises((UpdateError, TransportError)):
                process.now(
                    "verify", seal=Seal("x", 2, "0", ()).to_json() | {"update": _update(process)}, timeout_s=TIMEOUT_S
                )
            assert process.state()["update"]["state"] == "dropped"
        updated([processes[0], processes[2]], 3, NEW)
        assert holds(processes[0], NEW)
        assert holds(processes[2], NEW)


def _update(process: EngineProcess) -> str:
    return process.state()["update"]["update"]
