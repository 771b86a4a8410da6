"""Errors of an engine for numbers beyond fp16's range: in a checkpoint, in a merged adapter, after training.

python fp16_runs.py ENGINE FOLDER RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layouts_of_files import CONFIG, MODEL_FILE, config, save, tensors
from safetensors.torch import load_file

LARGE = "model.layers.1.mlp.up_proj.weight"
PROJECTION = "model.layers.0.self_attn.q_proj"


def build(folder: Path) -> None:
    """Write a checkpoint that fits into fp16, and one with a number that does not."""
    for name in ("fits", "large"):
        (folder / name).mkdir()
        every = tensors()
        if name == "large":
            every[LARGE][3, 2] = -1e5
        save(folder / name / MODEL_FILE, every)
        config(folder / name)
    assert CONFIG["dtype"] == "float32"


def message(function: Any, *arguments: Any, **options: Any) -> str:
    """Return the message of the CheckpointError that a call raises, or an empty string."""
    from megascend.errors import CheckpointError

    try:
        function(*arguments, **options)
    except CheckpointError as error:
        return str(error)
    return ""


def results(engine: str, folder: Path) -> dict[str, str]:
    """Return messages for a checkpoint, a merged adapter and a parameter that has grown, by kind."""
    from megascend import Adapters, Lora
    from megascend.backends import make_backend

    options = {"self_check": False} if engine == "megatron" else {}
    messages = {"load": message(make_backend, engine, model=folder / "large", precision="fp16", **options)}
    with make_backend(
        engine, model=folder / "fits", precision="fp16", adapters=Adapters(max_rank=2), **options
    ) as backend:
        backend.add_adapter("a", Lora(rank=2, targets=(PROJECTION,)))
        for parameter in parameters(backend.engine.adapters.registry["a"]):
            parameter.fill_(300.0)
        messages["merge"] = message(backend.export_hf, folder / f"{engine}-merged", "a")
        messages["stream"] = message(lambda: list(backend.named_weights("a")))
        messages["base"] = message(backend.export_hf, folder / f"{engine}-base")
    exported = folder / f"{engine}-base"
    dtypes = {str(tensor.dtype) for tensor in load_file(exported / MODEL_FILE).values()}
    messages["dtypes"] = f"{sorted(dtypes)} {json.loads((exported / 'config.json').read_text())['dtype']}"
    with make_backend(engine, model=folder / "fits", precision="fp16", **options) as backend:
        model = backend.engine.bare_chunks[0] if engine == "megatron" else backend.engine.model
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "norm" in name).fill_(torch.inf)
        messages["trained"] = message(backend.export_hf, folder / f"{engine}-trained")
    messages["written"] = str(sorted(path.name for path in folder.glob(f"{engine}-*")))
    return messages


def parameters(adapter: Any) -> list[torch.Tensor]:
    return [adapter.values.detach()]


if __name__ == "__main__":
    kind, where, result = sys.argv[1:]
    import megascend

    megascend.bootstrap("cpu", engine=kind)
    torch.save(results(kind, Path(where)), result)
