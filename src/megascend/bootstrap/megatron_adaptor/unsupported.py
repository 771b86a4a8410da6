"""Models and batches that TransformerEngineNPU is not known to compute; pure."""

from __future__ import annotations

from typing import Any

from megascend.errors import ConfigError


def check_model(config: Any) -> None:
    """Raise ConfigError for a ModelConfig with which TransformerEngineNPU may compute something else, without an error."""
    for reason in reasons(config):
        raise ConfigError(f"provider megatron_adaptor cannot train this: {reason}")


def reasons(config: Any) -> list[str]:
    """Return every reason against a ModelConfig, in a fixed order; empty if there is none."""

    def value(name: str, default: Any = None) -> Any:
        setting = getattr(config, name, default)
        return default if setting is None else setting

    context = int(value("context_parallel_size", 1))
    problems = []
    if value("window_size") is not None:
        problems.append(
            f"window attention (window_size={value('window_size')}): TransformerEngineNPU's attention is not known to apply the "
            "window, and attends to all tokens where it does not"
        )
    if value("softmax_type", "vanilla") != "vanilla":
        problems.append(
            f"softmax_type={value('softmax_type')!r}: TransformerEngineNPU's attention is only known to compute the "
            "vanilla softmax"
        )
    if float(value("attention_dropout", 0.0)) > 0:
        problems.append(
            f"attention_dropout={value('attention_dropout')}: from which random stream TransformerEngineNPU draws it, and "
            "whether it does so in evaluation, is not known; set the model's attention_dropout to 0"
        )
    if value("experimental_attention_variant") is not None:
        problems.append(
            f"experimental_attention_variant={value('experimental_attention_variant')!r}: its kernels are fla_npu's or "
            "MindSpeed's, which need a real NPU, and no test here has run them; train this model on CUDA or the CPU"
        )
    if value("is_hybrid_model", False):
        problems.append(
            "layers with state spaces (Mamba-2): the kernels of mamba_ssm and causal_conv1d are CUDA's, and no test here has run "
            "others; train this model on CUDA or the CPU"
        )
    if context > 1 and (value("use_cp_send_recv_overlap", False) or int(value("cp_window_size", 1)) > 1):
        problems.append(
            f"use_cp_send_recv_overlap={value('use_cp_send_recv_overlap', False)} or "
            f"cp_window_size={value('cp_window_size', 1)}: MindSpeed reads them from the arguments of "
            "Megatron's training script, which does not run; leave them out"
        )
    return problems


def check_batching(context_size: int, context_algorithm: str, *, packing: bool) -> None:
    """Raise ConfigError for packed samples that are exchanged by all-to-all, which MindSpeed's table of TENPU leaves out."""
    if context_size > 1 and packing and context_algorithm == "ulysses":
        raise ConfigError(
            f"batching.packing with parallel.context={context_size} and parallel.context_algorithm: ulysses: "
            "TransformerEngineNPU has no all-to-all for packed samples; set batching.packing: false, or use ring or all_gather"
        )
