"""Compare the peak memory of training steps with the estimates of ``megascend.models.memory``, on every engine and in layouts.

    python scripts/bench.py memory                              # small models on the CPU, bytes of all tensors; two minutes
    python scripts/bench.py memory --platform cuda              # 0.9 and 1.3 billion parameters on one GPU, torch's peak
    python scripts/bench.py memory --platform cuda --ranks 2    # the cases that take two GPUs
    python scripts/bench.py memory --case dense --case "fsdp lora"

Each case trains three steps of a random model; the peak is that of the last two, in which the optimizer state exists. Of
several ranks, the largest counts. The exit code is 1 if an estimate is outside -5 to +15 % of the measured peak.

On a CPU the ranks of a case are forks of one process for each engine, and ``support.tensor_memory`` counts. On GPUs
every rank is a process of its own, ``--parallel`` cases run at the same time (each counts its own allocations), and
``torch.cuda.max_memory_allocated`` counts; the memory reserved by the allocator is shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.train import Work, write_checkpoint, write_family_checkpoint
from megascend.config import RunConfig
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.sizes import Workload
from megascend.runtime.topology.topology import plan

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # for its package support

LOWEST, HIGHEST = -0.05, 0.15
"""Of the measured peak, by which an estimate may miss it."""

SMALL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMALL_EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LARGE_EXPERTS = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SMALL_HYBRID = SMALL | LINEAR_ATTENTION
LARGE_HYBRID = (
    LARGE
    | LINEAR_ATTENTION
    | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 3}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
)
"""Of Qwen3.5's text models."""
TOKENS = {"cpu": 1024, "cuda": 8192}
"""Of a micro batch."""


@dataclass(frozen=True)
class Case:
    """A run to measure.

    Attributes:
        settings: of the run file.
        experts: of a mixture of experts.
        hybrid: of a model with linear attention.
        ranks: processes.
        packed: samples of different length.
        micro_batches: that each data parallel rank has in a step.
        share: of the usual tokens.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    hybrid: bool = False
    ranks: int = 1
    packed: bool = False
    micro_batches: int = 1
    share: float = 1.0

    @property
    def engine(self) -> str:
        return self.settings.get("engine", "megatron")

    @property
    def model(self) -> str:
        """Return the key in :data:`SHAPES` of the model that the case trains."""
        return "hybrid" if self.hybrid else "moe" if self.experts else "dense"


SHAPES = {
    "cpu": {"dense": SMALL, "moe": SMALL | SMALL_EXPERTS, "hybrid": SMALL_HYBRID},
    "cuda": {"dense": LARGE, "moe": LARGE | LARGE_EXPERTS, "hybrid": LARGE_HYBRID},
}
LORA = {"lora": {"rank": 16}}
MUON = {"optimizer": {"kind": "muon"}}
EIGHT_BITS = {"optimizer": {"moments": "8bit"}}
OFFLOAD = {"optimizer": {"offload": True}}
FULL = {"recompute": {"granularity": "full"}}
FSDP, SINGLE = {"engine": "fsdp"}, {"engine": "single"}
CASES = {
    "dense": Case(),
    "packed": Case(packed=True),
    "fp32": Case({"precision": "fp32"}),
    "recomputed": Case(FULL),
    "few tokens": Case(share=0.0625),
    "moe": Case(experts=True),
    "lora": Case(LORA),
    "moe lora": Case(LORA, experts=True),
    "muon": Case(MUON),
    "muon moe": Case(MUON, experts=True),
    "muon dp2": Case(MUON, ranks=2),
    "8bit dp2": Case(EIGHT_BITS, ranks=2),
    "offload dp2": Case(OFFLOAD, ranks=2),
    "lora nf4": Case(LORA | {"base_weights": "nf4"}),
    "moe lora fp8": Case(LORA | {"base_weights": "fp8"}, experts=True),
    "tp2": Case({"parallel": {"tensor": 2}}, ranks=2),
    "tp2 sequence": Case({"parallel": {"tensor": 2, "sequence": True}}, ranks=2),
    "dp2": Case(ranks=2),
    "pp2": Case({"parallel": {"pipeline": 2}}, ranks=2, micro_batches=4),
    "cp2": Case({"parallel": {"context": 2}}, ranks=2),
    "ep2": Case({"parallel": {"expert": 2}}, experts=True, ranks=2),
    "fsdp": Case(FSDP),
    "fsdp packed": Case(FSDP, packed=True, micro_batches=2),
    "fsdp recomputed": Case(FSDP | FULL),
    "fsdp moe": Case(FSDP, experts=True),
    "fsdp lora": Case(FSDP | LORA),
    "fsdp dp2": Case(FSDP, ranks=2),
    "fsdp muon": Case(FSDP | MUON, ranks=2),
    "single": Case(SINGLE),
    "single muon": Case(SINGLE | MUON),
    "single 8bit": Case(SINGLE | EIGHT_BITS),
    "single lora": Case(SINGLE | LORA),
    "hybrid": Case(hybrid=True),
    "hybrid packed": Case(hybrid=True, packed=True),
    "hybrid fp32": Case({"precision": "fp32"}, hybrid=True),
    "hybrid recomputed": Case(FULL, hybrid=True),
    "hybrid lora": Case(LORA, hybrid=True),
    "hybrid tp2": Case({"parallel": {"tensor": 2}}, hybrid=True, ranks=2),
    "hybrid tp2 sequence": Case({"parallel": {"tensor": 2, "sequence": True}}, hybrid=True, ranks=2),
    "hybrid pp2": Case({"parallel": {"pipeline": 2}}, hybrid=True, ranks=2, micro_batches=4),
    "fsdp hybrid packed": Case(FSDP, hybrid=True, packed=True, micro_batches=2),
    "fsdp hybrid recomputed": Case(FSDP | FULL, hybrid=True),
    "fsdp hybrid lora": Case(FSDP | LORA, hybrid=True),
    "single hybrid": Case(SINGLE, hybrid=True),
    "single hybrid lora": Case(SINGLE | LORA, hybrid=True),
}


@dataclass
class Measured:
    """Bytes on one rank."""

    peak: int
    reserved: int = 0


def write_model(name: str, platform: str, directory: Path) -> None:
    """Write a random checkpoint of one of :data:`SHAPES` into a new directory."""
    directory.mkdir()
    hybrid = name == "hybrid"
    work = Work(SHAPES[platform][name], platform, "bf16", 1, 1, 0, 0, 0.0, 1, family="qwen3_5_text" if hybrid else None)
    (write_family_checkpoint if hybrid else write_checkpoint)(work, directory)


def config_of(case: Case, platform: str, model: Path) -> RunConfig:
    """Return the run configuration of the case."""
    tokens = int(case.share * TOKENS[platform])
    usual: dict[str, Any] = {
        "model": model,
        "output": "unused",
        "data": {"path": "unused"},
        "platform": platform,
        "self_check": case.engine != "megatron",
        "batching": {"micro_batch_tokens": tokens},
    }
    return RunConfig(**usual | case.settings)


def lengths_of(case: Case, config: RunConfig, data_ranks: int) -> list[int]:
    """Return the lengths of a step's samples; those of each micro batch fill it."""
    tokens = config.batching.budget
    parts = [tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4] if case.packed else [tokens // 2] * 2
    return parts * (case.micro_batches * data_ranks)


def estimate_of(case: Case, platform: str, model: Path) -> Estimate:
    """Estimate the memory of a case with the formulas."""
    config = config_of(case, platform, model)
    info = inspect_checkpoint(model, mtp=config.mtp)
    budget = config.batching.budget
    workload = Workload(budget, case.micro_batches, case.packed and case.engine != "single", longest=budget // 2)
    topology = plan(config.parallel, case.ranks, info.shape)
    prediction = estimate(
        config, info, read_config(model), topology, workload, "plain" if platform == "cpu" else "fused"
    )
    assert prediction is not None
    return prediction


def measure(case: Case, platform: str, model: Path) -> Measured:
    """Train three steps on this rank, and look at the last two."""
    if platform == "cpu":
        from support.tensor_memory import TensorMemory

        with TensorMemory() as memory:
            train(case, platform, model, memory.reset_peak)
        return Measured(memory.peak)
    import torch

    train(case, platform, model, torch.cuda.reset_peak_memory_stats)
    return Measured(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def train(case: Case, platform: str, model: Path, reset_peak: Any) -> None:
    """Train three steps on random tokens; ``reset_peak`` is called after the first."""
    import torch

    from megascend.apps.train.run_backend import ADAPTER, make_backend
    from megascend.training.batch.sample import Sample

    config = config_of(case, platform, model)
    with make_backend(config) as backend:
        if config.lora is not None:
            backend.add_adapter(ADAPTER, config.lora)
        generator = torch.Generator().manual_seed(1)
        lengths = lengths_of(case, config, backend.topology.data)
        vocabulary = inspect_checkpoint(model).shape.vocab_size
        samples = [
            Sample.causal(torch.randint(0, vocabulary, (length + 1,), generator=generator)) for length in lengths
        ]
        share = backend.shard(samples)
        for step in range(3):
            if step == 1:
                reset_peak()
            backend.forward_backward(share, adapter=None if config.lora is None else ADAPTER)
            backend.optimizer_step()


def worker(names: list[str], platform: str, folder: Path) -> dict[str, list[Measured]]:
    """Run in a process of its own: all ranks of the cases on a CPU, this rank of one case on a GPU."""
    import megascend

    engine = CASES[names[0]].engine
    runtime = megascend.bootstrap(platform, engine=engine)
    if engine == "megatron":
        runtime.load_megatron()
    import megascend.apps.train.run
    import megascend.backends  # ranks find them imported

    figures = {}
    for name in names:
        case, model = CASES[name], folder / CASES[name].model
        if platform == "cpu":
            from megascend.testing import run_distributed

            figures[name] = run_distributed(measure, case.ranks, case, platform, model, init=False)
        else:
            figures[name] = [measure(case, platform, model)]
    return figures


def start(names: list[str], arguments: argparse.Namespace, folder: Path) -> dict[str, list[Measured]]:
    """Run workers and collect what each of their ranks has measured."""
    case = CASES[names[0]]
    processes = case.ranks if arguments.platform == "cuda" else 1
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--platform", arguments.platform, "--worker", str(folder)]
    command += [word for name in names for word in ("--case", name)]
    children = []
    for rank in range(processes):
        variables = {"OMP_NUM_THREADS": "1"}
        if processes > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            variables |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        children.append(
            subprocess.Popen(
                command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    figures: dict[str, list[Measured]] = {name: [] for name in names}
    try:
        for child in children:
            out, err = child.communicate(timeout=arguments.timeout)
            if child.returncode:
                raise SystemExit(f"{', '.join(names)}: a worker ended with {child.returncode}\n{err[-6000:]}")
            for name, ranks in json.loads(out.strip().splitlines()[-1]).items():
                figures[name] += [Measured(**rank) for rank in ranks]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    return figures


def report(name: str, expected: Estimate, ranks: list[Measured]) -> bool:
    """Print a row; returns whether the estimate is good enough."""
    largest = max(ranks, key=lambda rank: rank.peak)
    miss = expected.tensors / largest.peak - 1
    good = LOWEST <= miss <= HIGHEST
    items = ", ".join(f"{item} {size / 2**20:.1f}" for item, size in expected.items.items())
    reserved = f"{largest.reserved / 2**20:.1f}" if largest.reserved else "-"
    figures = f"{expected.tensors / 2**20:.1f} | {largest.peak / 2**20:.1f} | {miss:+.1%}{'' if good else ' **'}"
    print(f"| {name} | {figures} | {reserved} | {items} |", flush=True)
    return good


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these; may be repeated")
    parser.add_argument("--ranks", type=int, help="only cases of so many ranks; on CUDA 1 unless given")
    parser.add_argument("--parallel", type=int, default=3, help="CUDA: cases at the same time (default: 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a worker (default: 300)")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure, print, compare."""
    arguments = parse_arguments()
    on_gpu = arguments.platform == "cuda"
    names = arguments.case or list(CASES)
    if arguments.worker:
        group_figures = worker(names, arguments.platform, arguments.worker)
        print(json.dumps({name: [asdict(rank) for rank in ranks] for name, ranks in group_figures.items()}))
        return 0
    ranks = arguments.ranks or (1 if on_gpu and not arguments.case else None)
    names = [name for name in names if ranks in (None, CASES[name].ranks)]
    start_time, good, rows = time.monotonic(), True, {}
    with tempfile.TemporaryDirectory(prefix="measure_memory_") as temporary:
        folder = Path(temporary)
        for model in {CASES[name].model for name in names}:
            write_model(model, arguments.platform, folder / model)
        # On a CPU the cases of an engine share a process.
        engines = dict.fromkeys(CASES[name].engine for name in names)
        groups = (
            [[name] for name in names]
            if on_gpu
            else [[name for name in names if CASES[name].engine == engine] for engine in engines]
        )
        print(
            "| case | estimate MiB | measured MiB | estimate is off by | reserved MiB | the estimate |\n|---|---|---|---|---|---|"
        )
        with ThreadPoolExecutor(arguments.parallel if on_gpu else 1) as pool:
            for group_figures in pool.map(lambda group: start(group, arguments, folder), groups):
                for name, measured in group_figures.items():
                    model = folder / CASES[name].model
                    expected = estimate_of(CASES[name], arguments.platform, model)
                    good &= report(name, expected, measured)
                    rows[name] = {"items": expected.items, "ranks": [asdict(rank) for rank in measured]}
    seconds = time.monotonic() - start_time
    print(f"{seconds:.0f} s; {'every' if good else 'not every'} estimate is within {LOWEST:+.0%} to {HIGHEST:+.0%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
