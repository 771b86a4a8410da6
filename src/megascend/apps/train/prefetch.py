"""Work that a run starts early, in processes of its own: the self-check, and compilation of the first step's kernels.

It only saves time: both results go to a cache on disk. Without this module, or if something in it fails, they are computed when
they are needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

from megascend.apps.train.preflight import RunPlan
from megascend.errors import MegascendError
from megascend.models.checkpoint_files.files import read_config
from megascend.models.selfcheck import process
from megascend.runtime.bootstrap.engines import needs
from megascend.runtime.distributed.launch import Launch, child_environment
from megascend.training.kernels.compile_ahead import Job, compiler_environment, is_driver_installed
from weightwire.background import BackgroundThread

logger = logging.getLogger(__name__)


class SelfCheckPrefetch:
    """Self-check of a run's model on rank 0, while this process imports Megatron and builds the model. Used from one thread.

    Attributes:
        thread: daemon thread that waits for the verdict.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        """Start the worker process, which imports its packages, unless the cache has a verdict on this configuration."""
        self._plan, config = plan, plan.config
        self._enabled = rank == 0 and config.self_check and needs(config.engine).megatron
        self._worker = process.start_worker(config.model, config.batching.max_length) if self._enabled else None
        self.thread: BackgroundThread | None = None

    def begin(self) -> None:
        """Start the check. Called after data and settings are checked: a run that is refused needs none."""
        arguments = self._arguments() if self._enabled else None
        if arguments is None:
            self.close()
            return
        from megascend.models.selfcheck.check import examine  # which imports torch

        worker, self._worker, config = self._worker, None, self._plan.config

        def check() -> None:
            with worker or contextlib.nullcontext():
                with contextlib.suppress(MegascendError):  # the backend repeats the check, and reports the error
                    examine(*arguments, window_active=False, worker=worker)
                process.mark_checked(config.model, config.batching.max_length)

        # A daemon: a run that fails must not wait for the check.
        self.thread = BackgroundThread(check, name="megascend-self-check-prefetch")
        self.thread.start()

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any], int] | None:
        """Return the model's configuration, the same with all defaults, and tokens of the longest sample.

        None with a sliding window, since only the model's Megatron configuration shows whether it is active; or if transformers
        cannot read the configuration, which the backend reports.
        """
        from transformers import AutoConfig

        from megascend.models.checkpoint_files.architectures import make_known_to_transformers

        config, limits = self._plan.config, (self._plan.config.batching.max_length, self._plan.info.shape.max_position)
        try:
            make_known_to_transformers(config.model)
            full = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
            if getattr(full, "sliding_window", None) is not None:
                return None
            settings = json.loads(full.to_json_string(use_diff=False))
        except Exception:  # noqa: BLE001  a bad configuration can fail in any way
            return None
        return read_config(config.model), settings, min((limit for limit in limits if limit), default=sys.maxsize)

    def close(self) -> None:
        """End an idle worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@contextlib.contextmanager
def compiling_kernels(plan: RunPlan, launch: Launch) -> Iterator[None]:
    """Compile the Triton kernels of the first step on CUDA within the context, on the first rank of each host.

    No process is started if Triton's cache has them already. The process is killed at the end, which is safe: Triton writes
    its cache files atomically. A failure is logged; it costs seconds, not the run.
    """
    consequence, compiler = "the first step takes seconds longer", None
    with contextlib.ExitStack() as stack:
        if (job := _missing_job(plan, launch)) is not None:
            try:
                # A file, not a pipe: its output is read only at the end, and a full pipe would block the process.
                errors = stack.enter_context(tempfile.TemporaryFile())
                compiler = subprocess.Popen(
                    [sys.executable, "-m", "megascend.training.kernels.compile_ahead", job.to_text()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=child_environment() | compiler_environment(),
                    cwd="/",  # -m searches the working directory first, which may hold modules of the user
                )
            except OSError as error:
                logger.warning("no process for compiling kernels ahead (%s): %s", error, consequence)
        try:
            yield
        finally:
            if compiler is not None and (code := compiler.poll()) is None:
                compiler.kill()
                compiler.wait()
            elif compiler is not None and code:
                errors.seek(0)
                # A compiler's output may hold bytes that are not UTF-8, or end in the middle of a character.
                end = " ".join(errors.read().decode(errors="replace").split())[-600:]
                logger.warning("kernels could not be compiled ahead, so %s (exit code %d): %s", consequence, code, end)


def job_of(plan: RunPlan) -> Job:
    """Return what to compile for a run, on the first device; see :meth:`Job.of`."""
    config = plan.config
    return Job.of(
        read_config(config.model),
        plan.info,
        plan.topology,
        config.precision,
        packing=config.batching.packing,
        trained=config.lora is None,
    )


def _missing_job(plan: RunPlan, launch: Launch) -> Job | None:
    """Return the job of a run on CUDA whose kernels are not all in Triton's cache, or None."""
    config = plan.config
    if launch.local_rank != 0 or not needs(config.engine).megatron or config.platform not in ("auto", "cuda"):
        return None
    try:
        if is_driver_installed() and not (job := job_of(plan)).is_done:
            return job
    except (MegascendError, OSError, ValueError, TypeError, AttributeError, PackageNotFoundError) as error:
        # No Triton, or a configuration of another form, which the engine reports.
        logger.debug("nothing is compiled ahead: %s: %s", type(error).__name__, error)
    return None
