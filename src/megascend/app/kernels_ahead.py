"""The Triton kernels of a run's first step on CUDA, compiled in another process while this one still imports and builds.

What they are follows from the model's files and the settings alone. They go into Triton's cache on the disk, where the first step
finds them; where they are there already, nothing is started. So this is a matter of time alone: without it, or if it fails, the
first step compiles them.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import IO, Any

from megascend import kernels
from megascend.bootstrap.engines import needs
from megascend.config import TrainerConfig
from megascend.distributed.launch import Launch, child_environment
from megascend.errors import MegascendError
from megascend.huggingface.info import inspect_checkpoint
from megascend.io.hashing import digest
from megascend.kernels.compile_ahead import DRIVER, Attention, Job
from megascend.kernels.head_sizes import rotary_fits, width_fits
from megascend.surroundings import home

logger = logging.getLogger(__name__)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SILU = ("silu", "swish")
PACKAGES = ("torch", "triton")
UNREADABLE = (OSError, MegascendError, ValueError, TypeError, AttributeError, PackageNotFoundError)
"""What a machine without CUDA's driver or Triton raises, and a model that cannot be read, which is told where it is needed."""


class KernelsAhead:
    """On the first rank of each host, the process that compiles. Used from one thread."""

    def __init__(self, config: TrainerConfig, launch: Launch) -> None:
        self._config, self._launch = config, launch
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def begin(self) -> None:
        """Start the process, where there is a device of CUDA's and something to compile."""
        config = self._config
        if self._launch.local_rank != 0 or not needs(config.engine).megatron or config.platform not in ("auto", "cuda"):
            return
        try:
            ctypes.CDLL(DRIVER)
            job = job_of(config)
        except UNREADABLE as error:
            logger.debug("nothing is compiled ahead: %s: %s", type(error).__name__, error)
            return
        if Path(job.done).exists():
            return
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megascend.kernels.compile_ahead", job.to_text()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_environment(),
                cwd="/",  # not where the user's own modules are: -m looks there first
            )
        except OSError as error:
            logger.warning("no process for compiling kernels ahead (%s): the first step takes seconds longer", error)
            return
        atexit.register(self.close)

    def close(self) -> None:
        """End the process, whatever it does: Triton's cache takes files whole. If it has failed, the log says why."""
        if self._process is not None:
            atexit.unregister(self.close)
            code = self._process.poll()
            if code is None:
                self._process.kill()
                self._process.wait()
            elif code and self._errors is not None:
                self._errors.seek(0)
                end = " ".join(self._errors.read().decode(errors="replace").split())[-600:]
                logger.warning(
                    "kernels could not be compiled ahead, so the first step takes seconds longer (exit code %d): %s",
                    code,
                    end,
                )
            self._process = None
        if self._errors is not None:
            self._errors.close()


def job_of(config: TrainerConfig) -> Job:
    """What to compile for ``config``, on the first device.

    Raises:
        OSError, MegascendError: the model cannot be read.
        ValueError, TypeError, AttributeError: its configuration is not what one is.
        PackageNotFoundError: there is no Triton.
    """
    info, tensor = inspect_checkpoint(config.model), config.parallel.tensor
    raw: Mapping[str, Any] = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
    text: Mapping[str, Any] = raw.get("text_config") or raw
    shape = info.shape
    width = info.attention_width // shape.num_heads
    rope: Mapping[str, Any] = text.get("rope_parameters") or {}
    rotary = int(width * float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1))
    fits = (
        not text.get("kv_lora_rank")
        and config.parallel.context == 1
        and shape.num_query_groups % tensor == 0
        and width_fits(width)
        and rotary_fits(width, rotary)
    )
    norms = any(
        name.endswith("self_attn.q_norm.weight") and dims.shape == (width,) for name, dims in info.tensors.items()
    )
    attention = Attention(
        shape.num_query_groups // tensor,
        shape.num_heads // shape.num_query_groups,
        width,
        rotary,
        norms,
        trained=config.lora is None,
    )
    gated = shape.ffn_hidden_size if text.get("hidden_act", "silu") in SILU else None
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
    """Where Triton keeps what it has compiled; absolute."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("TRITON_HOME") or home()).absolute() / ".triton" / "cache"


def _environment() -> dict[str, str]:
    """This process's, with its search path, for one that works in another directory."""
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return child_environment() | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_CACHE_DIR": str(_triton_cache()),
    }
