"""What runs of every kind have in common: checks before the start, the backend, the first step, the export, the last words."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.app.earlier_run import clear_output
from megascend.app.event_log import EVENTS
from megascend.app.plot import plot_metrics, require_extra
from megascend.app.resume import decide, differences, load_first_good, refuse_running, run_files, saved_settings
from megascend.app.shared_output import check_shared
from megascend.config import Adapters, Checkpoint, TrainerConfig
from megascend.data.chat import writes_date
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.architectures import make_known_to_transformers
from megascend.huggingface.files import copy_tokenizer, read_config
from megascend.io.atomic import replacing
from megascend.io.paths import make_directory, stays, why_not_writable
from megascend.tracking.registry import check_trackers
from megascend.tracking.trackers import Trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.app.checkpoint_policy import CheckpointPolicy
    from megascend.app.event_log import EventLog
    from megascend.app.plot import Panel
    from megascend.app.run_log import RunLog
    from megascend.backend import Backend
    from megascend.batch.sample import Sample
    from megascend.bootstrap import Runtime
    from megascend.distributed.launch import Launch

TrainerConfigT = TypeVar("TrainerConfigT", bound=TrainerConfig)
logger = logging.getLogger(__name__)

ADAPTER = "default"
"""Name of a run's adapter, the same as peft gives to one that it loads."""


def check_packages(config: TrainerConfig, *, plugins_to_come: bool = False) -> None:
    """Find out before training that a package which the settings need is missing, or a tracker unknown.

    Args:
        plugins_to_come: modules that the run names, and may register trackers, have not been imported yet.

    Raises:
        ConfigError: there is no tracker of a name.
        MissingDependencyError: a package is missing; the message names the extra that installs it.
    """
    if config.plot:
        require_extra("matplotlib", "plot")
    check_trackers(config.tracker_options, plugins=plugins_to_come and bool(config.plugins))


def check_lora(config: TrainerConfig) -> None:
    """Find out before training that the adapter targets a layer which the model, by its weights' names, does not have.

    Raises:
        ConfigError: it does; the message lists what there is.
        CheckpointError: the weights cannot be read.
    """
    from megascend.huggingface.info import inspect_checkpoint, linear_layers

    if config.lora is None or config.lora.targets == "all-linear":
        return
    tensors = inspect_checkpoint(config.model).tensors
    layers = linear_layers({name: header.shape for name, header in tensors.items()})
    for target in config.lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
            raise ConfigError(f"lora.targets: {target!r} is not a linear layer of {config.model}; it has {ends}")


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights; nothing is downloaded.

    Raises:
        CheckpointError: the directory is missing, or holds no tokenizer that transformers can load, or one without tokens.
    """
    from transformers import AutoTokenizer

    if not model.is_dir():
        raise CheckpointError(f"no model at {model.absolute()} (model): the directory does not exist")
    make_known_to_transformers(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{model}: transformers cannot load the tokenizer (tokenizer.json): {said}") from error
    # Where the vocabulary is missing, transformers makes an empty one, by which every text is the same.
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ordinary = len(tokenizer) - len(added | set(tokenizer.all_special_ids))
    if ordinary < 2:
        raise CheckpointError(
            f"{model}: the tokenizer knows {len(tokenizer)} token{'s' if len(tokenizer) != 1 else ''}, of which {ordinary} are "
            "not special: its vocabulary is missing; copy tokenizer.json (or tokenizer.model) from the model's source"
        )
    return tokenizer


def with_template_date(
    config: TrainerConfigT, tokenizer: PreTrainedTokenizerBase, resume: str | Path | None, launch: Launch
) -> TrainerConfigT:
    """The settings with the day that chat templates are given, where one may ask for it: the checkpoint's, or today.

    It stands in config.yaml and in every checkpoint from then on, so that a resumed run renders the same text on another day.
    """
    if config.template_date is not None or not writes_date(tokenizer):
        return config
    day = saved_settings(config.output, resume, launch).get("template_date")
    return config.model_copy(update={"template_date": date.fromisoformat(day) if day else date.today()})


def bootstrap(config: TrainerConfig) -> Runtime:
    """Make this process ready for a run's engine, as :func:`megascend.bootstrap`."""
    import megascend

    return megascend.bootstrap(
        config.platform,
        config.parallel,
        config.tf32,
        config.engine,
        config.precision,
        config.provider,
        config.affinity,
    )


def make_backend(config: TrainerConfig) -> Backend:
    """The backend that a run's settings describe; with ``lora``, one that has room for its adapter."""
    from megascend import backends

    return backends.make_backend(config.engine, model=config.model, **backend_settings(config))


def backend_settings(config: TrainerConfig) -> dict[str, Any]:
    """Those of a run's settings that its engine's backend is constructed with.

    Raises:
        ConfigError: there is no such engine.
    """
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
    of_some = ("parallel", "fsdp", "provider", "provider_options", "self_check")
    settings = {name: getattr(config, name) for name in (*of_run, *of_some)}
    settings["adapters"] = None if lora is None else Adapters(max_count=1, max_rank=lora.rank, targets=lora.targets)
    settings["save_timeout_s"] = config.checkpoint.timeout_s
    # What the engine does not know stays away as long as the run file has not set it; else it is for the engine to refuse.
    plain = {name: field.default for name, field in TrainerConfig.model_fields.items()}
    plain |= {"adapters": None, "save_timeout_s": Checkpoint().timeout_s}
    known = backends.settings_of(config.engine)
    return {name: value for name, value in settings.items() if name in known or value != plain[name]}


def begin(
    config: TrainerConfig,
    backend: Backend,
    event_log: EventLog,
    overwrite: bool,
    resume: str | Path | None,
    progress_keys: Sequence[str],
) -> Beginning:
    """Put the model at its first step, or where a checkpoint left it. Collective.

    Args:
        progress_keys: what this kind of run saves beside the model.

    Raises:
        ConfigError, CheckpointError: as :func:`megascend.app.resume.decide`, on every rank; or the checkpoint is of another kind
            of run; or the hosts do not share the output directory.
    """
    launch = backend.groups.launch
    start = backend.from_rank_0(lambda: decide(config.output, overwrite, resume, launch))
    check_shared(backend, config.output)
    present, kept = backend.from_rank_0(lambda: _earlier_files(config.output, start.clear))
    # What an attempt without a step has left is removed at once.
    beginning = Beginning(config, backend, event_log, present, waiting=kept and EVENTS in start.clear)
    if backend.rank == 0 and start.said:
        print(start.said, flush=True)
    if not beginning.waiting:
        beginning.clear_output()
    event_log.start(
        wait=beginning.waiting,
        platform=backend.platform.name,
        steps=config.steps,
        every=config.checkpoint.every,
    )
    if not start.candidates:
        if not beginning.waiting and backend.rank == 0:
            write_config(config)
        return beginning
    progress, saved = load_first_good(backend, start.candidates, event_log)
    changed = differences(saved, config)
    if changed and backend.rank == 0:
        print(f"settings that differ from the checkpoint's: {'; '.join(changed)}", flush=True)
    missing = [key for key in progress_keys if key not in progress]
    if missing:
        raise CheckpointError(
            f"{start.candidates[0].parent}: this checkpoint of another kind of run has no {', '.join(missing)} beside its model"
        )
    beginning.progress = progress
    return beginning


def _earlier_files(output: Path, names: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Which of the files ``names`` are in ``output``, and whether they hold a run that must not be lost."""
    present = tuple(name for name in names if os.path.lexists(output / name))
    return present, bool(present and run_files(output))


@dataclass
class Beginning:
    """How a run begins. The files of an earlier run that it replaces stay until it has done a step.

    Attributes:
        cleared: files of an earlier run, to be removed.
        waiting: they are still there, and nothing may be written to the output directory.
        progress: what the run saved beside the model, or None at its beginning.
    """

    config: TrainerConfig
    backend: Backend
    event_log: EventLog
    cleared: tuple[str, ...] = ()
    waiting: bool = False
    progress: dict[str, Any] | None = None
    _began: bool = field(default=False, init=False)

    def take_over(self) -> None:
        """The run has done a step, or has something to keep: the output directory is its own from now on. Collective; once.

        Raises:
            ConfigError: files of the earlier run cannot be removed; on every rank.
        """
        if self._began:
            return
        self._began = True
        if self.waiting:
            self.clear_output()
            self.waiting = False
        if self.backend.rank == 0:
            write_config(self.config)
        self.event_log.write_waiting()

    def clear_output(self) -> None:
        """Remove the earlier run's files. Collective.

        Raises:
            ConfigError: they cannot be removed, or are another process's by now; on every rank.
        """

        def clear() -> None:
            if self.waiting:
                refuse_running(self.config.output)  # it may have begun since
            try:
                clear_output(self.config.output, self.cleared)
            except OSError as error:
                raise ConfigError(
                    f"output: the earlier run's files in {self.config.output} cannot be removed: {error}"
                ) from error

        if self.cleared:
            self.backend.from_rank_0(clear)


def write_config(config: TrainerConfig) -> None:
    """Keep the resolved settings beside the results. Without room for them, the run goes on."""
    import yaml

    try:
        make_directory(config.output)
        with replacing(config.output / "config.yaml") as fresh:
            fresh.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written: %s", config.output / "config.yaml", error)


def draw_metrics(config: TrainerConfig, log: RunLog, title: str, panels: Sequence[Panel] | None = None) -> None:
    """Draw what the run has logged; where that cannot be written, say so: the run itself is complete. On rank 0."""
    path = config.output / "metrics.png"
    try:
        plot_metrics(log.rows, path, title, panels)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)


def make_trackers(config: TrainerConfig, event_log: EventLog, done: int) -> Trackers:
    """The trackers that the settings name, for a run that begins after step ``done``; for rank 0."""
    return Trackers(
        config.tracker_options,
        config.output,
        config.model_dump(mode="json"),
        done,
        lambda name, problem: event_log.event("tracker_failed", tracker=name, problem=problem),
    )


def model_line(config: TrainerConfig, backend: Backend) -> str:
    """Which model a run trains, by its architecture and size, and where it is from."""
    count = backend.parameter_count
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    return f"{read_config(config.model).get('model_type', 'a model')} with {size} parameters ({config.model})"


def keep_batch(config: TrainerConfig, step: int, batch: Sequence[Sample]) -> Path | None:
    """Write the samples of a step whose gradients were not finite, for whoever looks for the reason; None if that cannot be."""
    path = config.output / "non_finite" / f"step-{step}.jsonl"
    fields = ("input_ids", "target_ids", "weights")
    try:
        make_directory(path.parent)
        path.write_text(
            "".join(json.dumps({name: getattr(s, name).tolist() for name in fields}) + "\n" for s in batch),
            encoding="utf-8",
        )
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return None
    return path


def too_many_skips(config: TrainerConfig, step: int, in_a_row: int, batch: Path | None) -> str:
    """The message of the error that ends a run whose gradients stay non-finite; ``batch``: where the last one was kept."""
    remedy = "lower optimizer.lr" if config.precision == "fp32" else "lower optimizer.lr, or use a wider precision"
    return (
        f"{in_a_row} steps in a row, up to step {step}, had non-finite gradients and were skipped on all ranks; the "
        f"limit is max_skipped_steps: {config.max_skipped_steps}. Look at the data"
        f"{f' (the last batch is in {batch})' if batch is not None else ''}, {remedy}"
    )


def utilisation(tokens_per_s: float, batch: Sequence[Sample], backend: Backend) -> float | None:
    """Model FLOP/s over the bf16 peak of all devices, or None where that is not known."""
    peak = backend.platform.peak_flops()
    if peak is None:
        return None
    # A token's attention costs as much as its sequence is long, so the mean length is that over tokens, not samples.
    length = sum(len(sample) ** 2 for sample in batch) / sum(len(sample) for sample in batch)
    return tokens_per_s * backend.flops_per_token(round(length)) / (peak * backend.world_size)


def check_results(config: TrainerConfig, backend: Backend, overwrite: bool) -> None:
    """Find out before the first step that what is trained could not be written after the last one. Collective.

    Args:
        overwrite: an earlier run's results will be removed.

    Raises:
        CheckpointError: it could not; the message says why.
    """
    from megascend.lora.adapter_io import check_target

    def check_adapter() -> None:
        path = config.output / "adapter"
        gone = overwrite and not stays(path)
        if not gone:
            check_target(path)
        if problem := why_not_writable(config.output if gone else path):
            raise CheckpointError(f"save_adapter: {path} cannot be written: {problem}")

    if config.lora is None and (config.export or config.checkpoint.hf):
        backend.check_export(config.output / "hf", replaces=overwrite)
    elif config.lora is not None and config.export:
        backend.from_rank_0(check_adapter)


def export(config: TrainerConfig, backend: Backend, saves: CheckpointPolicy, step: int) -> Path:
    """Write what was trained, and say where: the model, or the adapter alone. Collective.

    Raises:
        CheckpointError: it cannot be written; the message says which checkpoint keeps it.
    """
    path = config.output / ("hf" if config.lora is None else "adapter")
    try:
        if config.lora is None:
            backend.export_hf(path)
        else:
            backend.save_adapter(ADAPTER, path, optimizer=False)
            backend.from_rank_0(lambda: copy_tokenizer(config.model, path, backend.chat_template))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {saves.keep(step)}") from error
    return path


def tell_stop(beginning: Beginning, step: int, signal: str, problem: str | None) -> None:
    """Say that a signal has stopped the run after ``step``.

    Args:
        problem: why there is no checkpoint of that step.

    Raises:
        CheckpointError: there is none.
    """
    backend, event_log = beginning.backend, beginning.event_log
    if beginning.waiting:
        if backend.rank == 0:
            print(
                f"stopped by {signal} before a step was done; the earlier run in {beginning.config.output} is as it was",
                flush=True,
            )
        return
    if problem is not None:
        raise CheckpointError(f"stopped by {signal} after step {step}, without a checkpoint: {problem}")
    event_log.event("stopped", step=step, signal=signal)
    if backend.rank == 0:
        print(f"stopped by {signal} after step {step}; resume with --resume auto", flush=True)
