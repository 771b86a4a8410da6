"""Trainers and engines in separate processes, and the package without megascend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from engine_process import ended_by, engines
from in_process import TIMEOUT_S, Trainer, manifest_of, same, tensors

from megascend.testing import run_distributed
from weightwire.offer import Offer
from weightwire.sender import Sender

OLD, NEW = tensors(1), tensors(2)
ROOT = Path(__file__).parents[2]


class Remote(Trainer):
    """A trainer of engines in other processes."""

    def begin(self, manifest):
        (offer,) = self.offers(manifest)
        self.receivers[0].now("begin", offer=offer.to_json())
        return offer

    def connect(self, offer: Offer) -> Sender:
        return Sender(offer)

    def push_and_commit(self, version, weights):
        offer = self.begin(manifest_of(weights, version, 300))
        with self.connect(offer) as sender:
            seal = sender.send(weights.items())
        self.receivers[0].now("verify", seal=seal.to_json(), timeout_s=TIMEOUT_S)
        self.receivers[0].now("commit", update=offer.update)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def weights_and_death(after: int):
    for number, item in enumerate(NEW.items()):
        if number == after:
            die()
        yield item


@pytest.mark.parametrize("when", ["before", "during", "after", "verified", "committed"])
@pytest.mark.nightly_cases(
    "before",  # covered: during
    "after",  # covered: verified
)
def test_killed_trainer_leaves_old_or_new_weights_and_a_working_engine(tmp_path, when):
    """Keep the old weights (after a commit the new ones), and accept the next trainer's update."""
    with engines(tmp_path, "engine", weights=OLD, version=1) as (engine,):

        def dying():
            trainer = Remote([engine], owner="dying")
            trainer.timeout_s, trainer.lease_s = 15.0, 4.0
            offer = trainer.begin(manifest_of(NEW, 2, 300))
            if when == "before":
                die()
            with trainer.connect(offer) as sender:
                seal = sender.send(weights_and_death(4) if when == "during" else NEW.items())
                if when == "after":
                    die()
                engine.now("verify", seal=seal.to_json(), timeout_s=TIMEOUT_S)
                if when == "verified":
                    die()
                engine.now("commit", update=offer.update)
                die()

        assert run_distributed(lambda: ended_by(dying), 1, init=False, timeout_s=60) == [-signal.SIGKILL]
        committed = when == "committed"
        assert same(engine.weights()[0][0], NEW if committed else OLD)
        assert engine.state()["versions"] == {"model": 2 if committed else 1}
        dropped = run_distributed(lambda: until_free(engine), 1, init=False, timeout_s=60)[0]
        if when in ("before", "during"):
            assert "the sender" in dropped
            assert "gone" in dropped or "not reachable" in dropped
        elif not committed:
            assert "nobody continued it for 4 s" in dropped
        newest = tensors(3)
        run_distributed(lambda: Remote([engine]).push_and_commit(3, newest), 1, init=False, timeout_s=60)
        assert same(engine.weights()[0][0], newest)


def until_free(engine):
    """Return the reason why the open update was dropped."""
    until = time.monotonic() + TIMEOUT_S
    while (state := engine.state())["update"]["state"] not in ("dropped", "committed"):
        assert time.monotonic() < until, state
        time.sleep(0.05)
    return state["update"]["problem"]


STANDALONE_UPDATE = """
import sys
sys.path.insert(0, sys.argv[1])

import weightwire
assert weightwire.__file__.startswith(sys.argv[1]), weightwire.__file__
import torch
from weightwire.group import Listener
from weightwire.manifest import Manifest
from weightwire.offer import Offer
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of

weights = {"a": torch.arange(7.0), "b": torch.ones(3, dtype=torch.bfloat16)}
manifest = Manifest(1, tuple(spec_of(*item) for item in weights.items()), 16)
listener, receiver, found = Listener(), Receiver("engine"), {}
name = listener.new_group(["trainer", "engine"])
offer = Offer(name, "trainer", listener.host, listener.port, 1, 1, "gloo", 30.0, 30.0, manifest)
receiver.open(offer)
with Sender(offer) as sender:
    seal = sender.send(weights.items())
receiver.verify(seal, 30.0)
receiver.commit(name, lambda tensors: found.update((key, tensor.clone()) for key, tensor in tensors))
assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)
foreign = [name for name in sys.modules if name.split(".")[0] in ("megascend", "megatron", "transformers", "vllm", "simnpu")]
assert foreign == [], foreign
print("in force")
"""


def test_receiver_wheel_works_without_megascend(tmp_path):
    """Build the wheel: it has all files of weightwire, depends on torch only, and runs an update."""
    build = subprocess.run(
        [sys.executable, "-c", BUILD, str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert build.returncode == 0, build.stdout[-2000:] + build.stderr[-2000:]
    (wheel,) = tmp_path.glob("weightwire-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
        entry_points = next(
            archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")
        )
        packed = {name for name in archive.namelist() if name.startswith("weightwire/")}
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist")] == ["Requires-Dist: torch>=2.6"]
    assert "[vllm.general_plugins]\nweightwire = weightwire.vllm:register" in entry_points
    source = ROOT / "src" / "weightwire"
    assert packed == {f"weightwire/{path.relative_to(source)}" for path in source.rglob("*.py")} | {
        "weightwire/py.typed"
    }
    completed = subprocess.run(
        [sys.executable, "-c", STANDALONE_UPDATE, str(tmp_path / "installed")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.strip() == "in force"


EXIT = """
import sys, time

sys.path.insert(0, sys.argv[1])
from in_process import Engine, Trainer, tensors

from weightwire import reception
from weightwire.receiver import Receiver


class SlowEvent(reception.threading.Event):
    def set(self):
        time.sleep(1.0)  # as long as a transport may take to close
        print("left", flush=True)
        super().set()


receiver, engine = Receiver("engine"), Engine()
trainer = Trainer([receiver], "shared_memory")
if sys.argv[2] == "committed":
    opened = receiver.open

    def open_slowly(offer):
        opened(offer)
        receiver._update.left = SlowEvent()

    receiver.open = open_slowly
    receiver.commit(trainer.push(1, tensors()).update, engine.load)
else:
    from in_process import manifest_of
    from weightwire.group import join

    (offer,) = trainer.offers(manifest_of(tensors(), 1))
    receiver.open(offer)
    receiver._update.left = SlowEvent()
    group = join(offer.host, offer.port, offer.update, 0, 30.0)
"""


@pytest.mark.parametrize("state", ["committed", "receiving"])
@pytest.mark.nightly_cases("committed")  # covered: receiving
def test_a_process_ends_when_its_receivers_have_left(state):
    """End right after a commit or within a transfer: a thread within torch's code would abort the process."""
    completed = subprocess.run(
        [sys.executable, "-c", EXIT, str(Path(__file__).parent), state],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.strip() == "left"


BUILD = """
import os, shutil, sys
from pathlib import Path

root, target = map(Path, sys.argv[1:])
shutil.copytree(root / "receiver", target / "tree" / "receiver", ignore=shutil.ignore_patterns("build"))
shutil.copytree(root / "src" / "weightwire", target / "tree" / "src" / "weightwire", ignore=shutil.ignore_patterns("__pycache__"))
os.chdir(target / "tree" / "receiver")
from setuptools import build_meta

build_meta.build_wheel(str(target))
"""
