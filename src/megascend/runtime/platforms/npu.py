"""The NPU platform: Ascend NPUs with torch_npu and HCCL."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from megascend.errors import PlatformError
from megascend.runtime.platforms.base import AcceleratorPlatform
from megascend.runtime.platforms.cpu_products import avoid_broken_amx
from megascend.surroundings import is_installed

HCCL_PORTS = 64
"""Number of ports for the ranks of one host, counted from the base port (16 devices, a few each)."""

FIRST_PORT, LAST_PORT = 17_000, 32_000
"""Range of base ports: above well-known services, below Linux's ephemeral ports (32768 and up)."""


class NpuPlatform(AcceleratorPlatform):
    name: ClassVar[str] = "npu"
    device_type: ClassVar[str] = "npu"
    backend: ClassVar[str] = "hccl"
    bind_device: ClassVar[bool] = False  # Gloo groups created next to a bound HCCL group would inherit the device

    implicit_causal_masks: ClassVar[bool] = True
    attention_draws_its_own_dropout: ClassVar[bool] = True
    packed_lengths_on_host: ClassVar[bool] = True

    def unavailable_because(self) -> str | None:
        return torch_npu_problem()

    def prepare(self) -> list[str]:
        return choose_hccl_port(os.environ) + prepare_simulated(os.environ)

    def limit_collectives(self, timeout_s: float) -> list[str]:
        return limit_hccl(os.environ, timeout_s)

    def device(self, local_rank: int):
        import torch

        npu = self.torch_module
        count = npu.device_count()
        if local_rank >= count:
            raise PlatformError(
                f"local rank {local_rank} has no NPU of its own: this host has {count} (ASCEND_RT_VISIBLE_DEVICES)"
            )
        npu.set_device(local_rank)
        return torch.device("npu", npu.current_device())

    def profiler(self, warm_up: int, steps: int) -> Any:
        from torch_npu import profiler  # type: ignore[reportMissingImports]

        return profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
            schedule=profiler.schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
        )


def prepare_simulated(environment: Any) -> list[str]:
    """Prepare the simulated device: avoid broken AMX, since its products run on the CPU, and have its HCCL refuse objects.

    HCCL could carry Python objects; megascend sends those over Gloo only, and the refusal shows a violation in tests.
    """
    import simnpu
    from simnpu.settings import OBJECTS_VARIABLE

    if not simnpu.is_active():
        return []
    environment[OBJECTS_VARIABLE] = "refuse"
    return [f"{OBJECTS_VARIABLE}=refuse", *avoid_broken_amx(environment)]


def limit_hccl(environment: Any, timeout_s: float) -> list[str]:
    """Set HCCL's own timeouts, which torch's do not affect: without them a rank waits half an hour for a dead peer.

    HCCL_CONNECT_TIMEOUT takes 120 to 7200 s; HCCL_EXEC_TIMEOUT counts in steps of 68 s (CANN's list of environment
    variables). Values in the environment take precedence.
    """
    timeouts = {
        "HCCL_CONNECT_TIMEOUT": min(max(math.ceil(timeout_s), 120), 7200),
        "HCCL_EXEC_TIMEOUT": math.ceil(timeout_s / 68) * 68,
    }
    changes = []
    for name, seconds in timeouts.items():
        if name not in environment:
            environment[name] = str(seconds)
            changes.append(f"{name}={seconds}")
    return changes


def choose_hccl_port(environment: Any) -> list[str]:
    """Choose this job's HCCL ports on the host, unless the environment sets them.

    By default HCCL listens on 16 ports from 60000, where two jobs of one host collide. All ranks of a job derive the same
    base port from the rendezvous address, which differs between jobs of one host.
    """
    # Either variable is the user's own choice of ports.
    if any(name in environment for name in ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE")):
        return []
    port = hccl_base_port(environment)
    environment["HCCL_IF_BASE_PORT"] = str(port)
    return [f"HCCL_IF_BASE_PORT={port}"]


def hccl_base_port(environment: Mapping[str, str]) -> int:
    """Return a base port from the job's rendezvous, else from the process id; neighbouring master ports do not overlap."""
    slots = (LAST_PORT - FIRST_PORT) // HCCL_PORTS
    if "MASTER_PORT" not in environment:
        slot = os.getpid()
    else:
        job = environment.get("MASTER_ADDR", "") + environment.get("TORCHELASTIC_RUN_ID", "")
        # crc32, not hash(): Python randomizes hash() for strings per process, and all ranks must agree.
        slot = zlib.crc32(job.encode()) + int(environment["MASTER_PORT"])
    return FIRST_PORT + slot % slots * HCCL_PORTS


WITHOUT_CANN = (
    "On an NPU host: source CANN's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh). Elsewhere: pip uninstall "
    "torch_npu, or run on the simulated device: megascend simnpu -- COMMAND. TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch "
    "start without torch_npu"
)
ASCEND_LIBRARY = re.compile(r"lib(hccl|ascend|acl|ge_|graph|opapi|runtime)\S*\.so")


def torch_npu_problem() -> str | None:
    """Return why torch_npu does not work here, or None. Imports torch and torch_npu."""
    if not is_installed("torch_npu"):
        return "torch_npu is not installed: pip install 'megascend[npu]' on a host with Ascend's driver and CANN"
    try:
        torch_npu = import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        return explain_torch_npu_failure(error)
    torch = import_module("torch")
    if not torch.npu.is_available():
        return (
            f"torch_npu {torch_npu.__version__} imports, but torch.npu.is_available() is False: no card is visible "
            "(npu-smi info; ASCEND_RT_VISIBLE_DEVICES; in a container, /dev/davinci* must be passed in)"
        )
    return None


def explain_torch_npu_failure(error: BaseException) -> str:
    """Explain a failed import of torch_npu (or of torch, which loads torch_npu), with the remedy."""
    # torch wraps the error of torch_npu; the first cause of the chain names the missing library.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    cause = lines[0] if lines else type(error).__name__
    if ASCEND_LIBRARY.search(cause):
        return f"torch_npu cannot load Ascend's libraries ({cause}). {WITHOUT_CANN}"
    return f"torch_npu is installed but cannot be imported: {cause}"
