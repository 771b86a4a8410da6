"""Supervised training from a :class:`RunConfig`: what ``megascend train`` runs on every rank."""

from __future__ import annotations

import gc
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.app.checkpoint_policy import CheckpointPolicy
from megascend.app.event_log import EventLog
from megascend.app.plot import plot_metrics, require_extra
from megascend.app.resume import belongs, check_start, decide, differences, load_first_good
from megascend.app.run_log import RunLog, StepRecord
from megascend.app.stop_signals import StopSignals
from megascend.config import Adapters, Checkpoint, RunConfig
from megascend.config.plugins import import_plugins
from megascend.distributed.launch import Launch
from megascend.errors import CheckpointError, ConfigError, NonFiniteError
from megascend.files import replacing
from megascend.huggingface.architectures import make_known_to_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.app.data import Batches
    from megascend.backend import Backend
    from megascend.batch.results import ForwardBackwardResult, StepResult
    from megascend.batch.sample import Sample

ADAPTER = "default"
"""Name of a run's adapter, the same as peft gives to one that it loads."""


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
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal that stopped the run before its last step (``"SIGTERM"``), or None. A checkpoint was saved.
    """

    steps: int
    loss: float
    tokens: int
    seconds: float
    skipped_steps: int
    output: Path
    export: Path | None
    stopped: str | None = None


def train(config: RunConfig, *, overwrite: bool = False, resume: str | Path | None = None) -> TrainResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 writes to ``config.output``: metrics.jsonl and the TensorBoard log step by step; config.yaml, the exported
    model in hf/ (or, with ``lora``, in adapter/ what peft loads) and metrics.png each complete or not at all. A directory
    that holds an earlier run is refused before anything starts, unless ``overwrite``; then the earlier run's files are
    removed when the first step is to begin. SIGTERM and SIGINT end a run after its present step, with a checkpoint.

    Args:
        resume: ``"auto"``: go on from the newest checkpoint in ``config.output`` that is whole, if there is any. A path: from
            that checkpoint, or the newest of that run.

    Raises:
        ConfigError: the output directory holds a run, or a setting cannot work, ``lora.targets`` for example.
        MissingDependencyError: ``plot`` or ``tensorboard`` is set and its package is not installed.
        DataError: the data cannot be trained on; the message names file and line.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    # What can be refused is refused here, in the first second and on every rank alike.
    launch = Launch.from_environment()
    check_start(config.output, overwrite, resume, launch)
    event_log = EventLog(config.output, launch, active=belongs(config.output, resume, launch))
    with event_log.keeping_errors(lambda: 0):
        import_plugins(config.plugins)
        check_packages(config)
        check_lora(config)
        try:
            return run(config, launch, event_log, overwrite, resume)
        finally:
            gc.unfreeze()  # the caller's own objects are among those that run() has frozen


def run(
    config: RunConfig, launch: Launch, event_log: EventLog, overwrite: bool, resume: str | Path | None
) -> TrainResult:
    """:func:`train`, after what could be refused at once."""
    # World: the process is made ready before anything imports Megatron.
    import megascend
    from megascend.bootstrap.engines import needs

    runtime = megascend.bootstrap(
        config.platform, config.parallel, config.tf32, config.engine, config.precision, config.provider
    )

    # Data that cannot be read is found before the model is built.
    from megascend.app.data import batches, fingerprint_of, read_documents
    from megascend.app.tokenize import build_samples

    documents = read_documents(config.data.path)

    # Modules stay: garbage collection need not look through them again, between steps least of all.
    if needs(config.engine).megatron:
        runtime.load_megatron()
    gc.collect()
    gc.freeze()

    # Model: trained itself, or frozen under one adapter
    tokenizer = load_tokenizer(config.model)
    backend = make_backend(config)
    lora = config.lora
    adapter = None if lora is None else ADAPTER
    launched = launch.agent_store or launch.world_size > 1
    with backend, event_log.keeping_errors(lambda: backend.step_count + 1), StopSignals(launched=launched) as signals:
        if lora is not None:
            backend.add_adapter(ADAPTER, lora)
        backend.groups.monitor.last_words = lambda error: event_log.error(error, backend.step_count + 1)
        samples = build_samples(documents, tokenizer, backend.max_length, config.data.train_on_prompt)
        data = config.data
        stream = batches(samples, data.global_batch_size, config.seed, data.shuffle, fingerprint_of(samples))
        main_rank = backend.rank == 0
        counts = begin(config, backend, event_log, stream, overwrite, resume)
        if main_rank:
            write_config(config)
            print(start_line(config, backend, len(samples)), flush=True)
            if backend.self_check is not None:
                print(backend.self_check.summary(), flush=True)

        # Loop
        number = done = backend.step_count
        saves = CheckpointPolicy(
            backend, config, event_log, lambda: {"data": stream.state_dict(), "counts": vars(counts)}
        )
        backend.platform.reset_peak_memory()
        with RunLog(config.output, config.steps, config.tensorboard, enabled=main_rank, done=done) as log:
            before = time.perf_counter()
            for number in range(done + 1, config.steps + 1):
                batch = next(stream)
                result = backend.forward_backward(backend.shard(batch), loss="cross_entropy", adapter=adapter)
                step = backend.optimizer_step()
                now = time.perf_counter()
                seconds = now - before
                counts.add(result, step, seconds)
                log.write(record(number, result, step, seconds, counts, stream.epochs, batch, backend))
                if step.skipped_in_a_row > config.max_skipped_steps:
                    where = keep_batch(config, number, batch) if main_rank else None
                    raise NonFiniteError(too_many_skips(config, number, step.skipped_in_a_row, where))
                before = time.perf_counter()
                if saves.after_step(number, signals.received is not None):
                    break
        saves.finish(number)

        # Out
        stopped = exported = None
        if number < config.steps:
            stopped = signals.received.name if signals.received is not None else "a signal on another rank"
            tell_stop(backend, event_log, number, stopped, saves.problem)
        else:
            exported = export(config, backend) if config.export else None
            if main_rank and config.plot:
                plot_metrics(log.rows, config.output / "metrics.png", title=start_line(config, backend, len(samples)))
            tell_end(config, backend, event_log, number, counts)
    return TrainResult(
        number, counts.loss, counts.tokens, counts.seconds, counts.skipped, config.output, exported, stopped
    )


def make_backend(config: RunConfig) -> Backend:
    """The backend that a run's settings describe; with ``lora``, one that has room for its adapter."""
    from megascend import backends

    lora = config.lora
    of_run = (
        "precision",
        "tf32",
        "optimizer",
        "schedule",
        "recompute",
        "moe",
        "batching",
        "platform",
        "seed",
        "timeout_s",
    )
    of_some = ("parallel", "provider", "provider_options", "self_check")
    settings = {name: getattr(config, name) for name in (*of_run, *of_some)}
    settings["adapters"] = None if lora is None else Adapters(max_count=1, max_rank=lora.rank, targets=lora.targets)
    settings["save_timeout_s"] = config.checkpoint.timeout_s
    # What the engine does not know stays away as long as the run file has not set it; else it is for the engine to refuse.
    plain = {name: field.default for name, field in RunConfig.model_fields.items()}
    plain |= {"adapters": None, "save_timeout_s": Checkpoint().timeout_s}
    known = backends.settings_of(config.engine)
    wanted = {name: value for name, value in settings.items() if name in known or value != plain[name]}
    return backends.make_backend(config.engine, model=config.model, **wanted)


def tell_stop(backend: Backend, event_log: EventLog, step: int, signal: str, problem: str | None) -> None:
    """Say that a signal has stopped the run after ``step``.

    Args:
        problem: why there is no checkpoint of that step.

    Raises:
        CheckpointError: there is none.
    """
    if problem is not None:
        raise CheckpointError(f"stopped by {signal} after step {step}, without a checkpoint: {problem}")
    event_log.event("stopped", step=step, signal=signal)
    if backend.rank == 0:
        print(f"stopped by {signal} after step {step}; go on with --resume auto", flush=True)


def tell_end(config: RunConfig, backend: Backend, event_log: EventLog, step: int, counts: Counts) -> None:
    """Say that the run has done all its steps, and where to look."""
    event_log.event("finished", step=step, loss=counts.loss)
    if backend.rank == 0:
        summary = f"{step} steps in {counts.seconds:.0f} s, last loss {counts.loss:.4f}"
        print(f"{summary}; see {config.output}", flush=True)


@dataclass
class Counts:
    """Sums over the steps of a run, those before it was resumed included.

    Attributes:
        tokens: input tokens of all ranks.
        skipped: steps that all ranks skipped.
        seconds: in steps, on this rank.
        loss: of the last step.
    """

    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loss: float = math.nan

    def add(self, result: ForwardBackwardResult, step: StepResult, seconds: float) -> None:
        """Count one step."""
        self.tokens += result.total_tokens
        self.skipped += step.skipped
        self.seconds += seconds
        self.loss = result.loss


def begin(
    config: RunConfig,
    backend: Backend,
    event_log: EventLog,
    stream: Batches[Sample],
    overwrite: bool,
    resume: str | Path | None,
) -> Counts:
    """Put the run at its first step, or where a checkpoint left it. Collective.

    Raises:
        ConfigError, CheckpointError: as :func:`megascend.app.resume.decide`, on every rank.
        DataError: the data is not that of the checkpoint.
    """
    launch = backend.groups.launch
    start = backend.from_rank_0(lambda: decide(config.output, overwrite, resume, launch))
    if backend.rank == 0:
        if start.said:
            print(start.said, flush=True)
        if start.clear:
            clear_output(config.output, start.clear)
    event_log.start(platform=backend.platform.name, steps=config.steps, every=config.checkpoint.every)
    if not start.candidates:
        return Counts()
    progress, saved = load_first_good(backend, start.candidates, event_log)
    changed = differences(saved, config)
    if changed and backend.rank == 0:
        print(f"settings that differ from the checkpoint's: {'; '.join(changed)}", flush=True)
    stream.load_state_dict(progress["data"])
    return Counts(**progress["counts"])


def record(
    number: int,
    result: ForwardBackwardResult,
    step: StepResult,
    seconds: float,
    counts: Counts,
    epoch: float,
    batch: Sequence[Sample],
    backend: Backend,
) -> StepRecord:
    """The line of metrics.jsonl about a step that took ``seconds``."""
    speed = result.total_tokens / seconds
    return StepRecord(
        step=number,
        loss=result.loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        tokens=result.tokens,
        total_tokens=result.total_tokens,
        tokens_per_s=speed,
        skipped=step.skipped,
        epoch=epoch,
        peak_memory_bytes=backend.platform.memory().peak,
        seconds=counts.seconds,
        mfu=utilisation(speed, batch, backend),
    )


def keep_batch(config: RunConfig, step: int, batch: Sequence[Sample]) -> Path:
    """Write the samples of a step whose gradients were not finite, for whoever looks for the reason."""
    path = config.output / "non_finite" / f"step-{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = ("input_ids", "target_ids", "weights")
    path.write_text("".join(json.dumps({name: getattr(s, name).tolist() for name in fields}) + "\n" for s in batch))
    return path


def export(config: RunConfig, backend: Backend) -> Path:
    """Write what was trained, and say where: the model, or the adapter alone. Collective."""
    if config.lora is None:
        path = config.output / "hf"
        backend.export_hf(path)
    else:
        path = config.output / "adapter"
        backend.save_adapter(ADAPTER, path, optimizer=False)
    return path


def too_many_skips(config: RunConfig, step: int, in_a_row: int, batch: Path | None) -> str:
    """The message of the error that ends a run whose gradients stay non-finite; ``batch``: where the last one was kept."""
    remedy = "lower optimizer.lr" if config.precision == "fp32" else "lower optimizer.lr, or use a wider precision"
    return (
        f"{in_a_row} steps in a row, up to step {step}, had non-finite gradients and were skipped on all ranks; the "
        f"limit is max_skipped_steps: {config.max_skipped_steps}. Look at the data"
        f"{f' (the last batch is in {batch})' if batch is not None else ''}, {remedy}"
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


def check_lora(config: RunConfig) -> None:
    """Find out before training that the adapter targets a layer which the model, by its weights' names, does not have.

    Raises:
        ConfigError: it does; the message lists what there is.
        CheckpointError: the weights cannot be read.
    """
    from megascend.huggingface.files import tensor_shapes
    from megascend.huggingface.info import linear_layers

    if config.lora is None or config.lora.targets == "all-linear":
        return
    layers = linear_layers(tensor_shapes(config.model))
    for target in config.lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
            raise ConfigError(f"lora.targets: {target!r} is no linear layer of {config.model}; it has {ends}")


def clear_output(output: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` that an earlier run left in ``output``, and nothing else."""
    for name in names:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_config(config: RunConfig) -> None:
    """Keep the resolved settings beside the results."""
    import yaml

    config.output.mkdir(parents=True, exist_ok=True)
    with replacing(config.output / "config.yaml") as fresh:
        fresh.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights; nothing is downloaded.

    Raises:
        CheckpointError: the directory is missing, or holds no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    if not model.is_dir():
        raise CheckpointError(f"no model at {model.resolve()} (model): the directory does not exist")
    make_known_to_transformers(model)
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{model}: transformers cannot load the tokenizer (tokenizer.json): {error}") from error


def utilisation(tokens_per_s: float, batch: Sequence[Sample], backend: Backend) -> float | None:
    """Model FLOP/s over the bf16 peak of all devices, or None where that is not known."""
    peak = backend.platform.peak_flops()
    if peak is None:
        return None
    # A token's attention costs as much as its sequence is long, so the mean length is that over tokens, not samples.
    length = sum(len(sample) ** 2 for sample in batch) / sum(len(sample) for sample in batch)
    return tokens_per_s * backend.flops_per_token(round(length)) / (peak * backend.world_size)


def start_line(config: RunConfig, backend: Backend, samples: int) -> str:
    """One line on what is about to happen."""
    ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''} on {backend.platform.name}"
    lora = f"LoRA of rank {config.lora.rank}, " if config.lora is not None else ""
    steps = f"{config.steps} steps of {config.data.global_batch_size}"
    precision = config.precision + (" with TF32 products" if config.tf32 else "")
    return f"{config.model.name}: {lora}{samples} samples, {steps}; {precision}; {ranks}"
