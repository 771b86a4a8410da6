"""Translate verl's rollout settings to the rollout ``megascend``, or raise ConfigError naming the unsupported ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.config import Precision
from megascend.errors import ConfigError
from megascend.integrations.verl.settings import PRECISIONS, check
from megascend.integrations.verl.settings_table import READ_BY_VERL, ROLLOUT_NAME, Rule, mapped, no_effect, only

_PLAIN = (
    "responses are sampled from the whole distribution, which is the one that the trainer's log-probabilities are of"
)
_OPTIONS = no_effect("vLLM's own option; give it in engine_kwargs.megascend.options")

ROLLOUT: dict[str, Rule] = {
    **dict.fromkeys(("_target_", "n_gpus_per_node", "do_sample", "n", "over_sample_rate", "agent", "trace"), READ_BY_VERL),
    **dict.fromkeys(("multi_turn", "custom", "checkpoint_manager_class", "router_config_path"), READ_BY_VERL),
    **dict.fromkeys(("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"), READ_BY_VERL),
    **dict.fromkeys(("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"), READ_BY_VERL),
    "moe_load_balance_metrics_interval": READ_BY_VERL,
    "name": only(ROLLOUT_NAME, reason="another rollout"),
    "mode": only("async", reason="verl has no other one"),
    "nnodes": only(0, reason="engines belong to the trainer's ranks; standalone ones are not supported"),
    "temperature": mapped("sampling of each request"),
    "top_k": only(-1, 0, reason=_PLAIN),
    "top_p": only(1, 1.0, reason=_PLAIN),
    "repetition_penalty": only(1.0, 1, reason=_PLAIN),
    "full_determinism": only(False, reason="which requests are sampled together depends on when they come"),
    "seed": mapped("of the engine, with the replica's number added"),
    "prompt_length": mapped("longest sequence, with response_length"),
    "response_length": mapped("longest response"),
    "dtype": mapped("of the engine's weights; float32 for log-probabilities that equal the trainer's to rounding"),
    # verl fills these in by default, so a value does not mean that the user asked for it.
    **dict.fromkeys(("gpu_memory_utilization", "cudagraph_capture_sizes", "max_num_batched_tokens"), _OPTIONS),
    **dict.fromkeys(("enable_chunked_prefill", "enable_prefix_caching"), _OPTIONS),
    "standalone_gpu_memory_utilization": no_effect("of standalone rollouts"),
    "ignore_eos": mapped("sampling of each request"),
    "enforce_eager": mapped("vLLM's --enforce-eager; the local engine compiles nothing"),
    "free_cache_engine": no_effect("weights and cache of an engine are not given back while the trainer runs"),
    "data_parallel_size": only(1, reason="one engine for each replica"),
    "expert_parallel_size": only(1, None, reason="experts of an engine are not spread"),
    "tensor_model_parallel_size": mapped("ranks of a replica; vLLM's --tensor-parallel-size. The local engine has 1"),
    "pipeline_model_parallel_size": only(1, reason="engines have no pipeline stages"),
    "moe_tensor_parallel_size": only(1, None, reason="of TensorRT-LLM"),
    "logprobs_mode": only("processed_logprobs", reason="log-probabilities are those of the distribution that is sampled from"),
    "scheduling_policy": only("fcfs", reason="requests have no priority"),
    "val_kwargs": mapped("key by key"),
    "max_model_len": mapped("longest sequence"),
    "max_num_seqs": mapped("most sequences at a time"),
    "disable_log_stats": only(True, reason="engines keep no statistics for verl"),
    "multi_stage_wake_up": no_effect("engines do not sleep"),
    "engine_kwargs": mapped("those below megascend, key by key"),
    "calculate_log_probs": mapped("whether responses have them"),
    "server": no_effect("of SGLang"),
    "prometheus": mapped("refused unless it is off"),
    "checkpoint_engine": mapped("refused unless its backend is naive"),
    "profiler": no_effect("engines are not profiled"),
    "load_format": no_effect("an engine reads the checkpoint, and has the trainer's weights before the first request"),
    "layered_summon": no_effect("of verl's FSDP engines"),
    "layer_name_map": only({}, reason="of vLLM's loaders"),
    "sglang_engine_mode": no_effect("of SGLang"),
    "limit_images": only(None, reason="only text is supported"),
    "skip_tokenizer_init": no_effect("engines take and give token ids"),
    "quantization": only(None, reason="weights are not quantised"),
    "quantization_config_file": only(None, reason="weights are not quantised"),
    "enable_rollout_routing_replay": only(False, reason="router replay is not supported"),
    "enable_sleep_mode": no_effect("engines do not sleep"),
    "mtp": mapped("refused unless it is off"),
    "qat": mapped("refused unless it is off"),
    "disaggregation": mapped("refused unless it is off"),
}  # fmt: skip

VALIDATION: dict[str, Rule] = {
    "_target_": READ_BY_VERL,
    "temperature": mapped("sampling of each request"),
    "top_k": only(-1, 0, reason=_PLAIN),
    "top_p": only(1, 1.0, reason=_PLAIN),
    "do_sample": READ_BY_VERL,
    "n": READ_BY_VERL,
}

OWN_SETTINGS: dict[str, Rule] = {
    "vllm_python": mapped("interpreter of vLLM's environment, where a vLLM is started; without it the engine is the local one"),
    "options": mapped("further options of that vLLM"),
    "host": mapped("address of the trainer's ranks for engines"),
    "timeout_s": mapped("deadline of a request, and of each step of an update"),
}  # fmt: skip

# Sections that are refused only when their switch is on; verl's defaults contain them switched off.
_OFF = {"prometheus": "enable", "mtp": "enable", "qat": "enable", "disaggregation": "enabled"}


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of one replica's engine.

    Attributes:
        vllm_python: interpreter for vLLM; None: the local engine, based on transformers.
        options: vLLM options.
        host: address under which the engine reaches the trainer.
        timeout_s: deadline of a request, and of each phase of an update, in seconds.
        precision: precision of the engine's weights.
        seed: seed of the first replica; each replica adds its number.
        response_length: maximum response length in tokens.
        max_model_len: maximum sequence length in tokens.
        rows: maximum number of concurrent sequences.
        tensor_parallel: workers of the engine, and trainer ranks per replica.
        ignore_eos: continue responses past the end token.
        eager: run vLLM without compilation.
    """

    vllm_python: str | None
    options: tuple[str, ...]
    host: str
    timeout_s: float
    precision: Precision
    seed: int
    response_length: int
    max_model_len: int
    rows: int
    tensor_parallel: int
    ignore_eos: bool
    eager: bool


def translate_rollout(rollout: Mapping[str, Any]) -> RolloutSettings:
    """Translate verl's ``rollout`` section, a mapping of mappings."""
    options = (rollout.get("engine_kwargs") or {}).get(ROLLOUT_NAME) or {}
    problems = [*_problems(rollout, options)]
    if problems:
        raise ConfigError(f"verl's settings, with the rollout {ROLLOUT_NAME}:\n- " + "\n- ".join(problems))
    response = int(rollout.get("response_length", 512))
    longest = rollout.get("max_model_len") or int(rollout.get("prompt_length", 512)) + response
    return RolloutSettings(
        vllm_python=options.get("vllm_python"),
        options=tuple(map(str, options.get("options") or ())),
        host=str(options.get("host", "127.0.0.1")),
        timeout_s=float(options.get("timeout_s", 600.0)),
        precision=PRECISIONS[str(rollout.get("dtype", "bfloat16"))],
        seed=int(rollout.get("seed", 42)),
        response_length=response,
        max_model_len=int(longest),
        rows=int(rollout.get("max_num_seqs", 256)),
        tensor_parallel=int(rollout.get("tensor_model_parallel_size", 2)),
        ignore_eos=bool(rollout.get("ignore_eos", False)),
        eager=bool(rollout.get("enforce_eager", False)),
    )


def _problems(rollout: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    prefix = "actor_rollout_ref.rollout"
    problems = check(prefix, ROLLOUT, rollout)
    problems += check(f"{prefix}.val_kwargs", VALIDATION, rollout.get("val_kwargs") or {})
    problems += check(f"{prefix}.engine_kwargs.{ROLLOUT_NAME}", OWN_SETTINGS, options)
    for name, switch in _OFF.items():
        if (rollout.get(name) or {}).get(switch):
            problems.append(f"{prefix}.{name}.{switch}=True: not supported with this rollout")
    backend = (rollout.get("checkpoint_engine") or {}).get("backend", "naive")
    if backend != "naive":
        problems.append(
            f"{prefix}.checkpoint_engine.backend={backend!r}: this rollout brings weights itself; leave it at naive"
        )
    if rollout.get("dtype", "bfloat16") not in PRECISIONS:
        problems.append(f"{prefix}.dtype={rollout['dtype']!r}; known: {', '.join(PRECISIONS)}")
    ranks = int(rollout.get("tensor_model_parallel_size", 2))
    if not options.get("vllm_python") and ranks != 1:
        problems.append(
            f"{prefix}.tensor_model_parallel_size={ranks}: the local engine is one process; set it to 1, or "
            f"engine_kwargs.{ROLLOUT_NAME}.vllm_python"
        )
    if not options.get("vllm_python") and options.get("options"):
        problems.append(f"{prefix}.engine_kwargs.{ROLLOUT_NAME}.options are vLLM's, and there is no vllm_python")
    return problems
