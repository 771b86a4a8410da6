"""``python -m megascend.training.kernels.compile_ahead JOB``: compile a model's kernels into Triton's cache ahead.

Kernels, and the C stubs that launch them, are otherwise compiled one by one at their first call, which delays the first step by
seconds. Here nothing is launched and no device context is created: the model's functions are called on host tensors, and each
launch only compiles its kernel for the device's compute capability. A kernel that a run specialises differently is compiled at
its call.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megascend.changes import patch
from megascend.runtime.io.hashing import digest
from megascend.surroundings import die_with_parent, home
from megascend.training.kernels.head_sizes import rotary_fits, width_fits

if TYPE_CHECKING:
    from megascend.config import Precision
    from megascend.models.checkpoint_files.info import ModelInfo
    from megascend.runtime.topology.topology import Topology

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PACKAGES = ("torch", "triton")
"""Packages whose versions change compiled kernels."""
ROWS = 128
PROCESSORS = 132
"""Multiprocessors of the assumed device, which determine the size of a grid; compiled kernels do not depend on it."""
COMPILERS = 4
"""C compilers in parallel."""
DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


@dataclass(frozen=True)
class Attention:
    """A rank's share of a layer's attention.

    Attributes:
        groups: number of key heads.
        heads: number of query heads of each group.
        width: size of a head.
        rotary: number of elements of a head that are rotated.
        norms: True for a model with QK-norm.
        trained: the norms' weights are trained.
    """

    groups: int
    heads: int
    width: int
    rotary: int
    norms: bool
    trained: bool


@dataclass(frozen=True)
class Job:
    """The properties of a rank's model that determine its kernels.

    Attributes:
        dtype: dtype of the model: float32, float16 or bfloat16.
        device: index of the device among the visible ones.
        packed: layouts of attention, True for packed sequences, False for one sequence a row.
        attention: None if the kernels do not support the model's attention.
        gated: width of the SwiGLU of dense layers, or None.
        vocabulary: rows of the output layer.
        done_file: file to create when all kernels are in Triton's cache.
    """

    dtype: str
    device: int
    packed: tuple[bool, ...]
    attention: Attention | None
    gated: int | None
    vocabulary: int
    done_file: str

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        info: ModelInfo,
        topology: Topology,
        precision: Precision,
        *,
        packing: bool,
        trained: bool,
    ) -> Job:
        """Derive the job from a model's files and the settings of a run, on the first device.

        Args:
            raw: ``config.json``.
            trained: the model itself is trained, not an adapter.

        Raises:
            MegascendError, ValueError, TypeError, AttributeError: the configuration is not one of a decoder.
            PackageNotFoundError: Triton is not installed.
        """
        shape, tensor = info.shape, topology.tensor
        text: Mapping[str, Any] = raw.get("text_config") or raw
        width = info.attention_width // shape.num_heads
        # transformers 5 nests the rotary settings here; files written by earlier versions have the factor at the top.
        rope: Mapping[str, Any] = text.get("rope_parameters") or {}
        rotary = int(width * float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1))
        fits = (
            not text.get("kv_lora_rank")
            and topology.context == 1
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
                name.endswith("self_attn.q_norm.weight") and dims.shape == (width,)
                for name, dims in info.tensors.items()
            ),
            trained=trained,
        )
        gated = shape.ffn_hidden_size if text.get("hidden_act", "silu") in ("silu", "swish") else None
        job = cls(
            dtype=DTYPES[precision],
            device=0,
            packed=(True, False) if packing else (False,),
            attention=attention if fits else None,
            gated=gated and gated // tensor,
            vocabulary=-(-shape.vocab_size // tensor),
            done_file="",
        )
        # The kernels' source is part of the name: other code compiles to other files in Triton's cache.
        code = [digest(file, hashlib.sha256) for file in sorted(Path(__file__).parent.glob("*.py"))]
        content = [job.to_text(), [metadata.version(name) for name in PACKAGES], code]
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        return replace(job, done_file=str(triton_cache() / f"megascend-{name}.done"))

    @property
    def is_done(self) -> bool:
        """Check whether an earlier process has compiled all kernels."""
        return Path(self.done_file).exists()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        values = json.loads(text)
        attention = values.pop("attention")
        packed = tuple(values.pop("packed"))
        return cls(**values, packed=packed, attention=attention and Attention(**attention))


def triton_cache() -> Path:
    """Return the absolute path of Triton's cache folder."""
    # Triton's own order of precedence: this process and the run have to agree on the folder.
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("TRITON_HOME") or home()).absolute() / ".triton" / "cache"


def compiler_environment() -> dict[str, str]:
    """Return the variables for a compiling process, which works in another directory: absolute paths, one thread."""
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_CACHE_DIR": str(triton_cache()),
    }


def is_driver_installed() -> bool:
    """Check whether CUDA's driver is on this machine, without torch."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def capability(device: int) -> int:
    """Return the compute capability of a device, 90 for 9.0, from CUDA's driver, without creating a context."""
    cuda = ctypes.CDLL(DRIVER)
    handle, version = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device)
    for value, attribute in zip(version, (MAJOR, MINOR), strict=True):
        status = status or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    if status:
        raise OSError(f"CUDA's driver cannot query device {device}: error {status}")
    return 10 * version[0].value + version[1].value


def compile_all(job: Job, target: int) -> int:
    """Compile the kernels of ``job`` for compute capability ``target``, and their C stubs; return the number of kernels.

    Needs an installed CUDA driver. Patches torch and Triton.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    # In place of Triton's CUDA driver, which would create a context on the device.
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_current_target=lambda: GPUTarget("cuda", target, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    patch(
        torch.cuda, "get_device_properties", lambda device=None: properties, "returns the assumed number of processors"
    )
    run: Any = JITFunction.run
    compiled: dict[str, Any] = {}

    with ThreadPoolExecutor(COMPILERS) as pool:
        running: list[Future[Any]] = [pool.submit(CudaUtils)]

        def compile_only(function: Any, *arguments: Any, **options: Any) -> Any:
            # warmup: compile without launching.
            kernel = run(function, *arguments, **(options | {"warmup": True}))
            # Several calls may specialise to one kernel, whose C stub is compiled once.
            if kernel.hash not in compiled:
                compiled[kernel.hash] = kernel
                running.append(pool.submit(CudaLauncher, kernel.src, kernel.metadata))
            return kernel

        patch(JITFunction, "run", compile_only, "kernels are compiled, not launched")
        for call in calls(job):
            call()
        wait(running)
    # Raises the errors of the compilers.
    for future in running:
        future.result()
    return len(compiled)


def calls(job: Job) -> list[Callable[[], object]]:
    """Return calls of the model's kernels with a step's argument types, in the order of a step."""
    import torch

    from megascend.training.kernels import gated_silu, qkv_rope, qkv_rope_plain, softmax_triton

    dtype, cpu = getattr(torch, job.dtype), torch.device("cpu")

    def attention(sizes: Attention, packed: bool) -> None:
        kind = qkv_rope_plain.QkvRopeCase(
            dtype,
            sizes.groups,
            sizes.heads,
            sizes.width,
            sizes.rotary,
            packed,
            sizes.norms,
            sizes.norms and sizes.trained,
        )
        qkv_rope_plain.trial(qkv_rope.qkv_rope, kind, cpu)

    def gated(width: int) -> None:
        gate_up = torch.empty(ROWS, 2 * width, dtype=dtype)
        gated_silu.gated_silu_back(gated_silu.gated_silu(gate_up), gate_up)

    def softmax() -> None:
        logits, targets = torch.empty(ROWS, job.vocabulary, dtype=dtype), torch.zeros(ROWS, dtype=torch.int64)
        softmax_triton.shard_statistics(logits, targets, False)
        number = torch.empty(ROWS)
        softmax_triton.gradient_(logits, targets, number, number, None, None)

    kernels: list[Callable[[], object]] = []
    if job.attention is not None:
        sizes = job.attention
        kernels += [lambda packed=packed: attention(sizes, packed) for packed in job.packed]
    if job.gated is not None:
        width = job.gated
        kernels.append(lambda: gated(width))
    return [*kernels, softmax]


def main() -> None:
    """Run the job in the first argument, and create its ``done_file``."""
    die_with_parent()  # without the run, the kernels are not needed
    job = Job.parse(sys.argv[1])
    try:
        target = capability(job.device)
    except OSError:  # no device is visible; the run itself handles or reports that
        return
    compile_all(job, target)
    # Last, so that the next run starts a job again that was killed on the way.
    Path(job.done_file).touch()


if __name__ == "__main__":
    main()
