"""Benchmark verl's supervised fine-tuning trainer on its own Megatron engine and on megascend's.

    python scripts/bench_verl.py                                    # Qwen3-1.7B shapes, 8 x 4096 tokens a step, one GPU
    python scripts/bench_verl.py --shortest 512                     # the same of different lengths
    python scripts/bench_verl.py --tiny --platform cpu --run megatron --run megascend    # on a CPU: checks the script

Run it in verl's environment (scripts/verl_env.sh), with mbridge 0.15.1 installed: verl's own engine needs a bridge, and
Megatron-Bridge 0.3.1 excludes the transformers that verl requires. Every ``--run`` is one fresh ``verl.trainer.sft_trainer``
under torchrun, with the same random checkpoint, random tokens and verl settings, except for

    megatron          verl's own engine
    megatron:fused    the same with the fusions of Megatron-Core that ``override_transformer_config`` can switch on. Where Apex is
                      not installed its one function for this comes from Transformer Engine (bench_verl_apex)
    megatron:kernels  the same, and verl's own kernels for the output layer (``model.use_fused_kernels``)
    megascend         VERL_ENGINE_VENDOR=megascend

Where flash-attn is not installed, ``attention_backend`` is ``fused`` (cuDNN) for all runs on CUDA: verl's default ``flash``
finds no kernel then.

A step is timed from one line of verl's file logger to the next, so it includes all of the trainer's work. Warm-up steps are
excluded. A run is stopped once it has logged its steps, before verl writes a checkpoint. The table is printed last; the exit
code is 1 if losses or gradient norms of the runs disagree, so that a figure is never reported for different work, or if a run
fails; the other runs continue.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_train import QWEN3_1_7B, TINY, Work, versions, write_checkpoint

TOLERANCE = 2e-2
"""Largest relative difference of a step's loss and gradient norm between runs. All compute in bf16: verl's engine has no fp32."""
POLL_S = 0.002
FUSED = {
    "apply_rope_fusion": True,
    "bias_dropout_fusion": True,
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
}
READY_MESSAGE = "verl's engine is megascend"
"""Message that megascend's engine prints when it is ready."""


@dataclass
class Figures:
    """Figures of one run: loss, gradient norm, tokens and seconds of each step; the first step has no seconds."""

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_gib: float = float("nan")


def command(run: str, work: Work, arguments: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """Build the command of verl's trainer under torchrun."""
    engine, _, option = run.partition(":")
    steps = work.warmup + work.steps
    bench = {
        "sequences": work.sequences * (steps + 1),  # one epoch: verl empties the device's cache after each
        "shortest": arguments.shortest or work.length,
        "longest": work.length,
        "vocabulary": work.shape["vocab_size"],
        "seed": work.seed,
    }
    fusions: dict[str, object] = dict(FUSED) if option in ("fused", "kernels") else {}
    attention = work.platform == "cuda" and not importlib.util.find_spec("flash_attn")
    settings = [
        *("engine=megatron", "optim=megatron", f"model.path={model}"),
        *(
            f"data.train_files={folder}",
            f"data.custom_cls.path={Path(__file__).with_name('bench_verl_data.py').resolve()}",
        ),
        *("data.custom_cls.name=RandomTokens", f"data.train_batch_size={work.sequences}", "data.num_workers=0"),
        "+data.bench={" + ",".join(f"{name}:{value}" for name, value in bench.items()) + "}",
        f"data.max_token_len_per_gpu={arguments.micro_batch_tokens or 2 * work.length}",
        f"engine.tensor_model_parallel_size={arguments.tensor}",
        *(f"optim.lr={work.lr}", "trainer.logger=[file]", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *(f"trainer.device={work.platform}", f"trainer.total_training_steps={steps + 1}", "trainer.total_epochs=1"),
        *(f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}"),
        *(f"+engine.override_transformer_config.{name}={value}" for name, value in fusions.items()),
        *(["engine.override_transformer_config.attention_backend=fused"] if attention else []),
        *(["engine.vanilla_mbridge=True"] if engine == "megatron" else []),
        *(["model.use_fused_kernels=True"] if option == "kernels" else []),
    ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.ranks)),
        *("-m", "verl.trainer.sft_trainer", *settings, *arguments.set),
    ]


def environment(run: str, work: Work, log: Path) -> dict[str, str]:
    """Build the environment of verl's trainer."""
    engine, _, option = run.partition(":")
    folder = Path(__file__).parent
    env = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env.pop("VERL_ENGINE_VENDOR", None)
    paths: list[Path] = []
    if work.platform == "cpu":
        env["VERL_PLATFORM"] = "cpu"
    if engine == "megascend":
        env["VERL_ENGINE_VENDOR"] = "megascend"
    elif work.platform == "cpu":  # verl has no engine for it, and takes the one for CUDA
        paths.append(folder)
        env |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "bench_verl_cpu"}
    if option and not importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        paths.append(folder / "bench_verl_apex")
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [env.get("PYTHONPATH")])])
    return env


def measure(run: str, work: Work, arguments: argparse.Namespace, model: Path, folder: Path) -> Figures:
    """Train as ``run`` says; raises RuntimeError if the trainer ends before its steps are done or takes too long."""
    folder.mkdir()
    log, output = folder / "verl.jsonl", folder / "output"
    total_steps = work.warmup + work.steps
    figures, last = Figures(), 0.0
    with output.open("w") as output_file:
        started = time.perf_counter()
        process = subprocess.Popen(
            command(run, work, arguments, model, folder),
            env=environment(run, work, log),
            stdout=output_file,
            stderr=subprocess.STDOUT,
        )
        try:
            while len(figures.loss) < total_steps:
                lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
                for line in lines[len(figures.loss) : total_steps]:
                    if not line.endswith(b"\n"):
                        break
                    now = time.perf_counter()
                    data = json.loads(line)["data"]
                    if figures.loss:
                        figures.seconds.append(now - last)
                    last = now
                    figures.loss.append(data["train/loss"])
                    figures.norm.append(data["train/grad_norm"])
                    figures.tokens.append(data["train/global_tokens"])
                    figures.peak_gib = data.get("perf/max_memory_allocated_gb", figures.peak_gib)
                ended = process.poll() is not None
                if len(figures.loss) < total_steps and (ended or time.perf_counter() - started > arguments.deadline):
                    ending = (
                        f"ended with {process.returncode}" if ended else f"was stopped after {arguments.deadline} s"
                    )
                    raise RuntimeError(
                        f"{run} {ending}, after {len(figures.loss)} of {total_steps} steps:\n{cause(output.read_text())}"
                    )
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers, which have sessions of their own
            process.wait(60)
    if run.startswith("megascend") and READY_MESSAGE not in output.read_text():
        raise RuntimeError(
            f"{run}: verl trained with another engine; install megascend, whose entry point verl looks for"
        )
    return figures


def cause(text: str) -> str:
    """Return the end of a trainer's output, without torchrun's own report."""
    lines = text.splitlines()
    torchrun = next((number for number, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return "\n".join(lines[max(0, torchrun - 40) : torchrun])[-5000:]


def disagreement(reference: Figures, other: Figures, bound: float) -> str:
    """Describe the first difference between two runs; empty if they agree."""
    for quantity in ("tokens", "loss", "norm"):
        pairs = zip(getattr(reference, quantity), getattr(other, quantity), strict=True)
        for step, (expected, value) in enumerate(pairs, start=1):
            if not abs(value - expected) <= bound * abs(expected):
                return f"{quantity} of step {step}: {value:.6g}, not {expected:.6g}"
    return ""


def make_model(work: Work, folder: Path) -> Path:
    """Write a random checkpoint of the work's shape, with a small model's tokenizer, which no data goes through."""
    model = folder / "model"
    write_checkpoint(work, model)
    small = folder / "small"
    subprocess.run([sys.executable, "-m", "megascend", "new-model", str(small)], check=True, stdout=subprocess.DEVNULL)
    for path in small.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, model)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, short sequences")
    parser.add_argument("--run", action="append", help="default: megatron, megatron:fused, megascend, megatron")
    parser.add_argument("--sequences", type=int, default=8, help="of one step, all ranks together")
    parser.add_argument("--length", type=int, help="default: 4096, with --tiny 32")
    parser.add_argument(
        "--shortest", type=int, help="lengths are random from here to --length; default: all of one length"
    )
    parser.add_argument("--micro-batch-tokens", type=int, help="data.max_token_len_per_gpu; default: two sequences")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which a run is stopped")
    parser.add_argument("--set", action="append", default=[], help="a setting of verl's, for all runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a new folder for what the runs write; default: a temporary one")
    arguments = parser.parse_args()
    work = Work(
        shape=TINY if arguments.tiny else QWEN3_1_7B,
        platform=arguments.platform,
        precision="bf16",
        sequences=arguments.sequences,
        length=arguments.length or (32 if arguments.tiny else 4096),
        warmup=arguments.warmup,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=1234,
        ranks=arguments.nproc,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an outer timeout leaves no trainer behind
    runs = arguments.run or ["megatron", "megatron:fused", "megascend", "megatron"]
    results: list[tuple[str, Figures]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(work, folder)
        for number, run in enumerate(runs):
            try:
                figures = measure(run, work, arguments, model, folder / f"{number}-{run.replace(':', '-')}")
            except RuntimeError as error:  # machine time is scarce: continue with the other runs
                print(error, flush=True)
                continue
            results.append((run, figures))
            print(f"{run}: {statistics.median(figures.seconds[work.warmup - 1 :]):.3f} s a step", flush=True)
            if arguments.json:  # now: the next run may be stopped with this script
                rows = [speed(work, *result) for result in results]
                arguments.json.write_text(json.dumps({"work": vars(work), "runs": rows}, indent=1))
    agree = report(work, results, arguments) if results else False
    return 0 if agree and len(results) == len(runs) else 1


def speed(work: Work, run: str, figures: Figures) -> dict[str, Any]:
    """Return a run's figures, with the throughput of its timed steps."""
    seconds, tokens = figures.seconds[work.warmup - 1 :], figures.tokens[work.warmup :]
    return {
        "run": run,
        "tokens_per_s": sum(tokens) / sum(seconds),
        "ms": 1000 * statistics.median(seconds),
        **vars(figures),
    }


def report(work: Work, results: list[tuple[str, Figures]], arguments: argparse.Namespace) -> bool:
    """Print the table; return whether all runs agree numerically."""
    first = results[0][1]
    print(
        f"\n{versions()}\n{work.sequences} sequences of {arguments.shortest or work.length} to {work.length} tokens a step,"
    )
    print(
        f"{work.ranks} ranks, tensor {arguments.tensor}, {work.precision}, {work.steps} timed steps, shape {work.shape}"
    )
    print(
        f"{'run':<16} {'tokens/s':>9} {'ms/step':>9} {'peak GiB':>9} {'x first':>8}   first loss, last loss, first norm"
    )
    agree, base = True, speed(work, *results[0])["tokens_per_s"]
    for run, figures in results:
        row = speed(work, run, figures)
        numbers = f"{figures.loss[0]:.5f} {figures.loss[-1]:.5f} {figures.norm[0]:.5f}"
        measured = f"{row['tokens_per_s']:9.0f} {row['ms']:9.1f} {figures.peak_gib:9.1f}"
        print(f"{run:<16} {measured} {row['tokens_per_s'] / base:8.3f}   {numbers}")
        difference = disagreement(first, figures, TOLERANCE)
        if difference:
            agree = False
            print(f"{'':16} numbers DIFFER: {difference}")
    return agree


if __name__ == "__main__":
    sys.exit(main())
