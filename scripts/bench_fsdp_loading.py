"""Measure loading many small tensors into shards: each rank reads its rows, or rank 0 broadcasts full tensors.

    python scripts/bench_fsdp_loading.py FOLDER [--layers 100] [--ranks 4]

Creates a Qwen3 with that number of layers and hidden size 16 in FOLDER. Ranks are forks on the CPU over Gloo. Prints seconds of
the slowest rank, medians of three: ``shards.load``, and torch's ``set_model_state_dict(broadcast_from_rank0=True)`` from rank
0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import megascend.engines.fsdp.engine  # noqa: F401  ranks find it imported
from megascend.config import Fsdp
from megascend.engines.common.transformers_names import tensor_slices
from megascend.engines.fsdp import transformers_api
from megascend.engines.fsdp.sharding import shard
from megascend.engines.fsdp.shards import load, shards
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.testing import run_distributed

TIMES = 3


def make(folder: Path, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "vocab_size": 320}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=False)  # type: ignore[reportCallIssue]
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def sharded(model_dir: Path) -> Any:
    model = transformers_api.meta_model(model_dir, tied=False)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, mesh, Fsdp(), torch.float32, page_locked=False)
    model.to_empty(device="cpu")
    return model


def by_rows(model_dir: Path) -> float:
    info, model = inspect_checkpoint(model_dir), sharded(model_dir)
    sources = tensor_slices(model, info.tensors)
    dist.barrier()
    start = time.perf_counter()
    load(list(shards(model)), sources, info.tensors)
    return time.perf_counter() - start


def by_broadcast(model_dir: Path) -> float:
    from safetensors.torch import load_file

    model = sharded(model_dir)
    dist.barrier()
    start = time.perf_counter()
    tensors: dict[str, Any] = load_file(model_dir / "model.safetensors") if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, tensors, options=options)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    model_dir = make(arguments.folder, arguments.layers)
    print(f"{len(inspect_checkpoint(model_dir).tensors)} tensors, {arguments.ranks} ranks")
    for method in (by_rows, by_broadcast):
        times = [max(run_distributed(method, arguments.ranks, model_dir, timeout_s=120)) for _ in range(TIMES)]
        print(
            f"{method.__name__}: {statistics.median(times):.2f} s ({', '.join(f'{seconds:.2f}' for seconds in times)})"
        )


if __name__ == "__main__":
    main()
