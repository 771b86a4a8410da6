"""Training steps whose peak memory is compared with the estimate: on a CPU in tests, on GPUs by ``scripts/bench.py memory``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.models import SHAPES as QWEN3
from bench.models import write_checkpoint
from megascend.config import RunConfig
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.sizes import Workload
from megascend.runtime.topology.topology import plan

LOWEST, HIGHEST = -0.05, 0.15
"""Of the measured peak, by which an estimate may miss it."""

SMALL = {
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE = {"model_type": "qwen3_moe", "tie_word_embeddings": False, "norm_topk_prob": True}
SMALL_EXPERTS = MOE | {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
LARGE = QWEN3["1.7b"] | {"num_hidden_layers": 12}
LARGE_EXPERTS = QWEN3["30b-a3b"] | {"num_hidden_layers": 4, "num_experts": 32}
LINEAR_ATTENTION = {
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
SMALL_HYBRID = SMALL | LINEAR_ATTENTION
LARGE_HYBRID = (
    LARGE
    | LINEAR_ATTENTION
    | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 3}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
)
"""Of Qwen3.5's text models."""
TOKENS = {"cpu": 1024, "cuda": 8192}
"""Of a micro batch."""


@dataclass(frozen=True)
class Case:
    """A run to measure.

    Attributes:
        settings: of the run file.
        experts: of a mixture of experts.
        hybrid: of a model with linear attention.
        ranks: processes.
        packed: samples of different length.
        micro_batches: that each data parallel rank has in a step.
        share: of the usual tokens.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    hybrid: bool = False
    ranks: int = 1
    packed: bool = False
    micro_batches: int = 1
    share: float = 1.0

    @property
    def engine(self) -> str:
        return self.settings.get("engine", "megatron")

    @property
    def model(self) -> str:
        """Return the key in :data:`SHAPES` of the model that the case trains."""
        return "hybrid" if self.hybrid else "moe" if self.experts else "dense"


SHAPES = {
    "cpu": {"dense": SMALL, "moe": SMALL | SMALL_EXPERTS, "hybrid": SMALL_HYBRID},
    "cuda": {"dense": LARGE, "moe": LARGE_EXPERTS, "hybrid": LARGE_HYBRID},
}
LORA = {"lora": {"rank": 16}}
MUON = {"optimizer": {"kind": "muon"}}
EIGHT_BITS = {"optimizer": {"moments": "8bit"}}
OFFLOAD = {"optimizer": {"offload": True}}
FULL = {"recompute": {"granularity": "full"}}
FSDP, SINGLE = {"engine": "fsdp"}, {"engine": "single"}
CASES = {
    "dense": Case(),
    "packed": Case(packed=True),
    "fp32": Case({"precision": "fp32"}),
    "recomputed": Case(FULL),
    "few tokens": Case(share=0.0625),
    "moe": Case(experts=True),
    "lora": Case(LORA),
    "moe lora": Case(LORA, experts=True),
    "muon": Case(MUON),
    "muon moe": Case(MUON, experts=True),
    "muon dp2": Case(MUON, ranks=2),
    "8bit dp2": Case(EIGHT_BITS, ranks=2),
    "offload dp2": Case(OFFLOAD, ranks=2),
    "lora nf4": Case(LORA | {"base_weights": "nf4"}),
    "moe lora fp8": Case(LORA | {"base_weights": "fp8"}, experts=True),
    "tp2": Case({"parallel": {"tensor": 2}}, ranks=2),
    "tp2 sequence": Case({"parallel": {"tensor": 2, "sequence": True}}, ranks=2),
    "dp2": Case(ranks=2),
    "pp2": Case({"parallel": {"pipeline": 2}}, ranks=2, micro_batches=4),
    "cp2": Case({"parallel": {"context": 2}}, ranks=2),
    "ep2": Case({"parallel": {"expert": 2}}, experts=True, ranks=2),
    "fsdp": Case(FSDP),
    "fsdp packed": Case(FSDP, packed=True, micro_batches=2),
    "fsdp recomputed": Case(FSDP | FULL),
    "fsdp moe": Case(FSDP, experts=True),
    "fsdp lora": Case(FSDP | LORA),
    "fsdp dp2": Case(FSDP, ranks=2),
    "fsdp muon": Case(FSDP | MUON, ranks=2),
    "single": Case(SINGLE),
    "single muon": Case(SINGLE | MUON),
    "single 8bit": Case(SINGLE | EIGHT_BITS),
    "single lora": Case(SINGLE | LORA),
    "hybrid": Case(hybrid=True),
    "hybrid packed": Case(hybrid=True, packed=True),
    "hybrid fp32": Case({"precision": "fp32"}, hybrid=True),
    "hybrid recomputed": Case(FULL, hybrid=True),
    "hybrid lora": Case(LORA, hybrid=True),
    "hybrid tp2": Case({"parallel": {"tensor": 2}}, hybrid=True, ranks=2),
    "hybrid tp2 sequence": Case({"parallel": {"tensor": 2, "sequence": True}}, hybrid=True, ranks=2),
    "hybrid pp2": Case({"parallel": {"pipeline": 2}}, hybrid=True, ranks=2, micro_batches=4),
    "fsdp hybrid packed": Case(FSDP, hybrid=True, packed=True, micro_batches=2),
    "fsdp hybrid recomputed": Case(FSDP | FULL, hybrid=True),
    "fsdp hybrid lora": Case(FSDP | LORA, hybrid=True),
    "single hybrid": Case(SINGLE, hybrid=True),
    "single hybrid lora": Case(SINGLE | LORA, hybrid=True),
}


@dataclass
class Measured:
    """Bytes on one rank."""

    peak: int
    reserved: int = 0


def write_model(name: str, platform: str, directory: Path) -> None:
    """Write a random checkpoint of one of :data:`SHAPES` into a new directory."""
    write_checkpoint(SHAPES[platform][name], directory, precision="bf16", seed=1)


def config_of(case: Case, platform: str, model: Path) -> RunConfig:
    """Return the run configuration of the case."""
    tokens = int(case.share * TOKENS[platform])
    usual: dict[str, Any] = {
        "model": model,
        "output": "unused",
        "data": {"path": "unused"},
        "platform": platform,
        "self_check": case.engine != "megatron",
        "batching": {"micro_batch_tokens": tokens},
    }
    return RunConfig(**usual | case.settings)


def lengths_of(case: Case, config: RunConfig, data_ranks: int) -> list[int]:
    """Return the lengths of a step's samples; those of each micro batch fill it."""
    tokens = config.batching.budget
    parts = [tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4] if case.packed else [tokens // 2] * 2
    return parts * (case.micro_batches * data_ranks)


def estimate_of(case: Case, platform: str, model: Path) -> Estimate:
    """Estimate the memory of a case with the formulas."""
    config = config_of(case, platform, model)
    info = inspect_checkpoint(model, mtp=config.mtp)
    budget = config.batching.budget
    workload = Workload(budget, case.micro_batches, case.packed and case.engine != "single", longest=budget // 2)
    topology = plan(config.parallel, case.ranks, info.shape)
    prediction = estimate(
        config, info, read_config(model), topology, workload, "plain" if platform == "cpu" else "fused"
    )
    assert prediction is not None
    return prediction


def measure(case: Case, platform: str, model: Path) -> Measured:
    """Train three steps on this rank, and look at the last two."""
    if platform == "cpu":
        from support.tensor_memory import TensorMemory

        with TensorMemory() as memory:
            train(case, platform, model, memory.reset_peak)
        return Measured(memory.peak)
    import torch

    train(case, platform, model, torch.cuda.reset_peak_memory_stats)
    return Measured(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def train(case: Case, platform: str, model: Path, reset_peak: Any) -> None:
    """Train three steps on random tokens; ``reset_peak`` is called after the first."""
    import torch

    from megascend.apps.train.run_backend import ADAPTER, make_backend
    from megascend.training.batch.sample import Sample

    config = config_of(case, platform, model)
    with make_backend(config) as backend:
        if config.lora is not None:
            backend.add_adapter(ADAPTER, config.lora)
        generator = torch.Generator().manual_seed(1)
        lengths = lengths_of(case, config, backend.topology.data)
        vocabulary = inspect_checkpoint(model).shape.vocab_size
        samples = [
            Sample.causal(torch.randint(0, vocabulary, (length + 1,), generator=generator)) for length in lengths
        ]
        share = backend.shard(samples)
        for step in range(3):
            if step == 1:
                reset_peak()
            backend.forward_backward(share, adapter=None if config.lora is None else ADAPTER)
            backend.optimizer_step()
