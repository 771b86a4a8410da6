"""The self-check of a model: made once for a configuration, kept on the disk, told to all ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.distributed.objects import broadcast_object, from_rank_0
from megascend.errors import MegascendError, PlatformError, SelfCheckError
from megascend.huggingface.architectures import registered
from megascend.io import paths, shared
from megascend.selfcheck import in_process, process, suspects
from megascend.selfcheck.process import Trial, TrialResult, Worker, cache_folder, versions
from megascend.selfcheck.slicing import ORIGINAL_POSITIONS, CannotSliceError, Slice, slice_model
from megascend.selfcheck.trial_inputs import described
from megascend.selfcheck.verdict import Convicted, Verdict, gaps, objection, warnings_about

if TYPE_CHECKING:
    from megascend.distributed.process_groups import ProcessGroups
    from megascend.selfcheck.in_process import Subject

HERE = ("torch", "transformers")
"""Packages that compute a check in this process."""
UNCONCERNED = ("cli", "testing")
"""Folders of this package whose code cannot change a verdict."""
POLL_S = 0.5


def require_agreement(
    model_dir: Path,
    full: Mapping[str, Any],
    longest: int,
    window_in_force: bool,
    groups: ProcessGroups,
    worker: Worker | None = None,
) -> Verdict:
    """Return the verdict on the model, found on rank 0 now or earlier, on all ranks; SelfCheckError if it differs. Collective.

    ``full``: the configuration with all defaults; ``longest``: tokens of the longest sample allowed; ``window_in_force``:
    Megatron attends within the model's sliding window; ``worker``: on rank 0, a process started before.
    """
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with groups.monitor.phase("self-check"):
        verdict = _on_rank_0(lambda: examine(raw, full, longest, window_in_force, worker), groups)
    if verdict.status == "differs":
        raise objection(verdict, full, versions())
    tell(verdict, full, groups.rank)
    return verdict


def tell(verdict: Verdict, full: Mapping[str, Any], rank: int) -> None:
    """Warn of what was not checked, and of an architecture that the tests do not prove; on rank 0."""
    for text in warnings_about(verdict, full) if rank == 0 else []:
        logging.getLogger(__name__).warning("%s", text)


def require_agreement_here(
    model_dir: Path, config: Any, longest: int, groups: ProcessGroups, subject: Subject, *, wanted: bool
) -> Verdict:
    """Compare a slice of the model with transformers in this process, on rank 0; return the verdict on all ranks. Collective.

    SelfCheckError, or ConfigError where the engine cannot compute the model, is raised on every rank. Without ``wanted`` nothing
    is compared. ``config``: in transformers' class; ``subject``: the engine's way to compute it.
    """
    if not wanted:
        return Verdict("off")
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with groups.monitor.phase("self-check"):
        verdict = _on_rank_0(lambda: _examine_here(raw, config, longest, subject), groups)
    model_type = config.get_text_config().model_type
    if verdict.status == "differs":
        raise SelfCheckError(in_process.objection(verdict, model_type, subject, versions(HERE)))
    for text in gaps(verdict, model_type) if groups.rank == 0 else []:
        logging.getLogger(__name__).warning("%s", text)
    return verdict


def _examine_here(raw: Mapping[str, Any], config: Any, longest: int, subject: Subject) -> Verdict:
    try:
        part = in_process.slice_here(raw, config, longest)
    except CannotSliceError as error:
        return Verdict("not checked", str(error))
    except (LookupError, TypeError, AttributeError) as error:  # settings of another form than decoders have
        return Verdict("not checked", f"config.json: {described(error)}")
    settings = {"engine": subject.engine, "packing": subject.packing, "head": repr(subject.scalar_head)}
    path = cache_folder() / f"{key(part, HERE, **settings)}.json"
    return _kept_or_made(path, lambda: (in_process.find_out(part, subject), True))


def _on_rank_0(make: Callable[[], Verdict], groups: ProcessGroups) -> Verdict:
    """``make()`` of rank 0, on every rank. Others hear every half second that it is not ready, so that none times out."""
    if len(groups.ranks("world")) == 1:
        return _in_one_sentence(make)
    box: list[tuple[Verdict | None, MegascendError | None]] = []

    def work() -> None:
        try:
            box.append((_in_one_sentence(make), None))
        except MegascendError as error:
            box.append((None, error))

    worker = threading.Thread(target=work, name="megascend-self-check", daemon=True)
    if groups.rank == 0:
        worker.start()

    def result() -> Verdict:
        if not box:
            raise PlatformError("the self-check ended without a verdict; the log above says why")
        verdict, problem = box[0]
        if verdict is None:
            assert problem is not None
            raise problem
        return verdict

    running = True
    while running:
        if groups.rank == 0:
            worker.join(POLL_S)
        running = broadcast_object(worker.is_alive(), "world", groups, what="the self-check")
    return from_rank_0(result, groups, "the self-check")


def _in_one_sentence(make: Callable[[], Verdict]) -> Verdict:
    """Return ``make()``; raise PlatformError, with its cause, for an error that is none of ours."""
    try:
        return make()
    except MegascendError:
        raise
    except Exception as error:
        raise PlatformError(
            f"the self-check failed ({described(error)}); self_check: off skips it, and then compare log-probabilities yourself "
            "(backend.forward)"
        ) from error


def examine(
    raw: Mapping[str, Any], full: Mapping[str, Any], longest: int, window_in_force: bool, worker: Worker | None = None
) -> Verdict:
    """The verdict on a configuration: from the disk, or found out now, by ``worker`` if there is one, and kept there."""
    try:
        part = slice_model(raw, full, longest, window_in_force)
    except CannotSliceError as error:
        return Verdict("not checked", str(error))
    return _kept_or_made(place(part), lambda: find_out(part, worker), lambda: find_out(part))


def _kept_or_made(
    path: Path, make: Callable[[], tuple[Verdict, bool]], again: Callable[[], tuple[Verdict, bool]] | None = None
) -> Verdict:
    """Return the verdict at ``path``, or make and keep it if final; ``again``: used for ``make`` where it cannot be kept."""
    try:
        paths.make_directory(path.parent)
        with shared.locked(path):
            if (known := _kept(path)) is not None:
                return known
            verdict, final = make()
            if final and verdict.status != "not checked":  # what failed may have lacked memory
                keep(path, verdict)
            return verdict
    except OSError as error:  # TimeoutError among them: another process holds the lock
        verdict, _ = (again or make)()
        logging.getLogger(__name__).warning(
            "the self-check's result could not be kept in %s (%s): the next start repeats it", path.parent, error
        )
        return verdict


def keep(path: Path, verdict: Verdict) -> None:
    """Write a verdict for the next start; for use under the lock of ``path``."""
    shared.replace(path, lambda fresh: fresh.write_text(json.dumps(verdict.to_dict(), indent=1), encoding="utf-8"))


def _kept(path: Path) -> Verdict | None:
    try:
        return Verdict.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not there, or not what this version writes
        return None


def find_out(part: Slice, worker: Worker | None = None) -> tuple[Verdict, bool]:
    """Compare the two sides on a slice; also return whether the verdict is final."""
    layers = part.config["num_hidden_layers"]
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
        convicted, short_ones_agree = name_the_setting(part, result)
    except PlatformError:  # the difference stands without its name, and is asked for again next time
        return verdict, False
    return replace(verdict, convicted=convicted, short_ones_agree=short_ones_agree), True


def name_the_setting(part: Slice, found: TrialResult) -> tuple[list[Convicted], bool]:
    """Settings that make the difference, and whether samples on the short side of RoPE's switch agree among themselves."""
    known = suspects.known_suspects(part.config, found.full)
    others = suspects.other_suspects(part.config, found.default, known)
    first, second = suspects.plan(part.config, known), suspects.plan(part.config, others)
    short = [length for length in part.lengths if length <= ORIGINAL_POSITIONS]
    configs = [*first.configs, *second.configs]
    trials = [Trial(config, part.lengths) for config in configs] + [Trial(part.config, short)]
    agrees = [finding.agrees for finding in process.run(trials).findings]
    guilty = suspects.culprits(first, agrees[: len(first.configs)]) or suspects.culprits(
        second, agrees[len(first.configs) : len(configs)]
    )
    return [Convicted(each.name, repr(each.value), repr(each.plain)) for each in guilty], agrees[-1]


# --- where verdicts are kept ---


def place(part: Slice) -> Path:
    """The file of the verdict on ``part``."""
    return cache_folder() / f"{key(part)}.json"


def key(part: Slice, packages: Sequence[str] | None = None, **settings: Any) -> str:
    """Digest what a verdict depends on: slice, packages' versions, our code, architecture, and the engine's settings."""
    content: dict[str, Any] = {
        "config": part.config,
        "lengths": part.lengths,
        "versions": versions() if packages is None else versions(packages),
        "code": own_code(),
        **settings,
    }
    if (architecture := registered(part.config.get("model_type"))) is not None:
        content["architecture"] = architecture.code()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def own_code() -> str:
    """Digest of this package's files."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in UNCONCERNED:
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()
