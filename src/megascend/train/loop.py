"""Supervised training from a :class:`RunConfig`: what ``megascend train`` runs on every rank."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.config import RunConfig
from megascend.errors import CheckpointError, ConfigError, NonFiniteError
from megascend.train.plot import plot_metrics, require_extra
from megascend.train.run_log import RunLog, StepRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.backend import MegatronBackend
    from megascend.train.sample import Sample

RUN_FILES = ("metrics.jsonl", "config.yaml", "metrics.png", "hf", "tensorboard")
"""Everything a run writes into its output directory."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. The same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        loss: of the last step.
        tokens: input tokens over all ranks and steps.
        seconds: from the first step to the last, without start-up and export.
        skipped_steps: steps that a non-finite gradient made all ranks skip.
        output: the run directory.
        export: the exported model, or None.
    """

    steps: int
    loss: float
    tokens: int
    seconds: float
    skipped_steps: int
    output: Path
    export: Path | None


def train(config: RunConfig, *, overwrite: bool = False) -> TrainResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 writes to ``config.output``: metrics.jsonl and the TensorBoard log step by step; config.yaml, the exported
    model in hf/ and metrics.png each complete or not at all. A directory that holds an earlier run is refused before
    anything starts, unless ``overwrite``; then the earlier run's files are removed when the first step is to begin.

    Raises:
        ConfigError: the output directory holds a run, or a setting cannot work.
        MissingDependencyError: ``plot`` or ``tensorboard`` is set and its package is not installed.
        DataError: the data cannot be trained on; the message names file and line.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
    """
    # What can be refused is refused here, in the first second and on every rank alike.
    check_output(config.output, overwrite)
    check_packages(config)

    # World: the process is made ready before anything imports Megatron.
    import megascend

    megascend.bootstrap(config.platform, config.parallel)

    # Data that cannot be read is found before the model is built.
    from megascend.train.data import batches, read_documents
    from megascend.train.tokenize import build_samples

    documents = read_documents(config.data.path)
    tokenizer = load_tokenizer(config.model)

    # Model
    backend = megascend.MegatronBackend(
        model=config.model,
        parallel=config.parallel,
        precision=config.precision,
        optimizer=config.optimizer,
        schedule=config.schedule,
        recompute=config.recompute,
        moe=config.moe,
        batching=config.batching,
        mindspeed=config.mindspeed,
        platform=config.platform,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )
    try:
        samples = build_samples(documents, tokenizer, backend.max_length, config.data.train_on_prompt)
        stream = batches(samples, config.data.global_batch_size, config.seed, config.data.shuffle)
        main_rank = backend.rank == 0
        if main_rank:
            clear_output(config.output)
            write_config(config)
            print(start_line(config, backend, len(samples)), flush=True)

        # Loop
        total_tokens = skipped = 0
        loss = float("nan")
        backend.platform.reset_peak_memory()
        start = before = time.perf_counter()
        with RunLog(config.output, config.steps, config.tensorboard, enabled=main_rank) as log:
            for number in range(1, config.steps + 1):
                batch = next(stream)
                result = backend.forward_backward(backend.shard(batch), loss="cross_entropy")
                step = backend.optimizer_step()
                now = time.perf_counter()
                loss, speed = result.loss, result.total_tokens / (now - before)
                log.write(
                    StepRecord(
                        step=number,
                        loss=loss,
                        grad_norm=step.grad_norm,
                        lr=step.lr,
                        tokens=result.tokens,
                        total_tokens=result.total_tokens,
                        tokens_per_s=speed,
                        skipped=step.skipped,
                        epoch=stream.epochs,
                        peak_memory_bytes=backend.platform.memory().peak,
                        seconds=now - start,
                        mfu=utilisation(speed, batch, backend),
                    )
                )
                before = now
                total_tokens += result.total_tokens
                skipped += step.skipped
                if step.skipped_in_a_row > config.max_skipped_steps:
                    raise NonFiniteError(too_many_skips(config, number, step.skipped_in_a_row))
        seconds = time.perf_counter() - start

        # Out
        exported = config.output / "hf" if config.export else None
        if exported is not None:
            backend.export_hf(exported)
        if main_rank and config.plot:
            plot_metrics(log.rows, config.output / "metrics.png", title=start_line(config, backend, len(samples)))
        if main_rank:
            print(f"{config.steps} steps in {seconds:.0f} s, last loss {loss:.4f}; see {config.output}", flush=True)
    finally:
        backend.close()
    return TrainResult(config.steps, loss, total_tokens, seconds, skipped, config.output, exported)


def too_many_skips(config: RunConfig, step: int, in_a_row: int) -> str:
    """The message of the error that ends a run whose gradients stay non-finite."""
    remedy = "lower optimizer.lr" if config.precision == "fp32" else "lower optimizer.lr, or use a wider precision"
    return (
        f"{in_a_row} steps in a row, up to step {step}, had non-finite gradients and were skipped on all ranks; the "
        f"limit is max_skipped_steps: {config.max_skipped_steps}. Look at the data, {remedy}"
    )


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse a directory that holds an earlier run, unless it may be overwritten.

    Raises:
        ConfigError: it does, or it is not a directory.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output: {output} exists and is not a directory")
    held = [name for name in RUN_FILES if (output / name).exists()]
    if held and not overwrite:
        raise ConfigError(
            f"output: {output} holds an earlier run ({', '.join(held)}); choose another with --set output=PATH, "
            "or replace it with --overwrite"
        )


def check_packages(config: RunConfig) -> None:
    """Find out before training that a package which the settings need at the end of it is missing.

    Raises:
        MissingDependencyError: one is; the message names the extra that installs it.
    """
    if config.plot:
        require_extra("matplotlib", "plot")
    if config.tensorboard:
        require_extra("tensorboard", "tensorboard")


def clear_output(output: Path) -> None:
    """Remove what an earlier run left in ``output``, and nothing else."""
    for name in RUN_FILES:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_config(config: RunConfig) -> None:
    """Keep the resolved settings beside the results."""
    import yaml

    config.output.mkdir(parents=True, exist_ok=True)
    partial = config.output / ".config.yaml.partial"
    partial.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    os.replace(partial, config.output / "config.yaml")


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights; nothing is downloaded.

    Raises:
        CheckpointError: the directory is missing, or holds no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    if not model.is_dir():
        raise CheckpointError(f"no model at {model.resolve()} (model): the directory does not exist")
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{model}: transformers cannot load the tokenizer (tokenizer.json): {error}") from error


def utilisation(tokens_per_s: float, batch: Sequence[Sample], backend: MegatronBackend) -> float | None:
    """Model FLOP/s over the bf16 peak of all devices, or None where that is not known."""
    peak = backend.platform.peak_flops()
    if peak is None:
        return None
    # A token's attention costs as much as its sequence is long, so the mean length is that over tokens, not samples.
    length = sum(len(sample) ** 2 for sample in batch) / sum(len(sample) for sample in batch)
    return tokens_per_s * backend.flops_per_token(round(length)) / (peak * backend.world_size)


def start_line(config: RunConfig, backend: MegatronBackend, samples: int) -> str:
    """One line on what is about to happen."""
    ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''} on {backend.platform.name}"
    return f"{config.model.name}: {samples} samples, {config.steps} steps of {config.data.global_batch_size}; {ranks}"
