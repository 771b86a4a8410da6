"""The self-check of a model: run once for a configuration, cached on disk, broadcast to all ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import MegascendError, PlatformError, SelfCheckError
from megascend.models import registered
from megascend.models.selfcheck import in_process, process, suspects
from megascend.models.selfcheck.process import Trial, TrialResult, Worker, cache_folder, versions
from megascend.models.selfcheck.slicing import ORIGINAL_POSITIONS, CannotSliceError, Slice, slice_model
from megascend.models.selfcheck.trial_inputs import description
from megascend.models.selfcheck.verdict import DisagreeingSetting, Verdict, gaps, objection, warnings_about
from megascend.runtime.distributed.objects import broadcast_object, from_rank_0
from megascend.runtime.io import paths, shared
from megascend.runtime.io.hashing import cache_key
from megascend.surroundings import announce
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from megascend.models.selfcheck.in_process import Subject
    from megascend.runtime.distributed.process_groups import ProcessGroups

LOCAL_PACKAGES = ("torch", "transformers")
"""Packages that affect a check in this process."""
EXCLUDED_FOLDERS = ("apps/cli/", "testing/")
"""Folders of this package whose code cannot change a verdict."""
POLL_S = 0.5
"""Seconds between two broadcasts that the self-check is still running."""


def require_agreement(
    model_dir: Path,
    full: Mapping[str, Any],
    longest: int,
    window_active: bool,
    groups: ProcessGroups,
    worker: Worker | None = None,
) -> Verdict:
    """Return rank 0's new or cached verdict on the model on all ranks; raise SelfCheckError if it differs. Collective.

    ``full``: the configuration with all defaults; ``longest``: tokens of the longest sample allowed; ``window_active``:
    Megatron attends within the model's sliding window; ``worker``: on rank 0, a process that was started ahead of time.
    """
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with groups.monitor.phase("self-check"):
        verdict = _on_rank_0(lambda: examine(raw, full, longest, window_active, worker), groups)
    if verdict.status == "differs":
        raise objection(verdict, full, versions())
    log_warnings(verdict, full, groups.rank)
    return verdict


def log_warnings(verdict: Verdict, full: Mapping[str, Any], rank: int) -> None:
    """Log warnings about an incomplete check and about an architecture that the tests do not cover; on rank 0."""
    for text in warnings_about(verdict, full) if rank == 0 else []:
        logging.getLogger(__name__).warning("%s", text)


def require_agreement_in_process(
    model_dir: Path, config: Any, longest: int, groups: ProcessGroups, subject: Subject, *, enabled: bool
) -> Verdict:
    """Compare a slice of the model with transformers in this process, on rank 0; return the verdict on all ranks. Collective.

    SelfCheckError, or ConfigError where the engine cannot compute the model, is raised on every rank. Nothing is compared unless
    ``enabled``. ``config``: transformers' configuration object; ``subject``: adapter to the engine.
    """
    if not enabled:
        return Verdict("off")
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with groups.monitor.phase("self-check"):
        verdict = _on_rank_0(lambda: _examine_in_process(raw, config, longest, subject), groups)
    model_type = config.get_text_config().model_type
    if verdict.status == "differs":
        raise SelfCheckError(in_process.objection(verdict, model_type, subject, versions(LOCAL_PACKAGES)))
    for text in gaps(verdict, model_type) if groups.rank == 0 else []:
        logging.getLogger(__name__).warning("%s", text)
    return verdict


def _examine_in_process(raw: Mapping[str, Any], config: Any, longest: int, subject: Subject) -> Verdict:
    try:
        part = in_process.slice_transformers_model(raw, config, longest)
    except CannotSliceError as error:
        return Verdict("not checked", str(error))
    except (LookupError, TypeError, AttributeError) as error:  # a configuration that is not laid out like a decoder's
        return Verdict("not checked", f"config.json: {description(error)}")
    settings = {"engine": subject.engine, "packing": subject.packing, "head": repr(subject.scalar_head)}
    path = cache_folder() / f"{key(part, LOCAL_PACKAGES, **settings)}.json"
    return _cached(path, lambda: (in_process.compare(part, subject), True))


def _on_rank_0(make: Callable[[], Verdict], groups: ProcessGroups) -> Verdict:
    """Run ``make()`` on rank 0 and return its verdict on every rank.

    A check may take longer than the timeout of a collective. So it runs on a thread, and rank 0 broadcasts every half second
    that it is still running.
    """
    if len(groups.ranks("world")) == 1:
        return _as_megascend_error(make)
    # The verdict or the error of the thread.
    outcome: list[tuple[Verdict | None, MegascendError | None]] = []

    def work() -> None:
        try:
            outcome.append((_as_megascend_error(make), None))
        except MegascendError as error:
            outcome.append((None, error))

    # A daemon: if another rank fails, this process must be able to end before the check does.
    worker = BackgroundThread(work, name="megascend-self-check")
    if groups.rank == 0:
        worker.start()

    def result() -> Verdict:
        if not outcome:
            raise PlatformError("the self-check ended without a verdict; see the log above for the cause")
        verdict, problem = outcome[0]
        if verdict is None:
            assert problem is not None
            raise problem
        return verdict

    running = True
    while running:
        if groups.rank == 0:
            worker.join(POLL_S)
        # On ranks other than 0 the value is ignored: they receive rank 0's.
        running = broadcast_object(worker.is_alive(), "world", groups, purpose="the self-check")
    return from_rank_0(result, groups, "the self-check")


def _as_megascend_error(make: Callable[[], Verdict]) -> Verdict:
    """Return ``make()``; raise PlatformError from any exception that is not a MegascendError."""
    try:
        return make()
    except MegascendError:
        raise
    except Exception as error:
        raise PlatformError(
            f"the self-check failed ({description(error)}); set self_check: off to skip it, and then compare log-probabilities "
            "yourself (backend.forward)"
        ) from error


def examine(
    raw: Mapping[str, Any], full: Mapping[str, Any], longest: int, window_active: bool, worker: Worker | None = None
) -> Verdict:
    """Return the verdict on a configuration from the cache, or run the check (in ``worker``, if any) and cache it."""
    try:
        part = slice_model(raw, full, longest, window_active)
    except CannotSliceError as error:
        return Verdict("not checked", str(error))
    # A worker runs one job only: the retry after an OSError needs a new one.
    return _cached(verdict_path(part), lambda: compare(part, worker), lambda: compare(part))


def _cached(
    path: Path, make: Callable[[], tuple[Verdict, bool]], retry: Callable[[], tuple[Verdict, bool]] | None = None
) -> Verdict:
    """Return the verdict at ``path``, or make it and store it if final.

    ``retry``: called in place of ``make`` if the cache cannot be used; default: ``make``.
    """
    try:
        paths.make_directory(path.parent)
        with shared.locked(path):
            if (cached := _load(path)) is not None:
                return cached
            announce("self-check: comparing a slice of the model with transformers")
            verdict, final = make()
            # "not checked" may be due to a lack of memory, so the next start tries again.
            if final and verdict.status != "not checked":
                store(path, verdict)
            return verdict
    except OSError as error:  # includes TimeoutError: another process holds the lock
        verdict, _ = (retry or make)()
        logging.getLogger(__name__).warning(
            "the self-check's result could not be stored in %s (%s): the next start repeats it", path.parent, error
        )
        return verdict


def store(path: Path, verdict: Verdict) -> None:
    """Write a verdict for the next start; for use under the lock of ``path``."""
    shared.replace(path, lambda fresh: fresh.write_text(json.dumps(verdict.to_dict(), indent=1), encoding="utf-8"))


def _load(path: Path) -> Verdict | None:
    try:
        return Verdict.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # missing, or written by another version
        return None


def compare(part: Slice, worker: Worker | None = None) -> tuple[Verdict, bool]:
    """Compare Megatron with transformers on a slice; also return whether the verdict is final."""
    layers = part.layers
    try:
        report = process.run([Trial(part.config, part.lengths)], worker)
    except PlatformError as error:
        blank = Verdict("not checked", str(error), layers=layers, lengths=list(part.lengths), not_shown=part.not_shown)
        return blank, False
    result = report.findings[0]
    verdict = replace(result.verdict(part, layers), seconds=report.seconds, peak_bytes=report.peak_bytes)
    if verdict.status != "differs":
        return verdict, True
    try:
        disagreeing, short_samples_agree = find_settings(part, result)
    except PlatformError:  # the difference is reported without its cause, which the next start searches again
        return verdict, False
    return replace(verdict, disagreeing=disagreeing, short_samples_agree=short_samples_agree), True


def find_settings(part: Slice, result: TrialResult) -> tuple[list[DisagreeingSetting], bool]:
    """Return the settings that cause a difference, and whether samples on the short side of RoPE's switch agree."""
    full, default = (values.get("text_config", values) for values in (result.full, result.default))
    first_suspects = suspects.known_suspects(part.text_config, full)
    other_suspects = suspects.other_suspects(part.text_config, default, first_suspects)
    first, second = suspects.plan(part.config, first_suspects), suspects.plan(part.config, other_suspects)
    # Below the switch of RoPE both sides may agree: then the remedy is a shorter max_length, not another engine.
    short = [length for length in part.lengths if length <= ORIGINAL_POSITIONS]
    configs = [*first.configs, *second.configs]
    trials = [Trial(config, part.lengths) for config in configs] + [Trial(part.config, short)]
    # All trials in one job: starting a worker takes longer than most trials.
    agrees = [finding.agrees for finding in process.run(trials).findings]
    culprits = suspects.culprits(first, agrees[: len(first.configs)]) or suspects.culprits(
        second, agrees[len(first.configs) : len(configs)]
    )
    return [DisagreeingSetting(suspect.name, repr(suspect.value), repr(suspect.plain)) for suspect in culprits], agrees[
        -1
    ]


# --- the cache of verdicts ---


def verdict_path(part: Slice) -> Path:
    """Return the cache file of the verdict on ``part``."""
    return cache_folder() / f"{key(part)}.json"


def key(part: Slice, packages: Sequence[str] | None = None, **settings: Any) -> str:
    """Return a digest of everything that a verdict depends on: slice, package versions, code, architecture, settings."""
    content: dict[str, Any] = {
        "config": part.config,
        "lengths": part.lengths,
        "versions": versions() if packages is None else versions(packages),
        # A verdict of other code does not apply: a patch may have removed the difference, or caused one.
        "code": code_digest(),
        **settings,
    }
    if (architecture := registered(part.config.get("model_type"))) is not None:
        content["architecture"] = architecture.code_digest()
    return cache_key(content)


@functools.cache
def code_digest() -> str:
    """Return a digest of this package's files."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(EXCLUDED_FOLDERS):
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()
