"""``python -m megascend.kernels.compile_ahead JOB``: a model's Triton kernels, into the cache of Triton, before they are called.

Compiled when they are first called, one after the other, kernels and the stubs in C that launch them keep a first step waiting
for seconds. Here nothing is launched and no context made on a device: the functions that the model calls are called on numbers on
the host, and of each launch the compiler does its part, for the device's kind. What is called differently after all is compiled
where it is called.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megascend.changes import patch
from megascend.surroundings import die_with_parent

ROWS = 128
PROCESSORS = 132
"""Of a device, for the size of a grid: no kernel is compiled for one."""
COMPILERS = 4
"""C compilers at a time."""
DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


@dataclass(frozen=True)
class Attention:
    """What a rank has of a layer's attention.

    Attributes:
        groups: heads of keys.
        heads: of queries, of each group.
        width: of a head.
        rotary: of which so many numbers are rotated.
        norms: with QK-norm.
        trained: the norms' weights.
    """

    groups: int
    heads: int
    width: int
    rotary: int
    norms: bool
    trained: bool


@dataclass(frozen=True)
class Job:
    """What decides which kernels a model's steps take, of one rank.

    Attributes:
        dtype: of the model: float32, float16 or bfloat16.
        device: number of the device, of those that are visible.
        packed: layouts of attention: packed sequences, or one beside the other.
        attention: None: none that the kernels fit.
        gated: width of its dense layers' SwiGLU, or None.
        vocabulary: rows of the output layer.
        done: a file to make when all is in the cache of Triton.
    """

    dtype: str
    device: int
    packed: tuple[bool, ...]
    attention: Attention | None
    gated: int | None
    vocabulary: int
    done: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        values = json.loads(text)
        attention = values.pop("attention")
        packed = tuple(values.pop("packed"))
        return cls(**values, packed=packed, attention=attention and Attention(**attention))


def capability(device: int) -> int:
    """Compute capability of a device, 90 for 9.0, as CUDA's driver tells it without a context."""
    cuda = ctypes.CDLL(DRIVER)
    handle, found = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device)
    for value, attribute in zip(found, (MAJOR, MINOR), strict=True):
        failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    if failed:
        raise OSError(f"CUDA's driver does not tell of device {device}: error {failed}")
    return 10 * found[0].value + found[1].value


def compile_all(job: Job, target: int, launchers: bool = True) -> int:
    """Compile what ``job`` needs for compute capability ``target``; return the number of kernels. Changes torch and Triton.

    ``launchers``: also the stubs in C, which need CUDA's driver to be installed.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            get_current_target=lambda: GPUTarget("cuda", target, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    patch(torch.cuda, "get_device_properties", lambda device=None: properties, "what decides the size of a grid")
    run: Any = JITFunction.run
    compiled: dict[str, Any] = {}

    with ThreadPoolExecutor(COMPILERS) as pool:
        running: list[Future[Any]] = [pool.submit(CudaUtils)] if launchers else []

        def compile_only(function: Any, *arguments: Any, **options: Any) -> Any:
            kernel = run(function, *arguments, **(options | {"warmup": True}))
            if kernel.hash not in compiled:
                compiled[kernel.hash] = kernel
                if launchers:
                    running.append(pool.submit(CudaLauncher, kernel.src, kernel.metadata))
            return kernel

        patch(JITFunction, "run", compile_only, "kernels are compiled, not launched")
        for call in calls(job):
            call()
        wait(running)
    for future in running:
        future.result()
    return len(compiled)


def calls(job: Job) -> list[Callable[[], object]]:
    """Functions of the model's steps, called as there, in the order of a step."""
    import torch

    from megascend.kernels import gated_silu, qkv_rope, qkv_rope_plain, softmax_triton

    dtype, cpu = getattr(torch, job.dtype), torch.device("cpu")

    def attention(of: Attention, packed: bool) -> None:
        kind = qkv_rope_plain.QkvRopeCase(
            dtype, of.groups, of.heads, of.width, of.rotary, packed, of.norms, of.norms and of.trained
        )
        qkv_rope_plain.trial(qkv_rope.qkv_rope, kind, cpu)

    def gated(width: int) -> None:
        both = torch.empty(ROWS, 2 * width, dtype=dtype)
        gated_silu.gated_silu_back(gated_silu.gated_silu(both), both)

    def softmax() -> None:
        logits, targets = torch.empty(ROWS, job.vocabulary, dtype=dtype), torch.zeros(ROWS, dtype=torch.int64)
        softmax_triton.shard_statistics(logits, targets, False)
        number = torch.empty(ROWS)
        softmax_triton.gradient_(logits, targets, number, number, None, None)

    found: list[Callable[[], object]] = []
    if job.attention is not None:
        of = job.attention
        found += [lambda packed=packed: attention(of, packed) for packed in job.packed]
    if job.gated is not None:
        width = job.gated
        found.append(lambda: gated(width))
    return [*found, softmax]


def main() -> None:
    """Do the job in the argument, and leave a mark where it says."""
    die_with_parent()  # nobody needs what follows a process that is gone
    job = Job.parse(sys.argv[1])
    try:
        target = capability(job.device)
    except OSError:  # no device is visible; the run knows what to do without one, or says so
        return
    compile_all(job, target)
    Path(job.done).touch()


if __name__ == "__main__":
    main()
