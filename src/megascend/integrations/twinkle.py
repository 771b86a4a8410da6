"""Run programs for twinkle's Megatron models on a CPU, and fix what gives wrong numbers on any device.

    torchrun --nproc-per-node 2 -m megascend.integrations.twinkle [--as-it-is] SCRIPT [ARGUMENTS]

runs an unmodified twinkle program. On a CPU, which twinkle does not support, the process is bootstrapped and its ranks connect
over Gloo first. On NPUs twinkle calls MindSpeed itself. A program can call :func:`prepare` instead, before its first model.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

AS_IT_IS = "--as-it-is"


def prepare(platform: str = "auto", *, mend: bool = True) -> list[str]:
    """Prepare the process for twinkle. Call before the first model is created; on a CPU, before Megatron-Core is imported.

    Args:
        platform: "cpu", "cuda", "npu" or "auto".
        mend: apply fixes to twinkle, and return a line for each (:func:`mend_twinkle`).
    """
    from megascend.runtime.platforms import choose

    if choose(platform).name == "cpu":
        import megascend

        # Now, because twinkle imports Megatron-Core itself, without the bootstrap's stand-ins.
        megascend.bootstrap("cpu", engine="megatron").load_megatron()
        initialize_gloo()
    return mend_twinkle() if mend else []


def initialize_gloo() -> None:
    """Create the default process group if none exists: of torchrun's ranks, or of this single process."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    else:
        # An in-memory store: a single process without torchrun has no MASTER_ADDR to connect to.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def mend_twinkle() -> list[str]:
    """Patch what is wrong or fails on every device in twinkle 0.4 to 0.5.1 with Megatron; return a line for each. Idempotent."""
    from twinkle.model.megatron.megatron import MegatronModel
    from twinkle.model.megatron.strategy.megatron import MegatronStrategy
    from twinkle.utils import torch_utils

    from megascend.changes import patch

    mended = [
        (
            MegatronStrategy,
            "wrap_model",
            _wrap_model,
            "one rank has Megatron's gradient buffers too, so that gradients are divided by the number of tokens",
        ),
        (
            MegatronStrategy,
            "params_type",
            property(_params_type),
            "mixed_precision='no' and 'fp16' are honoured; everything was bf16",
        ),
        (
            MegatronStrategy,
            "create_megatron_model",
            _marking_shards(MegatronStrategy.create_megatron_model),
            "with tensor parallelism the gradient norm counts all shards of embedding and output",
        ),
        (
            torch_utils,
            "_vocab_parallel_selective_log_softmax",
            _sharded_logprobs,
            "with tensor parallelism the gradient of fp32 and fp16 logits is not rounded to bf16",
        ),
        (
            MegatronModel,
            "_save_hf_format",
            _saving_merged(MegatronModel._save_hf_format),
            "save(merge_lora=True) does not fail on the missing settings of the merged adapter",
        ),
    ]
    if MegatronStrategy.wrap_model is not _wrap_model:  # else patched already
        for change in mended:
            patch(*change)
    return [f"{name}: {reason}" for _, name, _, reason in mended]


def _wrap_model(self: Any, model: list[Any]) -> list[Any]:
    """Wrap as twinkle does, but also with one rank: twinkle skips the DDP wrapper then, which divides gradients by tokens."""
    if self.device_mesh.world_size > 1:  # a mesh of one has no ranks to check
        self._check_device_mesh()
    return self._wrap_with_megatron_ddp(model, self.use_distributed_optimizer, self.ddp_config)


def _params_type(self: Any) -> Any:
    """Return the parameters' torch.dtype. twinkle looks it up in a table keyed by names, misses, and falls back to bf16."""
    return self._params_dtype


def _sharded_logprobs(logits: Any, index: Any) -> Any:
    """Compute log-probabilities from logits sharded over tensor parallel ranks, by Megatron's unfused cross-entropy.

    twinkle uses the fused one, whose gradient is bf16 for logits of any dtype.

    Args:
        logits: [..., vocabulary / tensor parallel size]; overwritten.
        index: [...], token ids.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, index)


class _MergedSettings:
    """Stand-in for the settings of a merged adapter."""

    target_modules: Any = None

    def save_pretrained(self, folder: str) -> None:
        """Write nothing."""


def _saving_merged(save: Any) -> Any:
    """Wrap twinkle's save, which requires settings of the adapter "", its name for the merged model."""

    def _save_hf_format(self: Any, output_dir: str, adapter_name: str, lora_converter: Any = None) -> None:
        settings = getattr(self.strategy.unwrap_model(self.model)[0], "peft_config", {})
        # twinkle merges the adapter, then looks up the settings under the name "" to save them with the weights.
        absent = adapter_name not in settings
        if absent:
            settings[adapter_name] = _MergedSettings()
        try:
            save(self, output_dir, adapter_name, lora_converter)
        finally:
            if absent:
                del settings[adapter_name]

    return _save_hf_format


def _marking_shards(create: Any) -> Any:
    def create_megatron_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megascend.engines.megatron.build import mark_tensor_parallel

        chunks = create(self, *args, **kwargs)
        for chunk in chunks:
            mark_tensor_parallel(chunk)
        return chunks

    return create_megatron_model


def main() -> None:
    """Prepare the process, print the fixes, run the script."""
    arguments = sys.argv[1:]
    mend = arguments[:1] != [AS_IT_IS]
    script = arguments[0 if mend else 1 :]
    if not script or not Path(script[0]).is_file():
        sys.exit(f"usage: python -m megascend.integrations.twinkle [{AS_IT_IS}] SCRIPT [ARGUMENTS]")
    mended = prepare(mend=mend)
    if os.environ.get("RANK", "0") == "0":
        for line in mended:
            print(f"megascend patches twinkle's {line}", flush=True)
    sys.argv = script
    # As python SCRIPT does: imports relative to the script's folder, not to this module's.
    sys.path[0] = str(Path(script[0]).resolve().parent)
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        _leave()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
