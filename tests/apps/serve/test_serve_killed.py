"""Servers killed at random points under load reach the state of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from restarted_server import RestartedServer
from safetensors.torch import load_file

from megascend.apps.serve.checkpoints import CheckpointPath
from megascend.testing import write_tiny_checkpoint
from support.waiting import wait_until

FOLDER = Path(__file__).parent
KEYS = {name: f"tml-{name}-0123456789abcdef" for name in ("alice", "bob", "carol")}
VOCABULARY = 320
DEADLINE_S = 1500.0
LAYOUTS = {
    "one rank": (1, [], 26),
    "TP2": (2, ["--tensor", "2"], 14),
    "DP2": (2, [], 12),
}


def start_clients(
    folder: Path, model: Path, url: str, steps: dict[str, int] | None
) -> dict[str, subprocess.Popen[bytes]]:
    """Start a client program per tenant, which takes a number of steps, or continues until the file ``enough`` exists."""
    clients = {}
    folder.mkdir(exist_ok=True)
    for number, (name, key) in enumerate(KEYS.items()):
        job: dict[str, Any] = {
            "url": url, "key": key, "model": str(model), "rank": (4, 8, 16)[number], "seed": number + 1, "vocabulary": VOCABULARY,
            "learning_rate": 1e-3, "eps": 1e-3, "enough": str(folder / "enough"), "started": str(folder / f"{name}.started"),
            "steps": None if steps is None else steps[name],
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(job))
        command = [
            sys.executable,
            str(FOLDER / "restarted_client.py"),
            *(str(folder / f"{name}{end}") for end in (".json", ".out")),
        ]
        log = (folder / f"{name}.log").open("wb")
        clients[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return clients


def results_of(folder: Path, clients: dict[str, subprocess.Popen[bytes]]) -> dict[str, dict[str, Any]]:
    """Return the results that each client wrote."""
    end = time.monotonic() + DEADLINE_S
    for name, client in clients.items():
        code = client.wait(max(1.0, end - time.monotonic()))
        assert code == 0, (folder / f"{name}.log").read_text()[-3000:]
    return {name: json.loads((folder / f"{name}.out").read_text()) for name in clients}


def adapter_of(storage: Path, tenant: str, path: str) -> dict[str, Any]:
    return load_file(CheckpointPath.parse(path).directory(storage, tenant) / "adapter_model.safetensors")


def kill_often(server: RestartedServer, kills: int, ranks: int, chance: random.Random, note: Any) -> None:
    """Kill the server at random moments, most of them while it serves, some while it recovers, and start it again each time."""
    for number in range(kills):
        recovering = chance.random() < 0.2
        server.wait("/healthz" if recovering else "/readyz")
        time.sleep(chance.uniform(0.0, 0.3) if recovering else chance.uniform(0.1, 2.5))
        ranks_killed = chance.choice(["first", "last", "all"] if ranks > 1 else ["all"])
        server.kill(ranks_killed)
        note(number, ranks_killed, recovering)
        server.start()
    server.wait("/readyz")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_server_ends_where_an_undisturbed_one_does(tmp_path, layout, capsys) -> None:
    ranks, options, kills = LAYOUTS[layout]
    kills = int(os.environ.get("MEGASCEND_TEST_KILLS", kills))
    model = write_tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    results: dict[str, dict[str, dict[str, Any]]] = {}
    servers = {}
    steps = None
    for run in ("killed", "undisturbed"):
        folder, storage = tmp_path / run, tmp_path / run / "storage"
        folder.mkdir()
        arguments = ["--model", str(model), "--precision", "fp32", "--storage", str(storage), *options]
        arguments += ["--durable", "--set", "durable_steps=7"] if run == "killed" else []
        server = servers[run] = RestartedServer(arguments, ranks, keys, folder / "server.log")
        clients: dict[str, subprocess.Popen[bytes]] = {}
        try:
            server.start()
            server.wait("/readyz")
            clients = start_clients(folder, model, server.url, steps)
            if run == "killed":
                began = [folder / f"{name}.started" for name in KEYS]
                wait_until(lambda began=began: all(file.exists() for file in began), "the clients did not begin")
                start = time.monotonic()

                def note(number: int, ranks_killed: str, recovering: bool) -> None:
                    with capsys.disabled():
                        moment = "while it recovers" if recovering else "under load"
                        seconds = time.monotonic() - start  # noqa: B023
                        print(f"\n{layout}: kill {number} of {ranks_killed} {moment}, {seconds:.0f} s", end="")

                kill_often(server, kills, ranks, random.Random(layout), note)
                (folder / "enough").touch()
            results[run] = results_of(folder, clients)
            steps = {name: value["steps"] for name, value in results[run].items()}
        finally:
            server.end()
            for client in clients.values():
                client.kill()
                client.wait()
    difference = 0.0
    for name in KEYS:
        killed, undisturbed = (results[run][name] for run in ("killed", "undisturbed"))
        killed_weights, undisturbed_weights = (
            adapter_of(tmp_path / run / "storage", name, results[run][name]["path"]) for run in results
        )
        assert killed["losses"] == pytest.approx(undisturbed["losses"], rel=1e-5)
        assert killed_weights.keys() == undisturbed_weights.keys()
        assert all(
            float(value.abs().max()) > 1e-3 for value in killed_weights.values()
        )  # it has moved: half of them begin as zeros
        difference = max(
            difference,
            *(float((undisturbed_weights[key] - killed_weights[key]).abs().max()) for key in undisturbed_weights),
        )
    back = sorted(servers["killed"].back_s[1:])
    with capsys.disabled():
        print(f"\n{layout}: {kills} kills, steps {steps}, parameters differ by {difference:.1e}; back after", end=" ")
        print(f"{back[0]:.1f} / {statistics.median(back):.1f} / {back[-1]:.1f} s (min, median, max)")
    assert difference < 1e-6
    assert set(servers["killed"].codes) <= {2}  # a rank that lost a peer logs it and ends
