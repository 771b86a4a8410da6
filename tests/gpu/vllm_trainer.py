"""A trainer in a process of its own that pushes to a vLLM and is killed at a moment: ``transfer``, ``verified`` or ``commit``.

python vllm_trainer.py ADDRESS KEY_FILE CHECKPOINT SEED VERSION MOMENT DEVICE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from vllm_weights import changed_weights

from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.sync.delivery import Delivery
from megascend.sync.push import Push, WholeTensors
from weightwire.keys import read_key

BUCKET_BYTES = 200_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    address, key_file, checkpoint, seed, version, moment, device = sys.argv[1:]
    weights = changed_weights(Path(checkpoint), int(seed), torch.device(device))
    engine = VllmEngine(address, key=read_key(key_file), owner="trainer", take_over=True)
    delivery = Delivery(device=torch.device(device), bucket_bytes=BUCKET_BYTES, timeout_s=30.0)
    push, plan = Push([engine], int(version), delivery), WholeTensors.of(weights, {})
    plan.offer(push)
    if moment == "transfer":
        transport: Any = push.sender._transport  # type: ignore[union-attr]
        send, count = transport.send, 0

        def send_and_die(buffer: torch.Tensor) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                die()
            return send(buffer)

        transport.send = send_and_die
    push.seal(plan.send(push))
    if moment == "verified":
        die()
    threading.Timer(0.5, die).start()
    push.commit()
    die()


if __name__ == "__main__":
    main()
