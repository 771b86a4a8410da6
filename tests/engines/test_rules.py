"""Rules of the engines: every rule refuses one setup, with a short message, and accepts another that is close to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascend import Adam, Adapters, Batching, Fsdp, Moe, Parallel, Recompute
from megascend.config import CudaGraphs
from megascend.config.rules import Rule, enforce
from megascend.engines.context import EVERY_ENGINE, EngineSpec, Setup
from megascend.engines.rules import MEGATRON, MEGATRON_MODEL, ON_TRANSFORMERS, MegatronSetup
from megascend.errors import ConfigError
from megascend.runtime.topology.topology import plan

Case = tuple[str, dict[str, Any], dict[str, Any]]
GRAPHS = Batching(cuda_graphs=CudaGraphs())
AUX = {"aux_loss_coefficient": 0.01}
FP8 = Adapters(base_weights="fp8")
COMPILED = Fsdp(compile=True)
EXPERTS = {"is_moe": True, "shared_expert_ffn_hidden_size": 64}
MODEL = {
    "image_layout": None,
    "scalar_head": None,
    "linear": None,
    "state_space": None,
    "tensors": (),
    "is_moe": False,
    "max_position": 1024,
    "shared_expert_ffn_hidden_size": None,
}
CONFIG = {
    "hf_config": SimpleNamespace(vision_config=SimpleNamespace(), get_text_config=SimpleNamespace),
    "moe_router_enable_expert_bias": False,
    "multi_latent_attention": False,
    "kv_channels": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 1024,
    "softmax_type": "vanilla",
    "sequence_parallel": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "recompute_granularity": None,
}
"""What rules read of mcore-bridge's ModelConfig."""


def setup_of(
    *,
    model: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    platform: str = "cuda",
    kernels: bool = True,
    parallel: Mapping[str, int] | None = None,
    grouped: bool = False,
    engine: str = "fsdp",
    **settings: Any,
) -> MegatronSetup:
    """Build a setup of a dense text model in one process with these changes."""
    layout = Parallel(**(parallel or {}))
    world = layout.tensor * layout.pipeline * layout.context * layout.expert
    shape = {
        name: (model or {}).get(name, MODEL[name])
        for name in ("is_moe", "max_position", "shared_expert_ffn_hidden_size")
    }
    topology: Any = plan(layout, world)
    if layout.pipeline > 1:
        topology = SimpleNamespace(**vars(topology) | {"chunk_layers": (1,) * layout.pipeline})
    info: Any = SimpleNamespace(
        architecture=SimpleNamespace(model_type="some_model"),
        shape=SimpleNamespace(**shape),
        **MODEL | (model or {}),
    )
    device: Any = SimpleNamespace(name=platform, device_type=platform, has_transformer_engine_kernels=kernels)
    spec = EngineSpec(model=Path("model"), parallel=layout, **settings)
    return MegatronSetup(engine, spec, device, topology, info, SimpleNamespace(**CONFIG | (config or {})), grouped)


def text_model(**settings: Any) -> dict[str, Any]:
    """Build a ModelConfig's ``hf_config`` of a text model with these settings."""
    return {"hf_config": SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings), **settings)}


CASES_OF_EVERY_ENGINE: list[Case] = [
    ("vision_tower: train with some_model", {"vision_tower": "train"}, {}),
    (
        "head: scalar with some_model",
        {"head": "scalar", "model": {"image_layout": 1, "scalar_head": SimpleNamespace(unit="sequence")}},
        {"model": {"image_layout": 1}},
    ),
    (
        "adapters with a token classifier",
        {"adapters": Adapters(), "model": {"scalar_head": SimpleNamespace(unit="token")}},
        {"adapters": Adapters(), "model": {"scalar_head": SimpleNamespace(unit="sequence")}},
    ),
]
CASES_OF_MEGATRON: list[Case] = [
    ("mtp: train with adapters", {"mtp": "train", "adapters": Adapters()}, {"mtp": "train"}),
    ("mtp: train with batching.cuda_graphs", {"mtp": "train", "batching": GRAPHS}, {"batching": GRAPHS}),
    ("mtp: train with a megatron-core older than 0.16", {"mtp": "train"}, {}),
    ("mtp: train with some_model", {"mtp": "train", "model": {"image_layout": 1}}, {"model": {"image_layout": 1}}),
    (
        "moe.aux_loss: megatron with adapters",
        {"moe": Moe(aux_loss="megatron", **AUX), "adapters": Adapters(), "model": EXPERTS},
        {"moe": Moe(aux_loss="megatron", **AUX), "model": EXPERTS},
    ),
    (
        "moe.aux_loss: megatron with some_model",
        {"moe": Moe(aux_loss="megatron", **AUX)},
        {"moe": Moe(aux_loss="megatron", **AUX), "model": EXPERTS},
    ),
    (
        "moe.aux_loss: transformers with parallel.pipeline=2",
        {"moe": Moe(aux_loss="transformers", **AUX), "model": EXPERTS, "parallel": {"pipeline": 2}},
        {"moe": Moe(aux_loss="megatron", **AUX), "model": EXPERTS, "parallel": {"pipeline": 2}},
    ),
    (
        "moe.bias_update_rate: 0.001 with adapters",
        {"moe": Moe(bias_update_rate=0.001), "adapters": Adapters()},
        {"moe": Moe(bias_update_rate=0.001)},
    ),
    *(
        (
            f"recompute.modules: {module} with some_model",
            {"recompute": Recompute(granularity="selective", modules=(module,))},
            {"recompute": Recompute(granularity="selective", modules=(module,)), "model": model},
        )
        for module, model in (
            ("moe", EXPERTS),
            ("moe_act", EXPERTS),
            ("shared_experts", EXPERTS),
            ("mla_up_proj", {"tensors": ("model.layers.0.self_attn.kv_b_proj.weight",)}),
        )
    ),
    (
        "parallel.context: 2 with some_model",
        {"parallel": {"context": 2}, "model": {"image_layout": 1}},
        {"parallel": {"context": 2}},
    ),
    (
        "adapters.targets: q_proj, embed_tokens with some_model",
        {"adapters": Adapters(targets=("q_proj", "embed_tokens")), "model": {"image_layout": 1}},
        {"adapters": Adapters(targets=("q_proj", "embed_tokens"))},
    ),
    ("base_weights: fp8 with npu", {"adapters": FP8, "platform": "npu"}, {"adapters": FP8}),
    ("base_weights: fp8 with some_model", {"adapters": FP8, "model": {"linear": 1}}, {"model": {"linear": 1}}),
    ("base_weights: fp8 with some_model", {"adapters": FP8, "model": {"state_space": 1}}, {"adapters": FP8}),
    ("base_weights: fp8 with batching.cuda_graphs", {"adapters": FP8, "batching": GRAPHS}, {"adapters": FP8}),
    ("batching.cuda_graphs with npu", {"batching": GRAPHS, "platform": "npu"}, {"batching": GRAPHS}),
    *(
        ("batching.cuda_graphs with some_model: captured steps", {"batching": GRAPHS, "model": model}, {"model": model})
        for model in ({"scalar_head": SimpleNamespace(unit="sequence")}, {"image_layout": 1})
    ),
    *(
        (
            "batching.cuda_graphs with a model on several GPUs",
            {"batching": GRAPHS, "parallel": {axis: 2}},
            {"parallel": {axis: 2}},
        )
        for axis in ("tensor", "pipeline", "context", "expert")
    ),
    (
        "precision: fp16 with batching.cuda_graphs",
        {"batching": GRAPHS, "precision": "fp16"},
        {"batching": GRAPHS, "precision": "fp32"},
    ),
    (
        "recompute.granularity: full with batching.cuda_graphs",
        {"batching": GRAPHS, "recompute": Recompute(granularity="full")},
        {"recompute": Recompute(granularity="full")},
    ),
    (
        "batching.cuda_graphs with some_model: loads of trained experts",
        {"batching": GRAPHS, "model": EXPERTS},
        {"batching": GRAPHS, "model": EXPERTS, "adapters": Adapters()},
    ),
    (
        "optimizer.overlap_grad_reduce: true with batching.cuda_graphs",
        {"batching": GRAPHS, "optimizer": Adam(overlap_grad_reduce=True)},
        {"batching": GRAPHS, "optimizer": Adam(overlap_grad_reduce=True), "adapters": Adapters()},
    ),
    (
        "adapters.targets: lm_head with batching.cuda_graphs",
        {"batching": GRAPHS, "adapters": Adapters(targets=("lm_head",))},
        {"batching": GRAPHS, "adapters": Adapters()},
    ),
]
CASES_OF_MEGATRON_MODELS: list[Case] = [
    (
        "moe.aux_loss: transformers with some_model",
        {"moe": Moe(aux_loss="transformers", **AUX), "model": EXPERTS},
        {
            "moe": Moe(aux_loss="transformers", **AUX),
            "model": EXPERTS,
            "config": text_model(router_aux_loss_coef=0.1),
        },
    ),
    (
        "moe.bias_update_rate: 0.001 with some_model",
        {"moe": Moe(bias_update_rate=0.001)},
        {"moe": Moe(bias_update_rate=0.001), "config": {"moe_router_enable_expert_bias": True}},
    ),
    (
        "parallel.pipeline: 2 with some_model: it adds vision features to 3 layers, and the first stage has 1",
        {
            "parallel": {"pipeline": 2},
            "model": {"image_layout": 1},
            "config": text_model(vision_config=SimpleNamespace(deepstack_visual_indexes=[0, 1, 2])),
        },
        {
            "parallel": {"pipeline": 2},
            "model": {"image_layout": 1},
            "config": text_model(vision_config=SimpleNamespace(deepstack_visual_indexes=[0])),
        },
    ),
    (
        "base_weights: fp8 with parallel.tensor=2 and 192 features of an MLP",
        {"adapters": FP8, "parallel": {"tensor": 2}, "config": {"ffn_hidden_size": 192}},
        {"adapters": FP8, "parallel": {"tensor": 2}, "config": {"ffn_hidden_size": 256}},
    ),
    (
        "base_weights: fp8 with parallel.expert_tensor=2 and 64 features of an expert",
        {
            "adapters": FP8,
            "parallel": {"tensor": 2, "expert_tensor": 2},
            "config": {"num_moe_experts": 4, "moe_ffn_hidden_size": 64},
        },
        {"parallel": {"tensor": 2}, "config": {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}},
    ),
    (
        "batching.cuda_graphs with moe.experts=auto",
        {"batching": GRAPHS, "config": {"num_moe_experts": 4}},
        {"batching": GRAPHS, "config": {"num_moe_experts": 4}, "grouped": True},
    ),
    *(
        ("batching.cuda_graphs with some_model", {"batching": GRAPHS, "config": config}, {"config": config})
        for config in ({"hidden_dropout": 0.1}, {"attention_dropout": 0.1}, {"softmax_type": "learnable"})
    ),
    (
        "batching.cuda_graphs with rope_type dynamic",
        {"batching": GRAPHS, "config": {"rope_scaling": {"type": "dynamic"}}},
        {"batching": GRAPHS, "config": {"rope_scaling": {"rope_type": "linear"}}},
    ),
    (
        "batching.max_length: null with some_model: mcore-bridge leaves out its sliding_window of 512 tokens",
        {"config": text_model(sliding_window=512)},
        {"config": text_model(sliding_window=512) | {"window_size": (511, 0)}},
    ),
    (
        "batching.max_length: null with some_model: mcore-bridge leaves out its sliding_window of 512 tokens",
        {"config": text_model(sliding_window=512, layer_types=["full_attention", "sliding_attention"])},
        {"config": text_model(sliding_window=512, layer_types=["full_attention"])},
    ),
    *(
        (
            f"{setting}: kinds of layers",
            {"config": {"rope_scaling": {"full_attention": {}, "sliding_attention": {}}}} | given,
            {"config": {"rope_scaling": {"rope_type": "linear"}}} | given,
        )
        for setting, given in (
            ("batching.cuda_graphs with some_model", {"batching": GRAPHS}),
            ("engine: megatron with npu", {"engine": "megatron", "platform": "npu"}),
        )
    ),
    (
        "recompute.granularity: full with some_model: layers that share keys",
        {
            "config": {"recompute_granularity": "full"} | text_model(num_kv_shared_layers=2),
            "recompute": Recompute(granularity="full"),
        },
        {"config": {"recompute_granularity": "selective"} | text_model(num_kv_shared_layers=2)},
    ),
    (
        "batching.max_length: 4096 with rope_type longrope: above 1024 tokens",
        {
            "batching": Batching(max_length=4096),
            "model": {"max_position": 8192},
            "config": {"rope_scaling": {"rope_type": "longrope"}},
        },
        {"batching": Batching(max_length=4096), "config": {"rope_scaling": {"rope_type": "dynamic"}}},
    ),
    (
        "batching.packing: true with some_model",
        {"config": {"softmax_type": "learnable"}, "precision": "fp32"},
        {"config": {"softmax_type": "learnable"}},
    ),
    (
        "batching.packing: false with some_model",
        {
            "batching": Batching(packing=False),
            "config": {
                "dsa_indexer_topk_freq": 2,
                "pipeline_model_parallel_size": 2,
                "recompute_granularity": "full",
            },
        },
        {
            "batching": Batching(packing=False),
            "config": {"dsa_indexer_topk_freq": 2, "recompute_granularity": "full"},
        },
    ),
    (
        "recompute.granularity: none with sequence parallelism and dropout",
        {
            "config": {
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
                "recompute_granularity": "full",
                "hidden_dropout": 0.1,
                "attention_dropout": 0.1,
            }
        },
        {"config": {"sequence_parallel": True, "tensor_model_parallel_size": 2, "recompute_granularity": "full"}},
    ),
]
CASES_ON_TRANSFORMERS: list[Case] = [
    ("base_weights: fp8 with engine fsdp", {"adapters": FP8}, {"adapters": Adapters()}),
    ("mtp: train with engine fsdp", {"mtp": "train"}, {"mtp": "drop"}),
    ("optimizer.offload: 0.5 with engine fsdp", {"optimizer": Adam(offload=0.5)}, {}),
    ("batching.cuda_graphs with engine fsdp", {"batching": GRAPHS}, {}),
    ("moe.bias_update_rate: 0.001 with engine fsdp", {"moe": Moe(bias_update_rate=0.001)}, {}),
    ("moe.experts: grouped with engine fsdp", {"moe": Moe(experts="grouped")}, {"moe": Moe(experts="upstream")}),
    (
        "recompute.layers: 2 with engine fsdp",
        {"recompute": Recompute(granularity="full", layers=2)},
        {"recompute": Recompute(granularity="selective", layers=2)},
    ),
    (
        "recompute.modules: mlp with engine fsdp",
        {"recompute": Recompute(granularity="selective", modules=("mlp",))},
        {"recompute": Recompute(granularity="selective")},
    ),
    ("fsdp.compile: true with npu", {"fsdp": COMPILED, "platform": "npu"}, {"fsdp": COMPILED}),
    ("fsdp.compile: true with parallel.context=2", {"fsdp": COMPILED, "parallel": {"context": 2}}, {"fsdp": COMPILED}),
    ("fsdp.compile: true with adapters", {"fsdp": COMPILED, "adapters": Adapters()}, {"fsdp": COMPILED}),
]
TABLES: dict[str, tuple[Sequence[Rule[Any]], list[Case]]] = {
    "every engine": (EVERY_ENGINE, CASES_OF_EVERY_ENGINE),
    "transformers": (ON_TRANSFORMERS, CASES_ON_TRANSFORMERS),
    "megatron": (MEGATRON, CASES_OF_MEGATRON),
    "megatron's models": (MEGATRON_MODEL, CASES_OF_MEGATRON_MODELS),
}


def first_refusal(rules: Sequence[Rule[Any]], setup: Setup) -> Rule[Any] | None:
    return next((rule for rule in rules if rule.when(setup)), None)


@pytest.mark.parametrize(
    ("rules", "message", "refused", "accepted"),
    [pytest.param(rules, *case, id=f"{name}: {case[0]}") for name, (rules, cases) in TABLES.items() for case in cases],
)
def test_rule_refuses_a_setup_and_accepts_the_one_beside_it(
    rules: Sequence[Rule[Any]],
    message: str,
    refused: dict[str, Any],
    accepted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = "0.15.3" if "older than" in message else "0.16.1"
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with pytest.raises(ConfigError) as raised:
        enforce(rules, setup_of(**refused))
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) <= 160
    enforce(rules, setup_of(**accepted))


def test_variable_that_keeps_torch_from_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    enforce(ON_TRANSFORMERS, setup_of())
    with pytest.raises(ConfigError, match=r"fsdp\.compile: true with TORCHDYNAMO_DISABLE=1: this disables"):
        enforce(ON_TRANSFORMERS, setup_of(fsdp=COMPILED))


@pytest.mark.parametrize("name", TABLES)
def test_every_rule_has_a_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, cases = TABLES[name]
    refusals = []
    for message, refused, _ in cases:
        version = "0.15.3" if "older than" in message else "0.16.1"
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        refusals.append(first_refusal(rules, setup_of(**refused)))
    assert [rule for rule in rules if rule not in refusals and "TORCHDYNAMO" not in rule.text] == []
