"""Tiny models of transformers' architectures on an engine, each sample compared with transformers alone. A script:

    python architecture_runs.py ENGINE RESULT [NAME...]

RESULT is a JSON file: by architecture (default: every causal language model that transformers has), what came of each layout.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

import megascend
from megascend.errors import MegascendError

RECURRENT = re.compile(
    r"conv_state|recurrent_state|ssm_state|causal_conv1d|LightningAttention\b|delta_rule|wkv|selective_scan|rg_lru|mlstm|slope_rate"
)
"""Words of transformers' code for layers whose tokens depend on earlier ones by other means than attention."""

LENGTHS = (30, 7, 19)
LARGEST_MODEL = 2 * 10**7
NUMBER_BOUND, NORM_BOUND = 5e-4, 1e-3

SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim decoder_hidden_size model_dim lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_attention_heads n_head n_heads "
    "num_heads decoder_attention_heads encoder_attention_heads attention_heads linear_num_value_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok num_experts_per_token moe_topk moe_k top_k "
    "linear_num_key_heads n_mamba_heads mamba_expand eos_token_id",
    1: "encoder_layers n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group num_dense_layers "
    "mamba_n_groups n_groups mamba_ngroups bos_token_id is_decoder",
    16: "head_dim kv_channels qk_nope_head_dim v_head_dim index_topk index_head_dim mamba_d_state mamba_d_head mamba_chunk_size "
    "state_size ssm_state_size mamba_head_dim chunk_size mamba_headdim sliding_window local_window_size window_size "
    "attention_window attention_window_size attention_chunk_size block_size hidden_size_per_layer_input",
    128: "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden inner_dim mamba_d_ssm",
    320: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    32: "moe_intermediate_size moe_ffn_hidden_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size q_lora_rank kv_lora_rank",
    8: "index_n_heads qk_rope_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads mamba_dt_rank "
    "time_step_rank",
    0: "pad_token_id",
}
"""Names of settings, by what a tiny model has for them."""

NO_NOISE = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout hidden_dropout_prob "
    "attention_probs_dropout_prob embedding_dropout layerdrop residual_dropout router_jitter_noise input_jitter_noise"
)
"""Names of settings that are 0.0, so that training is a function of the weights."""

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = ROPE | {
    "rope_type": "longrope",
    "short_factor": [1 + 0.1 * index for index in range(8)],
    "long_factor": [2 + 0.2 * index for index in range(8)],
}
MSCALE = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE}),
    "phimoe, longrope": ("phimoe", {"rope_parameters": MSCALE, "sliding_window": None}),
    "qwen4_exp_text, no n-grams": ("qwen4_exp_text", {"ple_layer_ids": []}),
    "llama, dynamic": ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic"}}),
}
"""Models by a name of ours: the architecture and settings."""

PARTICULAR: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "deepseek_v4": {
        # Each kind of attention and of experts, and rates at which samples of these lengths have compressed keys.
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe"] * 2,
        "index_topk": 4,
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 8,
    },
    "reformer": {"axial_pos_embds": False},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that an architecture needs beside sizes."""


def tiny_settings(model_type: str) -> dict[str, Any]:
    """Return settings of a tiny model, restricted to those of the architecture's configuration."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    plain = kind()
    fields = set(plain.to_dict()) | set(inspect.signature(kind.__init__).parameters)
    fields |= set(getattr(kind, "__dataclass_fields__", {}))
    text = plain.get_text_config()
    if text is not plain:
        return {"text_config": tiny_settings(text.model_type) | {"model_type": text.model_type}}
    settings: dict[str, Any] = {}
    for value, names in SIZES.items():
        settings |= {name: value for name in names.split() if name in fields}
    settings |= {name: 0.0 for name in NO_NOISE.split() if name in fields}
    if "kv_lora_rank" in fields:
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    if "is_decoder" in settings:
        settings["is_decoder"] = True
    return settings | PARTICULAR.get(model_type, {})


def outcomes(engine: str, name: str) -> dict[str, str]:
    """Return, by layout, ``right``, ``refused: ...``, ``wrong: ...`` or ``traceback: ...``; or why the model cannot be built."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = VARIANTS.get(name, (name, {}))
    try:
        config = AutoConfig.for_model(model_type, **tiny_settings(model_type) | extra)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST_MODEL:
            return {"model": f"not built: {size} parameters"}
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
                elif "bias" in key:
                    parameter.normal_(0, 0.1)
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(3, 300, (length,), generator=generator) for length in LENGTHS]
        with torch.no_grad():
            expected = [logprobs(model, tokens) for tokens in ids]
        total = sum(len(tokens) - 1 for tokens in ids)
        model.train()
        for tokens in ids:
            (-logprobs(model, tokens).sum() / total).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = float(sum(grad.double().square().sum() for grad in gradients)) ** 0.5
    except Exception as error:  # noqa: BLE001  any architecture's code may raise anything
        return {"model": f"not built: {described(error)}"}
    samples = [megascend.Sample.causal(tokens.tolist()) for tokens in ids]
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001  as above
            return {"model": f"not saved: {described(error)}"}
        layouts = {"padded": False} if engine == "single" else {"packed": True, "padded": False}
        return {
            layout: outcome(engine, folder, samples, packing, expected, norm) for layout, packing in layouts.items()
        }


def logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return transformers' log-probabilities of a sample's targets, [n - 1]."""
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def outcome(
    engine: str, folder: str, samples: list[Any], packing: bool, expected: list[torch.Tensor], norm: float
) -> str:
    batching = megascend.Batching(packing=packing, micro_batch_tokens=512)
    try:
        with megascend.make_backend(
            engine, model=folder, precision="fp32", platform="cpu", batching=batching
        ) as backend:
            actual = backend.forward(samples).logprobs
            difference = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
            backend.forward_backward(samples)
            norm_difference = abs(backend.optimizer_step().grad_norm - norm) / norm
    except MegascendError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  it is what is looked for
        return f"traceback: {described(error)}"
    right = difference <= NUMBER_BOUND and norm_difference <= NORM_BOUND
    return "right" if right else f"wrong: log-probabilities by {difference:.1e}, gradient norm by {norm_difference:.1e}"


def described(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(frame.filename).name}:{frame.lineno})"


def causal_models() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS})


def recurrent_models() -> list[str]:
    """List causal language models whose code in transformers has states or convolutions over tokens, by its words for them."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    names = []
    for model_type in causal_models():
        module = model_type_to_module_name(VARIANTS.get(model_type, (model_type, {}))[0])
        file = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
        if file.exists() and RECURRENT.search(file.read_text(encoding="utf-8")):
            names.append(model_type)
    return names


def main() -> None:
    engine, result, *names = sys.argv[1:]
    megascend.bootstrap("cpu", engine=engine)
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    messages.disable_progress_bar()
    logging.disable(logging.WARNING)
    results: dict[str, dict[str, str]] = {}
    for name in names or causal_models():
        results[name] = outcomes(engine, name)
        Path(result).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
