"""What ``megascend serve --demo`` serves: a small random model, and a client program to try it with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "demo"

CLIENT = '''\
"""Teaches an adapter one line, byte by byte, and lets it complete the line. TINKER_BASE_URL and TINKER_API_KEY say where."""

import os

import tinker
from tinker import types

LINE, KNOWN = b"the quick brown fox jumps over the lazy dog", 10

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="demo", rank=16, seed=0).result()
tokens = list(LINE)  # this model's tokens are bytes
inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
for step in range(60):
    learned = trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=5e-3))
    if step % 20 == 19:
        print(f"step {step + 1}: loss per token {learned.result().metrics['loss:sum'] / len(tokens[1:]):.3f}", flush=True)

sampler = trainer.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=len(tokens) - KNOWN, temperature=0.0)
found = sampler.sample(types.ModelInput.from_ints(tokens[:KNOWN]), 1, params).result().sequences[0].tokens
print("completed:", (LINE[:KNOWN] + bytes(token for token in found if token < 256)).decode("utf-8", "replace"), flush=True)
os._exit(0)  # the client's threads would wait for a minute
'''


@contextmanager
def demo_directory(storage: Path | None) -> Iterator[Path]:
    """A directory with ``model``, which is made if it is not there, and ``demo_client.py``.

    Args:
        storage: where; None: in a directory that is removed at the end.

    Raises:
        ConfigError: it cannot be written, or its ``model`` holds something else.
    """
    if storage is not None:
        _fill(storage)
        yield storage
        return
    with tempfile.TemporaryDirectory(prefix="megascend-demo-") as found:
        _fill(Path(found))
        yield Path(found)


def demo_settings(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings to serve what :func:`demo_directory` made, under those that the user gave."""
    own = {"model": directory / "model", "name": NAME, "precision": "fp32"}
    return own | dict(values) | {"storage": directory / "checkpoints"}


def _fill(directory: Path) -> None:
    from megascend.cli.random_checkpoint import ModelSize, write_checkpoint

    if not (directory / "model" / "config.json").exists():
        write_checkpoint(directory / "model", ModelSize(hidden=128, layers=2, context=512))
    (directory / "demo_client.py").write_text(CLIENT, encoding="utf-8")
