"""A service on real ranks for tests, and clients' data; as a script it serves until it is told to stop.

python serve_ranks.py SETTINGS RANKS FOLDER DEADLINE        # SETTINGS: a file of ServeConfig in JSON
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megascend.apps.serve.api.keys import key_digest
from megascend.config.serve import ServeConfig
from megascend.testing import run_distributed

KEYS = {name: f"tml-{name}-0123456789abcdef" for name in ("alice", "bob", "mallory")}
DEADLINE_S = 400.0


def run_service(settings: ServeConfig, folder: Path, before: Callable[[], None]) -> None:
    """Run the server on one rank."""
    from megascend.apps.serve.server import serve

    before()
    keys = {key_digest(key): name for name, key in KEYS.items()}
    address = folder / "address"
    serve(settings, keys, lambda url: address.write_text(url) and None, (folder / "stop").exists)


def nothing() -> None:
    """See :func:`service`."""


@contextmanager
def service(
    settings: ServeConfig,
    ranks: int,
    folder: Path,
    deadline_s: float = DEADLINE_S,
    before: Callable[[], None] = nothing,
) -> Iterator[str]:
    """Yield the address of a service that runs in the block.

    Args:
        deadline_s: after which its ranks are killed, and the test fails.
        before: what each rank of engine megatron does first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            if settings.engine == "megatron":
                run_distributed(run_service, ranks, settings, folder, before, timeout_s=deadline_s, init=False)
                return
            # A test before this one may have imported Megatron, which must not be in another engine's process.
            job = folder / "service.json"
            job.write_text(settings.model_dump_json())
            command = [sys.executable, __file__, str(job), str(ranks), str(folder), str(deadline_s)]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=2 * deadline_s, check=False)
            assert completed.returncode == 0, completed.stderr[-4000:]
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        end = time.monotonic() + deadline_s
        while not (folder / "address").exists() and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        if not failures:
            yield (folder / "address").read_text()
    finally:
        (folder / "stop").touch()
        thread.join()
        if failures:
            raise failures[0]


def training_job(url: str, model: Path, vocabulary: int = 320, rank: int = 8, seed: int = 5) -> dict[str, Any]:
    """Build data and steps for client_program.py: every loss, weights of both signs and 0, several targets per position."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(3, vocabulary) for _ in range(count)]

    def numbers(count: int, low: float, high: float) -> list[float]:
        return [round(chance.uniform(low, high), 3) for _ in range(count)]

    def sample(count: int, policy: bool) -> tuple[list[int], dict[str, Any]]:
        inputs: dict[str, Any] = {"target_tokens": tokens(count)}
        if policy:
            return tokens(count), inputs | {"logprobs": numbers(count, -7, -4), "advantages": numbers(count, -1, 1)}
        return tokens(count), inputs | {"weights": [0.0, *numbers(count - 1, 0.1, 2)]}

    lengths = (5, 9, 17)
    loss_units = [
        (tokens(6), {"target_tokens": [tokens(3) for _ in range(6)], "weights": [numbers(3, -1, 1) for _ in range(6)]})
    ]
    policy = [sample(length, True) for length in lengths]
    data = {"cross_entropy": [sample(length, False) for length in lengths], "several": loss_units}
    data |= dict.fromkeys(("importance_sampling", "ppo", "cispo"), policy)
    adam = {"learning_rate": 2e-3, "eps": 1e-8}
    steps = [
        {"loss": "cross_entropy", "adam": adam},
        {"loss": "cross_entropy", "adam": adam | {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9}},
        {"loss": "importance_sampling", "adam": adam | {"grad_clip_norm": 1.0}},
        {"loss": "ppo", "config": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "adam": adam},
        {"loss": "cispo", "adam": adam},
        {"loss": "cross_entropy", "data": "several", "adam": adam},
        {"loss": "custom", "adam": adam},
    ]
    return {
        "url": url, "key": KEYS["alice"], "model": str(model), "checkpoint": str(model), "rank": rank,
        "vocabulary": vocabulary, "data": data, "steps": steps,
    }  # fmt: skip


def write_json(path: Path, job: dict[str, Any]) -> Path:
    """Write a job as a JSON file."""
    path.write_text(json.dumps(job))
    return path


if __name__ == "__main__":
    run_distributed(
        run_service,
        int(sys.argv[2]),
        ServeConfig.model_validate_json(Path(sys.argv[1]).read_text()),
        Path(sys.argv[3]),
        nothing,
        timeout_s=float(sys.argv[4]),
        init=False,
    )
