"""A delivery chooses its transport by the engines' locations, and refuses an unsuitable one before it begins."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "weightwire"))
from engine_process import EngineProcess, engines

from megascend.errors import ConfigError, WeightSyncError
from megascend.sync.delivery import Delivery
from megascend.sync.push import Push, push_tensors
from support.fp8_reference import quantise_by_blocks
from weightwire.engine import InferenceEngine
from weightwire.errors import UpdateError
from weightwire.fp8 import BlockFormat
from weightwire.sender import spec_of
from weightwire.transports.choice import Location

FOLDER = Location.of(torch.device("cpu"))
ON_A_GPU = replace(FOLDER, device="cuda", gpu="GPU-b", visible=("GPU-b",))
SPECS = (spec_of("w", torch.zeros(4)),)


class Refusing(InferenceEngine):
    """Says where its worker keeps weights, and refuses every offer, with the transport in it."""

    def __init__(self, name: str, *locations: Location) -> None:
        self.name, self._locations, self.has_begun = name, locations, False

    async def locations(self) -> list[Location | None]:
        return list(self._locations)

    async def receivers(self) -> int:
        return len(self._locations)

    async def begin_update(self, offer: Any) -> None:
        self.has_begun = True
        raise RuntimeError(f"offered over {offer.transport}, {offer.manifest.bucket_bytes} bytes at a time")

    async def verify(self, seal: Any, timeout_s: float) -> None: ...

    async def commit(self, update: str) -> None: ...

    async def drop(self, update: str) -> None: ...


@contextlib.contextmanager
def delivery(transport: str) -> Iterator[Delivery]:
    with contextlib.closing(Delivery(transport=transport, device=torch.device("cpu"), timeout_s=20.0)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("transport", "location", "message"),
    [
        ("gloo", ON_A_GPU, "'gloo' moves memory of cpu, and engine keeps weights on cuda; .* what fits: shared_memory"),
        ("auto", replace(ON_A_GPU, space="other"), "no transport brings bytes .* WEIGHTWIRE_STAGING=cpu"),
        ("shared_memory", replace(FOLDER, space="other"), "all members on one machine.* what fits: gloo"),
    ],
)
def test_a_transport_that_does_not_fit_raises_before_anything_begins(
    transport: str, location: Location, message: str
) -> None:
    engine = Refusing("engine", location)
    with delivery(transport) as opened, pytest.raises(ConfigError, match=message):
        Push([engine], 1, opened).offer(SPECS)
    assert not engine.has_begun


class OneAtATime(Refusing):
    """Keeps an update open until it is dropped, and refuses others meanwhile; ``failures``: calls of drop that do not arrive."""

    def __init__(self, name: str, failures: int) -> None:
        super().__init__(name, FOLDER)
        self.failures, self.open, self.refusals = failures, "", 0

    async def begin_update(self, offer: Any) -> None:
        if self.open and self.open != offer.update:
            self.refusals += 1
            raise UpdateError(f"{self.open} is under way")
        self.open = offer.update
        raise RuntimeError("the answer is lost")

    async def drop(self, update: str) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no connection")
        if self.open == update:
            self.open = ""


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_an_update_that_could_not_be_dropped_is_dropped_before_the_next_offer(failures: int) -> None:
    engine = OneAtATime("engine", failures)
    with delivery("auto") as opened:
        for version in range(1, 5):
            push = Push([engine], version, opened)
            with pytest.raises(WeightSyncError):
                push.offer(SPECS)
            push.drop()
    # In one update two calls are made: after the last failure, and before the offer.
    assert (engine.refusals, engine.open) == (int(failures >= 2), "")


def test_an_interrupted_commit_leaves_the_engines_free_for_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(tmp_path, "engine", weights={"w": torch.zeros(8)}, version=1) as served:
        with contextlib.closing(Delivery(device=torch.device("cpu"), timeout_s=20.0)) as opened:

            def interrupted(push: Push) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patches:
                patches.setattr(Push, "commit", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    push_tensors(opened, served, 2, {"w": torch.ones(8)})
            assert served[0].state()["update"]["state"] == "dropped"
            push_tensors(opened, served, 3, {"w": torch.full((8,), 3.0)})
        assert served[0].weights()[0][0]["w"].unique().tolist() == [3.0]


def test_an_engine_restarted_before_the_commit_is_named_and_gets_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = {"w": torch.arange(8.0)}, {"w": torch.arange(8.0) + 1}
    with engines(tmp_path, "kept", "restarted", weights={"w": torch.zeros(8)}, version=1) as served:
        with contextlib.closing(Delivery(device=torch.device("cpu"), timeout_s=20.0)) as opened:
            commit = Push.commit

            def restarted(push: Push) -> None:
                served[1].end()
                (tmp_path / "restarted.socket").unlink()
                served[1] = EngineProcess(tmp_path, "restarted", weights={"w": torch.zeros(8)}, version=1)
                push.engines = served
                commit(push)

            message = r"restarted: .*unknown update .*; version 2 is active on kept"
            with monkeypatch.context() as patches:
                patches.setattr(Push, "commit", restarted)
                with pytest.raises(WeightSyncError, match=message):
                    push_tensors(opened, served, 2, first)
            assert [engine.state()["versions"]["model"] for engine in served] == [2, 1]
            assert torch.equal(served[1].weights()[0][0]["w"], torch.zeros(8))
            push_tensors(opened, served, 3, second)
        for engine in served:
            assert torch.equal(engine.weights()[0][0]["w"], second["w"])
            assert engine.state()["versions"] == {"model": 3}


BLOCKS, POWERS = BlockFormat(4, 8), BlockFormat(4, 8, power_of_two=True)


@pytest.mark.parametrize(("before", "after"), [(None, BLOCKS), (BLOCKS, None), (BLOCKS, POWERS)])
def test_a_restarted_engine_gets_the_next_update_as_it_stores_weights_now(
    tmp_path: Path, before: BlockFormat | None, after: BlockFormat | None
) -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def stored(blocks: BlockFormat | None) -> dict[str, torch.Tensor]:
        if blocks is None:
            return {"w": weight}
        return dict(zip(("w", "w_scale_inv"), quantise_by_blocks(weight, 4, 8, blocks.power_of_two), strict=True))

    with contextlib.closing(Delivery(device=torch.device("cpu"), timeout_s=20.0)) as opened:
        for version, blocks in enumerate((before, after), 1):
            with engines(tmp_path, "engine", formats={} if blocks is None else {"w": blocks}) as served:
                push_tensors(opened, served, version, {"w": weight})
                (worker,), _ = served[0].weights()
            (tmp_path / "engine.socket").unlink()
            assert {name: tensor.dtype for name, tensor in worker.items()} == {
                name: tensor.dtype for name, tensor in stored(blocks).items()
            }
            assert all(torch.equal(worker[name].float(), tensor.float()) for name, tensor in stored(blocks).items())
