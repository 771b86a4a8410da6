"""Training of a small model, and its exact state."""

from __future__ import annotations

import shutil

import numpy
import torch

from megascend import Adam, Batching, Parallel
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from megascend.training.checkpoint.slices import TensorSlices


def small_model(folder):
    """Write a model of two layers, whose checkpoint takes a few milliseconds."""
    return case_checkpoint(folder, "qwen3", num_hidden_layers=2)


def make_backend(checkpoint, **options):
    from megascend.backends import MegatronBackend

    settings = {"parallel": Parallel(), "precision": "fp32", "optimizer": Adam(lr=1e-2), "timeout_s": 60}
    settings["batching"] = Batching(micro_batch_tokens=512)
    return MegatronBackend(checkpoint, **settings | options)


def train(backend, steps=1, adapters=()):
    """Take optimizer steps on fixed samples, for every adapter if there are any."""
    samples = backend.shard(causal_samples(token_lists(lengths=(9, 12, 7, 10))))
    for _ in range(steps):
        for adapter in adapters or (None,):
            backend.forward_backward(samples, adapter=adapter)
        backend.optimizer_step()


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def exact_state(backend):
    """Return this rank's checkpoint state and live parameters as bytes."""
    from megascend.engines.common.checkpoints import engine_state, random_state

    engine, state = backend.engine, {}
    for name, entry in engine_state(engine, loading=False).items():
        if isinstance(entry, TensorSlices):
            state |= {(name, offsets): as_bytes(values) for offsets, values in entry.slices}
    for number, chunk in enumerate(engine.bare_chunks):
        state |= {(number, name): as_bytes(parameter) for name, parameter in chunk.named_parameters()}
    for name, adapter in backend.adapters.items():
        state[name] = [as_bytes(tensor) for tensor in (adapter.values, *adapter.moments())]
        state[name, "counts"] = (adapter.taken, adapter.step_count, adapter.skipped_in_a_row, adapter.good_steps)
    if engine.adapters is None:
        state["optimizer"] = (engine.optimizer.updates, engine.trainable.step_count)
    state["step"] = backend.step_count
    state["random"] = exactly(random_state(engine))
    return state


def exactly(value):
    """Replace tensors and arrays in ``value`` by bytes, so that ``==`` compares every bit."""
    if isinstance(value, dict):
        return {key: exactly(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [exactly(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        return as_bytes(value)
    return value.tobytes() if isinstance(value, numpy.ndarray) else value


def damages(file):
    """Return ways to damage a file of at least one byte: (name, action)."""
    size = file.stat().st_size

    def flip(offset):
        with file.open("r+b") as stream:
            stream.seek(offset)
            (value,) = stream.read(1)
            stream.seek(offset)
            stream.write(bytes([value ^ 0x10]))

    def directory():
        file.unlink()
        file.mkdir()

    def cut(length):
        with file.open("r+b") as stream:
            stream.truncate(length)

    offsets = sorted({0, size // 5, size // 2, size - size // 5 - 1, size - 1})
    return [
        ("cut in half", lambda: cut(size // 2)),
        ("a byte short", lambda: cut(size - 1)),
        ("emptied", lambda: cut(0)),
        ("deleted", file.unlink),
        ("a directory", directory),
        ("a byte long", lambda: file.write_bytes(file.read_bytes() + b"\0")),
        *((f"flipped at {offset}", lambda offset=offset: flip(offset)) for offset in offsets),
    ]


def files_of(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def restore(file, content):
    """Undo any of :func:`damages`."""
    if file.is_dir():
        shutil.rmtree(file)
    file.write_bytes(content)
