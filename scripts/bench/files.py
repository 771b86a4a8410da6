"""Measure loading and exporting the weights of a Hugging Face directory, compared with the disk's speed for the same bytes.

    python scripts/bench.py files                               # loading, Qwen3-4B shapes, one GPU
    python scripts/bench.py files --what export --folder /data  # on this disk; default: the system's temporary directory
    python scripts/bench.py files --tiny --platform cpu         # checks the program, not speed

``load``, each way in a separate process that has imported everything before the clock starts, with a cold page cache:

    reads            the files by 8 threads, bypassing the page cache if the file system can; at the beginning and at the end
    MegatronBackend  its loading: parameters filled with NaN, read, checked for NaN and for unexpected tensors

``export``:

    writes           the same number of bytes by 8 threads, one file each, fsync included
    export           ``MegatronBackend.export_hf``, and fsync of its files

The first way of each list is the reference for the other. Seconds; smaller is better.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.disk import drop_pages, flush, read_files, size_of, write_files
from bench.models import add_model, shape_of, write_checkpoint
from bench.runner import command, environment, timed

COMMON = ("platform", "tiny", "seed")
DEFAULTS = {"model": "4b"}
TINY = {"model": "tiny"}
WAYS = {"load": ("reads", "MegatronBackend", "reads"), "export": ("writes", "export", "writes")}


def make_backend(options: argparse.Namespace, model: Path) -> Any:
    import megascend

    return megascend.MegatronBackend(model, precision="bf16", platform=options.platform, self_check=False)


def load(options: argparse.Namespace, model: Path) -> float:
    import megascend

    megascend.bootstrap(options.platform).load_megatron()
    from megascend.engines.megatron import weights

    seconds, original = [], weights.load

    def timed_load(*arguments: Any) -> None:
        drop_pages(model)  # building the model has read headers only, but of any file
        seconds.append(timed(lambda: original(*arguments), options.platform)[0] / 1000)

    with patch.object(weights, "load", timed_load):
        make_backend(options, model).close()
    return seconds[0]


def export(options: argparse.Namespace, model: Path) -> float:
    target = model.parent / "exported"

    def exported() -> None:
        backend.export_hf(target)
        flush(target)

    with make_backend(options, model) as backend:
        seconds = timed(exported, options.platform)[0] / 1000
    written, expected = (size_of(path, "*.safetensors") for path in (target, model))
    if abs(written - expected) > 2**20:
        raise SystemExit(f"export: {written} bytes, the model has {expected}")
    return seconds


def execute(way: str, options: argparse.Namespace, model: Path) -> float:
    """Run one way in this process; return its seconds."""
    if way == "model":
        write_checkpoint(shape_of(options), model, precision="bf16", seed=options.seed)
        flush(model)
        return 0.0
    if way == "reads":
        return read_files(sorted(model.glob("*.safetensors")))
    if way == "writes":
        return write_files(model.parent, size_of(model, "*.safetensors"))
    return {"MegatronBackend": load, "export": export}[way](options, model)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--what", choices=WAYS, default="load")
    parser.add_argument("--folder", type=Path, help="where files are; default: the system's temporary directory")
    parser.add_argument("--execute", nargs=3, metavar=("WAY", "MODEL", "RESULT"), help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    if options.execute:
        way, model, result = options.execute
        Path(result).write_text(json.dumps(execute(way, options, Path(model))))
        return {}, True
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-files-", dir=options.folder) as folder:
        model, result = Path(folder) / "model", Path(folder) / "seconds.json"
        for way in ("model", *WAYS[options.what]):
            if way != "model":
                drop_pages(model)
            arguments = [*options.arguments, "--execute", way, str(model), str(result)]
            subprocess.run(command("files", arguments), check=True, env=environment())
            if way != "model":
                seconds.setdefault(way, []).append(json.loads(result.read_text()))
                print(f"{way}: {seconds[way][-1]:.3f} s", flush=True)
        size = size_of(model)
    for way, times in seconds.items():
        print(f"{way:<16} {min(times):8.3f} s  {size / min(times) / 2**30:6.2f} GiB/s of {size / 2**30:.2f} GiB")
    return {"bytes": size, "seconds": seconds}, True
