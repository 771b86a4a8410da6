"""Benchmark the same training work in a bare Megatron-Core loop and in ``MegatronBackend``.

    python scripts/bench.py train                                # Qwen3-1.7B shapes, 8 x 4096 tokens a step, one GPU
    python scripts/bench.py train --tiny --platform cpu          # the same script on a CPU, in a minute
    python scripts/bench.py train --run bare --run bare:fusions=rope+swiglu --run megascend:micro_batch_tokens=16384

    python scripts/bench.py train --moe --layers 8 --ranks 2 --run plain --run fsdp:compile=true --run megascend:expert=2
    python scripts/bench.py train --moe --lora 16 --length 16384 --sequences 4 --run megascend:recompute=full --run peft

Every ``--run`` is one fresh process on the same device, one after the other: same weights (a random checkpoint in
Hugging Face format, written to a temporary directory), same data, same optimizer settings. Warm-up steps come first,
then every step is timed with the device idle before and after it. The table is printed last; the exit code is 1 if
losses or gradient norms of the runs disagree (``TOLERANCE``), so a figure is never reported for different work.

A run is one of these, with options after colons:
    bare        micro_batch=2  fusions=rope+swiglu+wgrad  recompute=layernorm+mlp
    megascend   micro_batch_tokens=8192  recompute=layernorm+mlp  packing=false  expert=2  experts=upstream  graphs=true
                tensor=2  offload=true
    fsdp        micro_batch_tokens=8192  recompute=full  packing=false  expert=2  compile=true  reshard=false
    plain       micro_batch=2  recompute=full
    peft        micro_batch=1  recompute=full

With ``--lora`` the model is frozen, and an adapter of that rank on all linear layers and experts is trained; the options
``base=nf4`` and ``base=fp8`` of ``megascend`` quantise the model. ``peft`` is transformers' model with peft's adapter and torch's
fused AdamW, on one rank. Each library draws the adapter's first values in its own way, so the bounds are those of bf16.

With ``--images`` every sequence of a family with a vision tower begins with so many images of 448 x 448 pixels (196
tokens each, never learned); ``tower=train`` trains the tower too. There is no ``bare`` run with images.

The bare loop uses megatron-core, mcore-bridge and Transformer Engine only: padded [batch, sequence] micro batches,
Transformer Engine's fused cross entropy, Megatron DDP with fp32 gradients, Megatron's optimizer (fp32 main parameters,
TE FusedAdam) and Megatron's schedule. ``fusions`` enables further fusions of Megatron-Core. On a CPU there is
no Transformer Engine, so there (and only there) the bare loop calls ``megascend.bootstrap()`` to get one.
``fsdp`` is ``FsdpBackend``; its recomputation is ``full`` or ``selective``. ``plain`` is a loop over transformers' model in
torch's ``fully_shard``, layer by layer, as one writes it: padded micro batches, whole logits, torch's cross entropy and
fused AdamW.

With ``--ranks`` above 1 every run is that many processes, each with a part of the sequences (not ``bare``); memory is
rank 0's. ``--family`` takes the published widths of another family, cut to a few layers and experts (``FAMILIES``).
``--moe`` takes Qwen3-30B-A3B's shapes with as many ``--layers`` as fit: the time of a step is a constant part (embedding,
output layer) plus a part for every layer, so that two numbers of layers give the time of the full model.

Model FLOPs of a step: tokens * (6 * N + 6 * layers * heads * head_dim * length), where N counts the weights that are
multiplied with every token (of experts those of one token's; tied embeddings once, as output layer) and the second term
is causal attention: forward 2 products * 2 FLOP * length / 2, times 3 for forward and backward. Recomputation is not
counted. A frozen weight has no gradient: with ``--lora``, 4 * N in place of 6 * N, without the adapter's own.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 peak in FLOP/s by a part of the device's name."""

TOLERANCE = {
    "bf16": {"first_loss": 2e-3, "last_loss": 1e-2, "first_norm": 3e-2},
    "fp32": {"first_loss": 1e-5, "last_loss": 1e-4, "first_norm": 1e-3},
}
"""Largest relative difference between two runs. The last loss has all optimizer steps between it and the first."""

QWEN3_1_7B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
CUT_VOCABULARY = 32768
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {  # DeepSeek-V3: 61 layers (3 dense), 256 experts in 8 groups
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {  # GLM-4.5-Air: 46 layers (1 dense), 128 experts
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {  # gpt-oss-20b: 24 layers, 32 experts
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {  # Qwen3.5-4B: 32 layers, three of linear attention to one of softmax attention
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 24,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {  # Qwen3.5-35B-A3B: 40 layers, 256 experts
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {  # Qwen3-VL-4B: 36 layers, and the whole vision tower of 24
        "vision_start_token_id": CUT_VOCABULARY - 4,
        "vision_end_token_id": CUT_VOCABULARY - 3,
        "image_token_id": CUT_VOCABULARY - 2,
        "video_token_id": CUT_VOCABULARY - 1,
        "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": CUT_VOCABULARY,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}
"""Published shapes of other families, of which layers, experts and vocabulary are cut so that all parameters train on 80 GB."""
PIXELS: dict[int, torch.Tensor] = {}
"""Pixel values of the sequences so far, by a number made from their tokens."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Work:
    """Workload that every run performs."""

    shape: dict[str, Any]
    platform: str
    precision: str
    sequences: int
    length: int
    warmup: int
    steps: int
    lr: float
    seed: int
    ranks: int = 1
    family: str | None = None
    lora: int = 0
    """Rank of the adapter that is trained; 0: all parameters are."""
    images: int = 0
    """Images at the beginning of every sequence."""
    batches: int = 2
    """Distinct batches, used in turn, so that the loss falls and a wrong update shows."""

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.length

    @property
    def text(self) -> dict[str, Any]:
        """Shape of the language model."""
        return self.shape.get("text_config", self.shape)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of an image's patches; four patches are a token."""
        side = 4 if self.length < 512 else 28
        return 1, side, side

    @property
    def flops(self) -> float:
        """Model FLOPs of one optimizer step of Qwen3 and Qwen3-MoE; see the module's docstring."""
        s = self.shape
        attention = s["hidden_size"] * s["head_dim"] * (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"])
        mlp = 3 * s["hidden_size"] * s["intermediate_size"]
        if "num_experts" in s:
            mlp = s["num_experts_per_tok"] * 3 * s["hidden_size"] * s["moe_intermediate_size"]
            mlp += s["hidden_size"] * s["num_experts"]  # the router
        weights = s["num_hidden_layers"] * (attention + mlp) + s["vocab_size"] * s["hidden_size"]
        causal = s["num_hidden_layers"] * s["num_attention_heads"] * s["head_dim"] * self.length
        return self.tokens * ((4.0 if self.lora else 6.0) * weights + 6.0 * causal)


@dataclass
class Result:
    """Result of one run. Losses and norms cover warm-up and timed steps; milliseconds the timed ones."""

    run: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    reserved_gib: float = 0.0


class Steps:
    """A training loop to be timed: one optimizer step a call."""

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        """Train on ``batch`` [sequences, length + 1] (CPU, int64); returns loss and gradient norm."""
        raise NotImplementedError


class BareSteps(Steps):
    """Megatron-Core as its own examples use it."""

    def __init__(self, work: Work, model_dir: Path, options: dict[str, str]) -> None:
        import torch

        if work.platform == "cpu":
            import megascend

            megascend.bootstrap("cpu").load_megatron()
        import megatron.core.parallel_state as mpu
        import torch.distributed as dist
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        self.work = work
        self.micro_batch = int(options.get("micro_batch", 2))
        fusions = set(options.get("fusions", "").split("+")) - {""}
        if unknown := fusions - {"rope", "swiglu", "wgrad"}:
            raise SystemExit(f"bare:fusions takes rope, swiglu and wgrad, got {sorted(unknown)}")
        if work.sequences % self.micro_batch:
            raise SystemExit(f"{work.sequences} sequences do not divide into micro batches of {self.micro_batch}")
        self.device = torch.device("cuda" if work.platform == "cuda" else "cpu")
        backend = "nccl" if work.platform == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mpu.initialize_model_parallel()
        torch.manual_seed(work.seed)
        model_parallel_cuda_manual_seed(work.seed)

        bf16 = work.precision == "bf16"
        model, config = build_bridge_model(
            model_dir,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            apply_rope_fusion="rope" in fusions,
            bias_activation_fusion="swiglu" in fusions,
            cross_entropy_loss_fusion=work.platform == "cuda",
            cross_entropy_fusion_impl="te",
            **recompute_options(options),
        )
        if bf16:
            from megatron.core.transformer.module import Float16Module

            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.model = DistributedDataParallel(config, ddp, model)
        if "wgrad" in fusions:
            accumulate_in_main_grad(self.model)
        adam = OptimizerConfig(
            optimizer="adam",
            lr=work.lr,
            weight_decay=0.01,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        length = self.work.length
        micro_batches = iter(batch.split(self.micro_batch))

        def forward(micro_batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            tokens = next(micro_batches).to(self.device, non_blocking=True)
            position_ids = torch.arange(length, device=self.device).expand(len(tokens), -1)
            mask = torch.ones(tokens.shape[0], length, device=self.device)
            losses = model(
                input_ids=tokens[:, :-1].contiguous(),
                position_ids=position_ids,
                attention_mask=None,
                labels=tokens[:, 1:].contiguous(),
            )

            def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss = (losses.float() * mask).sum() / mask.sum()
                return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss itself, in place

            return losses, loss_function

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=micro_batches,
            model=[self.model],
            num_microbatches=len(batch) // self.micro_batch,
            seq_length=length,
            micro_batch_size=self.micro_batch,
            forward_only=False,
        )
        succeeded, norm, _ = self.optimizer.step()
        if not succeeded:
            raise RuntimeError("the optimizer skipped a step of the bare loop")
        return torch.stack([report["loss"] for report in reports]).mean().item(), float(norm)


class PlainSteps(Steps):
    """transformers' model under ``fully_shard``, and a loop of one's own."""

    def __init__(self, work: Work, model_dir: Path, options: dict[str, str]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.work, self.micro_batch = work, int(options.get("micro_batch", 2))
        on_gpu, self.rank = work.platform == "cuda", int(os.environ.get("RANK", "0"))
        self.device = torch.device("cuda", self.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        group_options = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if work.ranks == 1 else {}
        dist.init_process_group("nccl" if on_gpu else "gloo", **group_options)
        dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        placement = {"device_map": {"": self.rank}} if on_gpu else {}
        auto: Any = AutoModelForImageTextToText if work.images else AutoModelForCausalLM
        model: Any = auto.from_pretrained(model_dir, dtype=torch.float32, **placement)
        if options.get("recompute"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = model.model.language_model.layers if work.images else model.model.layers
        if work.images:
            model.model.visual.requires_grad_(options.get("tower") == "train")
            layers = [*model.model.visual.blocks, *layers]
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.config.use_cache = False
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=work.lr, betas=(0.9, 0.999), weight_decay=0.01, fused=work.platform == "cuda"
        )

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        import torch

        parts, losses = batch[self.rank :: self.work.ranks].split(self.micro_batch), []
        for part in parts:
            tokens, weights = part.to(self.device, non_blocking=True), weights_of(self.work, part[:, 1:])
            inputs: dict[str, torch.Tensor] = {"input_ids": tokens[:, :-1]}
            if self.work.images:
                pixels, grids = zip(*(make_images(self.work, row) for row in part), strict=True)
                inputs["pixel_values"] = torch.cat(pixels).to(self.device)
                inputs["image_grid_thw"] = torch.cat(grids).to(self.device)
                inputs["mm_token_type_ids"] = (tokens[:, :-1] == self.work.shape["image_token_id"]).int()
            logits = self.model(**inputs).logits
            targets = tokens[:, 1:].masked_fill(weights.to(self.device) == 0, -100)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        torch.distributed.all_reduce(loss)
        return loss.item() / self.work.ranks, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


class PeftSteps(Steps):
    """transformers' frozen model with peft's adapter, and a loop of one's own."""

    def __init__(self, work: Work, model_dir: Path, options: dict[str, str]) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        self.work, self.micro_batch = work, int(options.get("micro_batch", 1))
        self.device = torch.device("cuda" if work.platform == "cuda" else "cpu")
        dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
        placement = {"device_map": {"": 0}} if work.platform == "cuda" else {}
        base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, **placement)
        base.config.use_cache = False
        if options.get("recompute"):
            base.gradient_checkpointing_enable({"use_reentrant": False})
            base.enable_input_require_grads()
        experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
        torch.manual_seed(work.seed)
        self.model: Any = get_peft_model(
            base,
            LoraConfig(
                r=work.lora,
                lora_alpha=2 * work.lora,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                **(experts if "num_experts" in work.shape else {}),
            ),
        ).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=work.lr, betas=(0.9, 0.999), weight_decay=0.01, fused=work.platform == "cuda"
        )

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        import torch

        parts, losses = batch.split(self.micro_batch), []
        for part in parts:
            tokens = part.to(self.device, non_blocking=True)
            logits = self.model(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item(), float(norm)


class MegascendSteps(Steps):
    """The same through the facade, as a trainer would call it."""

    engine = "megatron"

    def __init__(self, work: Work, model_dir: Path, options: dict[str, str]) -> None:
        import megascend

        megascend.bootstrap(work.platform, engine=self.engine)
        extra = self.settings(options) | ({"vision_tower": options.get("tower", "frozen")} if work.images else {})
        budget = int(options.get("micro_batch_tokens", (1 if work.lora else 2) * work.length))
        if work.lora:
            extra["adapters"] = megascend.Adapters(
                max_count=1, max_rank=work.lora, base_weights=cast("Any", options.get("base", "unquantised"))
            )
        kind: Any = megascend.MegatronBackend if self.engine == "megatron" else megascend.FsdpBackend
        self.backend = kind(
            model=str(model_dir),
            parallel=megascend.Parallel(tensor=int(options.get("tensor", 1)), expert=int(options.get("expert", 1))),
            precision=work.precision,
            optimizer=megascend.Adam(
                lr=work.lr, weight_decay=0.01, max_grad_norm=1.0, offload=options.get("offload") == "true"
            ),
            batching=megascend.Batching(
                micro_batch_tokens=budget,
                # Transformer Engine takes no packed samples where attention has sinks.
                packing=options.get("packing", str(work.family != "gpt_oss")).lower() != "false",
                cuda_graphs=megascend.CudaGraphs(max_tokens=budget) if options.get("graphs") == "true" else None,
            ),
            seed=work.seed,
            **extra,
        )
        self.sample, self.images, self.work = megascend.Sample, megascend.SampleImages, work
        self.adapter = "adapter" if work.lora else None
        if self.adapter is not None:
            self.backend.add_adapter(self.adapter, megascend.Lora(rank=work.lora, alpha=2 * work.lora))

    def settings(self, options: dict[str, str]) -> dict[str, Any]:
        """Return the settings that only this engine has, or has in its own way."""
        import megascend

        experts: Any = options.get("experts", "auto")
        settings = {"moe": megascend.Moe(experts=experts)}
        if not (recompute := recompute_options(options)):
            return settings
        if modules := recompute.get("recompute_modules"):
            return settings | {"recompute": megascend.Recompute(granularity="selective", modules=tuple(modules))}
        return settings | {"recompute": megascend.Recompute(granularity="full")}

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        samples = []
        for row in batch:
            images = self.images(*make_images(self.work, row)) if self.work.images else None
            weights = weights_of(self.work, row[1:])
            samples.append(self.sample(input_ids=row[:-1], target_ids=row[1:], weights=weights, images=images))
        result = self.backend.forward_backward(self.backend.shard(samples), adapter=self.adapter)
        step = self.backend.optimizer_step(self.adapter)
        if step.skipped:
            raise RuntimeError("the backend skipped a step")
        return float(result.loss), float(step.grad_norm)


class FsdpSteps(MegascendSteps):
    """The same with the engine of FSDP2."""

    engine = "fsdp"

    def settings(self, options: dict[str, str]) -> dict[str, Any]:
        import megascend

        granularity: Any = options.get("recompute", "none")
        fsdp = megascend.Fsdp(
            compile=options.get("compile", "false") == "true",
            reshard_after_forward=options.get("reshard", "true") == "true",
        )
        return {"fsdp": fsdp, "recompute": megascend.Recompute(granularity=granularity)}


def build_bridge_model(model_dir: Path, **settings: Any) -> tuple[torch.nn.Module, Any]:
    """mcore-bridge's Megatron model of a Hugging Face checkpoint, with its weights, on this process's device."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    from megascend.models import architecture_of

    hf_config = AutoConfig.from_pretrained(model_dir)
    arguments, architecture = hf_to_mcore_config(hf_config), architecture_of(hf_config.to_dict())
    if architecture.megatron is not None:  # mcore-bridge knows the family only through its declaration
        architecture.import_module(architecture.megatron)
        arguments |= architecture.megatron_settings(hf_config.to_dict())
    config = ModelConfig(**{**arguments, **settings})
    models = get_mcore_model(config)
    config.bridge.load_weights(models, str(model_dir))
    device = "cuda" if settings.get("cross_entropy_loss_fusion") else "cpu"
    return models[0].to(device), models[0].config


def accumulate_in_main_grad(model: torch.nn.Module) -> None:
    """Let Transformer Engine's linear layers add their weight gradients to Megatron's fp32 buffer in the GEMM.

    ``gradient_accumulation_fusion`` in the config asks for apex as well, for the output layer; TE itself does not.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def recompute_options(options: dict[str, str]) -> dict[str, Any]:
    """``recompute=full`` or ``recompute=layernorm+mlp`` as Megatron's settings."""
    names = [name for name in options.get("recompute", "").split("+") if name]
    if not names:
        return {}
    if names == ["full"]:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": names}


def write_family_checkpoint(work: Work, directory: Path) -> None:
    """Write a random checkpoint of another family, as transformers initialises it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    # transformers zeroes the row of a padding token and drops its gradient; the samples here use every token.
    shape: dict[str, Any] = {"pad_token_id": None, **work.shape}
    if "text_config" in shape:
        shape["text_config"] = {**shape["text_config"], "pad_token_id": None}
    config = AutoConfig.for_model(work.family, **shape, dtype=dtype)
    auto: Any = AutoModelForImageTextToText if "vision_config" in shape else AutoModelForCausalLM
    torch.manual_seed(work.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(config, dtype=dtype)
    model.save_pretrained(directory)


def write_checkpoint(work: Work, directory: Path) -> None:
    """Write a random checkpoint of Qwen3 or Qwen3-MoE (normal, 0.02) under Hugging Face's names, on the GPU if there is one."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    s = work.shape
    common: dict[str, Any] = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    experts = s.get("num_experts", 0)
    if experts:
        config: Any = Qwen3MoeConfig(**s, **common, tie_word_embeddings=False, norm_topk_prob=True)
    else:
        config = Qwen3Config(**s, **common, tie_word_embeddings=True)
    config.architectures = ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"]
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    config.dtype = dtype
    config.save_pretrained(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(work.seed)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) * 0.02).to(dtype).cpu()

    unit_weight = lambda size: torch.ones(size, dtype=dtype)  # noqa: E731
    hidden, head = s["hidden_size"], s["head_dim"]
    files: dict[str, str] = {}

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write one file; the tensors of a large model do not fit into the host's memory at once."""
        save_file(tensors, directory / f"{name}.safetensors", metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, f"{name}.safetensors"))

    ends = {"model.embed_tokens.weight": normal(s["vocab_size"], hidden), "model.norm.weight": unit_weight(hidden)}
    if experts:
        ends["lm_head.weight"] = normal(s["vocab_size"], hidden)
    write("ends", ends)
    for layer in range(s["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors = {
            prefix + "self_attn.q_proj.weight": normal(s["num_attention_heads"] * head, hidden),
            prefix + "self_attn.k_proj.weight": normal(s["num_key_value_heads"] * head, hidden),
            prefix + "self_attn.v_proj.weight": normal(s["num_key_value_heads"] * head, hidden),
            prefix + "self_attn.o_proj.weight": normal(hidden, s["num_attention_heads"] * head),
            prefix + "self_attn.q_norm.weight": unit_weight(head),
            prefix + "self_attn.k_norm.weight": unit_weight(head),
            prefix + "input_layernorm.weight": unit_weight(hidden),
            prefix + "post_attention_layernorm.weight": unit_weight(hidden),
        }
        if experts:
            tensors[prefix + "mlp.gate.weight"] = normal(experts, hidden)
        width = s["moe_intermediate_size"] if experts else s["intermediate_size"]
        for mlp in [f"{prefix}mlp.experts.{expert}." for expert in range(experts)] or [prefix + "mlp."]:
            tensors |= {
                mlp + "gate_proj.weight": normal(width, hidden),
                mlp + "up_proj.weight": normal(width, hidden),
                mlp + "down_proj.weight": normal(hidden, width),
            }
        write(f"layer-{layer}", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def make_batches(work: Work) -> list[torch.Tensor]:
    """Random tokens, [sequences, length + 1] each, small ids more frequent, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(work.seed)
    size = (work.batches, work.sequences, work.length + 1)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    if not work.images:
        return list((work.text["vocab_size"] * uniform**3).long())
    shape, features = work.shape, math.prod(work.grid) // 4
    special = [shape[name] for name in shape if name.endswith("_token_id")]
    tokens = (min(special) * uniform**3).long()
    image_row = [shape["vision_start_token_id"], *[shape["image_token_id"]] * features, shape["vision_end_token_id"]]
    tokens[..., : work.images * len(image_row)] = torch.tensor(image_row * work.images)
    return list(tokens)


def make_images(work: Work, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixel values [patches, numbers of a patch] and grids [images, 3] of one sequence, made from its tokens."""
    import torch

    vision = work.shape["vision_config"]
    patch = 3 * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 16) ** 2
    key = int(tokens[-64:].sum())
    if key not in PIXELS:  # made once: the making is not part of the second and later steps of a batch
        generator = torch.Generator().manual_seed(key)
        PIXELS[key] = torch.randn(work.images * math.prod(work.grid), patch, generator=generator)
    return PIXELS[key], torch.tensor([work.grid] * work.images)


def weights_of(work: Work, targets: torch.Tensor) -> torch.Tensor:
    """Return 1 for every target that is learned and 0 for tokens of images, in the shape of ``targets``."""
    import torch

    if not work.images:
        return torch.ones(targets.shape)
    special = [work.shape[name] for name in work.shape if name.endswith("_token_id")]
    return (~torch.isin(targets, torch.tensor(special))).float()


def execute(work: Work, run: str, model_dir: Path, profile: Path | None) -> Result:
    """Do one run in this process."""
    import torch

    name, options = parse_run(run)
    kinds = {"bare": BareSteps, "megascend": MegascendSteps, "fsdp": FsdpSteps, "plain": PlainSteps, "peft": PeftSteps}
    steps = kinds[name](work, model_dir, options)
    on_gpu = work.platform == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    batches = make_batches(work)
    result = Result(run=run, device=torch.cuda.get_device_name() if on_gpu else "CPU", versions=versions())
    for index in range(work.warmup + work.steps):
        batch = batches[index % len(batches)]
        synchronize()
        start = time.perf_counter()
        loss, norm = steps.step(batch)
        synchronize()
        elapsed = 1000 * (time.perf_counter() - start)
        result.losses.append(loss)
        result.norms.append(norm)
        if index >= work.warmup:
            result.ms.append(elapsed)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{run} step {index}: loss {loss:.5f} norm {norm:.4f} {elapsed:.1f} ms", flush=True)
    if on_gpu:
        result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        result.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    else:
        import resource

        result.peak_gib = result.reserved_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if profile is not None:
        suffix = f"-{os.environ['RANK']}" if work.ranks > 1 else ""
        write_profile(steps, batches[0], profile / f"profile-{re.sub('[^a-z0-9]+', '-', run)}{suffix}.txt", on_gpu)
    return result


def write_profile(steps: Steps, batch: torch.Tensor, path: Path, on_gpu: bool) -> None:
    """Profile one more step with torch's profiler: kernels by device time, then operators by time spent on the host."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as trace:
        steps.step(batch)
    events = trace.key_averages()
    text = ""
    if on_gpu:
        kernels = [
            event  # annotations name stretches of time whose kernels are listed themselves
            for event in events
            if event.self_device_time_total > 0 and event.device_type.name != "CPU" and not event.is_user_annotation
        ]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in kernels)
        text += f"device time of one step, all kernels: {total / 1000:.1f} ms\n"
        for event in kernels[:45]:
            share = 100 * event.self_device_time_total / total
            text += (
                f"{event.self_device_time_total / 1000:9.2f} ms {share:5.1f}% {event.count:6d}x  {event.key[:110]}\n"
            )
        text += "\n"
    sort = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    text += events.table(sort_by=sort, row_limit=40, max_name_column_width=60)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def versions() -> dict[str, str]:
    """Return the versions of packages that affect speed."""
    from importlib import metadata

    installed = {}
    for package in ("torch", "megatron-core", "mcore-bridge", "transformer-engine", "transformers", "triton"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "none"
    return installed


def parse_run(text: str) -> tuple[str, dict[str, str]]:
    """Parse ``bare:micro_batch=4:fusions=rope`` into name and options."""
    name, *pairs = text.split(":")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    allowed = {
        "bare": {"micro_batch", "fusions", "recompute"},
        "megascend": {"micro_batch_tokens", "recompute", "packing", "expert", "experts", "graphs", "tower", "base"}
        | {"tensor", "offload"},
        "fsdp": {"micro_batch_tokens", "recompute", "packing", "expert", "compile", "reshard", "tower"},
        "plain": {"micro_batch", "recompute", "tower"},
        "peft": {"micro_batch", "recompute"},
    }
    if name not in allowed or not options.keys() <= allowed[name]:
        raise SystemExit(f"--run {text}: use one of {allowed}")
    return name, options


def disagreement(work: Work, reference: Result, other: Result) -> str:
    """Describe the differences between two runs of the same work; empty if they agree."""
    bounds = TOLERANCE["bf16" if work.lora else work.precision]
    pairs = {
        "first_loss": (reference.losses[0], other.losses[0]),
        "last_loss": (reference.losses[-1], other.losses[-1]),
        "first_norm": (reference.norms[0], other.norms[0]),
    }
    wrong = []
    for name, (expected, actual) in pairs.items():
        relative = abs(actual - expected) / max(abs(expected), 1e-12)
        if not (math.isfinite(actual) and relative <= bounds[name]):
            wrong.append(
                f"{name} {actual:.6g} against {expected:.6g} (relative {relative:.1e}, bound {bounds[name]:.0e})"
            )
    return "; ".join(wrong)


def model_flops(work: Work, model_dir: Path) -> float:
    """Return the model FLOPs of one optimizer step."""
    if work.family is None:
        return work.flops
    from megascend.models.checkpoint_files.info import inspect_checkpoint

    return work.tokens * inspect_checkpoint(model_dir).flops_per_token(work.length)


def report(work: Work, results: list[Result], flops: float) -> bool:
    """Print the table; return whether all runs agree numerically."""
    peak = next((flops for name, flops in PEAK_BF16.items() if name in results[0].device), None)
    print()
    print(f"{results[0].device}; {', '.join(f'{k} {v}' for k, v in results[0].versions.items())}")
    print(
        f"{work.ranks} ranks, {work.sequences} x {work.length} tokens a step, {work.precision}, "
        f"{work.warmup} warm-up and {work.steps} timed steps, {work.family or 'qwen3'} shape {work.shape}"
    )
    width = max(len(result.run) for result in results)
    header = (
        f"{'run':<{width}} {'tokens/s':>9} {'ms median':>10} {'min':>8} {'max':>8} {'GiB':>6} {'resvd':>6} {'MFU':>6}"
    )
    print(f"{header} {'loss first':>11} {'last':>9} {'norm':>8}")
    for result in results:
        median = statistics.median(result.ms)
        mfu = f"{flops / (median / 1000) / peak / work.ranks:6.1%}" if peak else "     -"
        print(
            f"{result.run:<{width}} {work.tokens / median * 1000:9.0f} {median:10.1f} {min(result.ms):8.1f}"
            f" {max(result.ms):8.1f} {result.peak_gib:6.1f} {result.reserved_gib:6.1f} {mfu}"
            f" {result.losses[0]:11.5f} {result.losses[-1]:9.5f} {result.norms[0]:8.4f}"
        )
    first = results[0]
    agree = True
    for result in results[1:]:
        ratio = statistics.median(first.ms) / statistics.median(result.ms)
        difference = disagreement(work, first, result)
        agree &= not difference
        print(f"{result.run}: {ratio:.3f} x {first.run}; {'numbers DIFFER: ' + difference if difference else 'agrees'}")
    return agree


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", action="append", help="bare, megascend, fsdp, plain or peft, with options; default: the first two"
    )
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--tiny", action="store_true", help="a model and batch for a CPU, seconds a run")
    parser.add_argument("--moe", action="store_true", help="Qwen3-30B-A3B's shapes, or with --tiny a few experts")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="its shapes, or with --tiny those of its tiny model")
    parser.add_argument("--images", type=int, default=0, help="images of every sequence, of a family with a tower")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter to train in place of the model")
    parser.add_argument("--ranks", type=int, default=1, help="processes of every run, a GPU each")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--ffn", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one optimizer step")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: 4096, tiny: 32")
    parser.add_argument("--warmup", type=int, help="default: 4, tiny: 1")
    parser.add_argument("--steps", type=int, help="timed steps; default: 12, tiny: 4")
    parser.add_argument("--lr", type=float, help="default: 1e-5, tiny: 1e-3")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--model-dir", type=Path, help="keep (or reuse) the random checkpoint here")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--profile", type=Path, help="folder for a kernel table of one more step of every run")
    parser.add_argument("--execute", nargs=2, metavar=("RUN", "RESULT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def work_from(arguments: argparse.Namespace) -> Work:
    """Defaults filled in."""
    shape = dict(TINY if arguments.tiny else QWEN3_30B_A3B if arguments.moe else QWEN3_1_7B)
    if arguments.moe and arguments.tiny:
        shape |= TINY_EXPERTS
    if arguments.family and arguments.tiny:
        from megascend.testing import tiny_config

        shape = tiny_config(arguments.family)
        del shape["model_type"], shape["torch_dtype"]
    elif arguments.family:
        shape = copy.deepcopy(FAMILIES[arguments.family])
        shape.get("text_config", shape).setdefault("vocab_size", CUT_VOCABULARY)
    for option, key in {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
    }.items():
        if (value := getattr(arguments, option)) is not None:
            shape.get("text_config", shape)[key] = value
    tiny = arguments.tiny

    def default(value: Any, usual: Any, if_tiny: Any) -> Any:
        return value if value is not None else (if_tiny if tiny else usual)

    return Work(
        shape=shape,
        platform=arguments.platform,
        precision=arguments.precision or ("bf16" if arguments.platform == "cuda" else "fp32"),
        sequences=arguments.sequences,
        length=default(arguments.length, 4096, 32),
        warmup=default(arguments.warmup, 4, 1),
        steps=default(arguments.steps, 12, 4),
        lr=default(arguments.lr, 1e-5, 1e-3),
        seed=arguments.seed,
        ranks=arguments.ranks,
        family=arguments.family,
        images=arguments.images,
        lora=arguments.lora,
    )


def main() -> int:
    arguments = parse_arguments()
    work = work_from(arguments)
    if arguments.execute:
        run, result_path = arguments.execute
        if run == "checkpoint":
            (write_family_checkpoint if work.family else write_checkpoint)(work, arguments.model_dir)
        else:
            result = execute(work, run, arguments.model_dir, arguments.profile)
            if int(os.environ.get("RANK", "0")) == 0:
                Path(result_path).write_text(json.dumps(asdict(result)))
        return 0
    runs = arguments.run or ["bare", "megascend"]
    for run in runs:
        name = parse_run(run)[0]
        if name == "bare" and (work.ranks > 1 or work.images):
            raise SystemExit("--run bare is for one rank and text")
        if name == "peft" and (work.ranks > 1 or work.images or not work.lora):
            raise SystemExit("--run peft is for one rank, text and --lora")
        if name in ("bare", "plain") and work.lora:
            raise SystemExit(f"--run {name} trains all parameters: leave out --lora")
    if work.images and "vision_config" not in work.shape:
        raise SystemExit(f"--images {work.images} needs a family with a vision tower (--family qwen3_vl)")
    with tempfile.TemporaryDirectory(prefix="bench_train_") as folder:
        model_dir = arguments.model_dir or Path(folder) / "model"
        model_dir.mkdir(parents=True, exist_ok=True)

        def child(run: str) -> Path:
            path = Path(folder) / "result.json"
            path.unlink(missing_ok=True)
            command = [sys.executable]
            if work.ranks > 1 and run != "checkpoint":
                command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.ranks), "--"]
            command += [__file__, *sys.argv[1:], "--execute", run, str(path), "--model-dir", str(model_dir)]
            subprocess.run(command, check=True, env=environment())
            return path

        if not (model_dir / "config.json").is_file():
            child("checkpoint")
        results = []
        for run in runs:
            try:
                results.append(Result(**json.loads(child(run).read_text())))
            except subprocess.CalledProcessError as error:
                print(f"{run}: failed with exit code {error.returncode}", flush=True)
        flops = model_flops(work, model_dir)
    if not results:
        return 1
    agree = report(work, results, flops)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"work": asdict(work), "model_flops": flops, "runs": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0 if agree and len(results) == len(runs) else 1


def environment() -> dict[str, str]:
    """Return the environment of every run. Expandable segments would hide fragmentation, so they are off for all."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
