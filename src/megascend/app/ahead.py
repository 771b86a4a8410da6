"""What a start begins before its turn, each in a process of its own: a matter of time alone.

The self-check's verdict and the kernels of a first step on CUDA are kept on the disk, where they are looked for when they are
needed. Without this module, or if something in it fails, they are made then.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from megascend import kernels
from megascend.app.preflight import RunPlan
from megascend.bootstrap.engines import needs
from megascend.distributed.launch import Launch, child_environment
from megascend.errors import MegascendError
from megascend.huggingface.files import read_config
from megascend.io.hashing import digest
from megascend.kernels.compile_ahead import DRIVER, Attention, Job
from megascend.kernels.head_sizes import rotary_fits, width_fits
from megascend.selfcheck import process
from megascend.surroundings import home

logger = logging.getLogger(__name__)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PACKAGES = ("torch", "triton")
NO_JOB = (OSError, MegascendError, ValueError, TypeError, AttributeError, PackageNotFoundError)
"""What a machine without CUDA's driver or Triton raises, and a configuration of another form, which the engine reports."""


class SelfCheckAhead:
    """On rank 0, the self-check of a run's model while this process imports Megatron and builds. Used from one thread.

    Attributes:
        thread: waits for the verdict; it does not keep the process from ending.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        """Start the process that checks, unless a run has asked for the verdict before: it imports what it needs meanwhile."""
        self._plan, config = plan, plan.config
        self._wanted = rank == 0 and config.self_check and needs(config.engine).megatron
        self._worker = process.start_worker(config.model, config.batching.max_length) if self._wanted else None
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask for the verdict, once data and settings are found fit; a worker that cannot be asked yet is ended."""
        question = self._question() if self._wanted else None
        if question is None:
            self.close()
            return
        from megascend.selfcheck.check import examine  # which imports torch

        worker, self._worker, config = self._worker, None, self._plan.config

        def ask() -> None:
            with worker or contextlib.nullcontext():
                with contextlib.suppress(MegascendError):  # the backend reports it
                    examine(*question, window_in_force=False, worker=worker)
                process.mark_checked(config.model, config.batching.max_length)

        self.thread = threading.Thread(target=ask, name="megascend-self-check-ahead", daemon=True)
        self.thread.start()

    def _question(self) -> tuple[dict[str, Any], dict[str, Any], int] | None:
        """Return the model's configuration, the same with all defaults, and tokens of the longest sample.

        None with a sliding window, of which only the model's Megatron configuration says whether it is in force; or if
        transformers cannot read the configuration, which the backend reports.
        """
        from transformers import AutoConfig

        from megascend.huggingface.architectures import make_known_to_transformers

        config, limits = self._plan.config, (self._plan.config.batching.max_length, self._plan.info.shape.max_position)
        try:
            make_known_to_transformers(config.model)
            full = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
            if getattr(full, "sliding_window", None) is not None:
                return None
            settings = json.loads(full.to_json_string(use_diff=False))
        except Exception:  # noqa: BLE001  a configuration may be anything
            return None
        return read_config(config.model), settings, min((limit for limit in limits if limit), default=sys.maxsize)

    def close(self) -> None:
        """End a worker that has nothing to do."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@contextlib.contextmanager
def compiling_kernels(plan: RunPlan, launch: Launch) -> Iterator[None]:
    """Compile the Triton kernels of a first step on CUDA until the block ends, on the first rank of each host.

    They follow from the model's files and the settings alone. Where Triton's cache has them already, nothing is started; since
    it takes files whole, the process may be killed at any time.
    """
    config = plan.config
    if launch.local_rank != 0 or not needs(config.engine).megatron or config.platform not in ("auto", "cuda"):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            ctypes.CDLL(DRIVER)
            job = job_of(plan)
        except NO_JOB as error:
            logger.debug("nothing is compiled ahead: %s: %s", type(error).__name__, error)
        else:
            if not Path(job.done).exists():
                stack.enter_context(_compiler(job))
        yield


@contextlib.contextmanager
def _compiler(job: Job) -> Iterator[None]:
    """Run the process that compiles; if it has failed when the block ends, the log says why."""
    late = "the first step takes seconds longer"
    with contextlib.ExitStack() as stack:
        process = None
        try:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-m", "megascend.kernels.compile_ahead", job.to_text()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=compiler_environment(),
                cwd="/",  # not where the user's own modules are: -m looks there first
            )
        except OSError as error:
            logger.warning("no process for compiling kernels ahead (%s): %s", error, late)
        try:
            yield
        finally:
            if process is not None and (code := process.poll()) is None:
                process.kill()
                process.wait()
            elif process is not None and code:
                errors.seek(0)
                end = " ".join(errors.read().decode(errors="replace").split())[-600:]
                logger.warning("kernels could not be compiled ahead, so %s (exit code %d): %s", late, code, end)


def job_of(plan: RunPlan) -> Job:
    """Return what to compile for a run, on the first device.

    Raises:
        OSError, MegascendError, ValueError, TypeError, AttributeError: the configuration is not what one is.
        PackageNotFoundError: there is no Triton.
    """
    config, info, shape, tensor = plan.config, plan.info, plan.info.shape, plan.topology.tensor
    raw = read_config(config.model)
    text: Mapping[str, Any] = raw.get("text_config") or raw
    width = info.attention_width // shape.num_heads
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    rotary = int(width * float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1))
    fits = (
        not text.get("kv_lora_rank")
        and plan.topology.context == 1
        and shape.num_query_groups % tensor == 0
        and width_fits(width)
        and rotary_fits(width, rotary)
    )
    attention = Attention(
        shape.num_query_groups // tensor,
        shape.num_heads // shape.num_query_groups,
        width,
        rotary,
        norms=any(
            name.endswith("self_attn.q_norm.weight") and dims.shape == (width,) for name, dims in info.tensors.items()
        ),
        trained=config.lora is None,
    )
    gated = shape.ffn_hidden_size if text.get("hidden_act", "silu") in ("silu", "swish") else None
    job = Job(
        dtype=DTYPES[config.precision],
        device=0,
        packed=(True, False) if config.batching.packing else (False,),
        attention=attention if fits else None,
        gated=gated and gated // tensor,
        vocabulary=-(-shape.vocab_size // tensor),
        done="",
    )
    code = [digest(file, hashlib.sha256) for file in sorted(Path(kernels.__file__).parent.glob("*.py"))]
    content = [job.to_text(), [metadata.version(name) for name in PACKAGES], code]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    return replace(job, done=str(_triton_cache() / f"megascend-{name}.done"))


def _triton_cache() -> Path:
    """Return the folder in which Triton keeps what it has compiled; absolute."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("TRITON_HOME") or home()).absolute() / ".triton" / "cache"


def compiler_environment() -> dict[str, str]:
    """Return this process's environment, with its search path, for one that works in another directory."""
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return child_environment() | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_CACHE_DIR": str(_triton_cache()),
    }
