"""Benchmark the same training work in a bare Megatron-Core loop, in ``MegatronBackend``, and in other loops.

    python scripts/bench.py train                                # Qwen3-1.7B shapes, 8 x 4096 tokens a step, one GPU
    python scripts/bench.py train --tiny --platform cpu          # the same program on a CPU, in a minute
    python scripts/bench.py train --run bare --run bare:fusions=rope+swiglu --run megascend:micro_batch_tokens=16384
    python scripts/bench.py train --model 30b-a3b --layers 8 --ranks 2 --run plain --run fsdp --run megascend:expert=2
    python scripts/bench.py train --model 30b-a3b --lora 16 --length 16384 --sequences 4 --run megascend:recompute=full --run peft
    python scripts/bench.py train --model tests/models/published/gpt-oss-20b.json --layers 4 --shape vocab_size=32768
    python scripts/bench.py train --model 8b --lora 8 --targets q_proj,v_proj --length 2048 --documents 5 --run megascend

Every ``--run`` is one fresh process on the same device, one after the other: same weights (a random checkpoint in
Hugging Face format, written to a temporary directory), same data, same optimizer settings. Warm-up steps come first,
then every step is timed with the device idle before and after it. The table is printed last; the exit code is 1 if
losses or gradient norms of the runs disagree (``TOLERANCE``), so a figure is never reported for different work.

A run is one of these, with options after colons:
    bare        micro_batch=2  fusions=rope+swiglu+wgrad  recompute=layernorm+mlp
    megascend   micro_batch_tokens=8192  recompute=layernorm+mlp  packing=false  experts=upstream  graphs=true  offload=true
                tensor=2  pipeline=2  virtual_pipeline=2  context=2  expert=2  expert_tensor=1
    fsdp        micro_batch_tokens=8192  recompute=full  packing=false  expert=2  compile=true  reshard=false
    plain       micro_batch=2  recompute=full
    peft        micro_batch=1  recompute=full

With ``--lora`` the model is frozen, and an adapter of that rank on all linear layers and experts is trained; the options
``base=nf4`` and ``base=fp8`` of ``megascend`` quantise the model. ``peft`` is transformers' model with peft's adapter and torch's
fused AdamW, on one rank. Each library draws the adapter's first values in its own way, so the bounds are those of bf16.

With ``--documents`` every sequence is a pack of that many samples of random lengths (``megascend`` and ``fsdp`` only), and
attention counts in MFU within each sample.

The bare loop uses megatron-core, mcore-bridge and Transformer Engine only: padded [batch, sequence] micro batches,
Transformer Engine's fused cross entropy, Megatron DDP with fp32 gradients, Megatron's optimizer (fp32 main parameters,
TE FusedAdam) and Megatron's schedule. ``fusions`` enables further fusions of Megatron-Core. On a CPU there is
no Transformer Engine, so there (and only there) the bare loop calls ``megascend.bootstrap()`` to get one.
``fsdp`` is ``FsdpBackend``; its recomputation is ``full`` or ``selective``. ``plain`` is a loop over transformers' model in
torch's ``fully_shard``, layer by layer, as one writes it: padded micro batches, whole logits, torch's cross entropy and
fused AdamW.

With ``--ranks`` above 1 every run is that many processes, each with a part of the sequences (not ``bare``); memory is
rank 0's. The time of a step is a constant part (embedding, output layer) plus a part for every layer, so that two numbers of
``--layers`` give the time of a model that does not fit. MFU counts ``ModelInfo.flops_per_token``, without recomputation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.lines import PEAK_BF16
from bench.models import add_model, random_tokens, shape_of, write_checkpoint
from bench.runner import command, environment, peak_gib, timed, versions

if TYPE_CHECKING:
    import torch

COMMON = ("platform", "tiny", "warmup", "steps", "seed")
DEFAULTS = {"model": "1.7b", "length": 4096, "warmup": 4, "steps": 12, "lr": 1e-5}
TINY = {"model": "tiny", "length": 32, "warmup": 1, "steps": 4, "lr": 1e-3}
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Options that are sizes of ``Parallel``."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TOLERANCE = {
    "bf16": {"first_loss": 2e-3, "last_loss": 1e-2, "first_norm": 3e-2},
    "fp32": {"first_loss": 1e-5, "last_loss": 1e-4, "first_norm": 1e-3},
}
"""Largest relative difference between two runs. The last loss has all optimizer steps between it and the first."""


@dataclass(frozen=True)
class Work:
    """Workload that every run performs.

    Attributes:
        lora: the rank of the adapter that is trained; 0: all parameters are.
        targets: layers of the adapter; empty: all linear layers and experts.
        documents: samples of which each sequence consists.
    """

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
    lora: int = 0
    targets: tuple[str, ...] = ()
    documents: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.length

    def document_lengths(self) -> list[list[int]]:
        """Return the lengths of the samples of each sequence of a step; they add up to ``length``."""
        drawn, lengths = random.Random(self.seed), []
        for _ in range(self.sequences):
            cuts = [0, *sorted(drawn.sample(range(1, self.length), self.documents - 1)), self.length]
            lengths.append([end - start for start, end in itertools.pairwise(cuts)])
        return lengths


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
        from transformers import AutoModelForCausalLM

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
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **placement)
        if options.get("recompute"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in getattr(model.model, "language_model", model.model).layers:
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
            loss = whole_logits_loss(self.model, part.to(self.device, non_blocking=True))
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        torch.distributed.all_reduce(loss)
        return loss.item() / self.work.ranks, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def whole_logits_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' mean loss of ``tokens`` [sequences, length + 1], over logits of all of them."""
    import torch

    logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


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
                target_modules=list(work.targets or LINEAR),
                **(experts if "num_experts" in work.shape and not work.targets else {}),
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
            loss = whole_logits_loss(self.model, part.to(self.device, non_blocking=True))
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
        extra = self.settings(options)
        budget = int(options.get("micro_batch_tokens", (1 if work.lora else 2) * work.length))
        if work.lora:
            extra["adapters"] = megascend.Adapters(
                max_count=1, max_rank=work.lora, base_weights=cast("Any", options.get("base", "unquantised"))
            )
        kind: Any = megascend.MegatronBackend if self.engine == "megatron" else megascend.FsdpBackend
        self.backend = kind(
            model=str(model_dir),
            parallel=megascend.Parallel(**{name: int(options[name]) for name in SIZES if name in options}),
            precision=work.precision,
            optimizer=megascend.Adam(
                lr=work.lr, weight_decay=0.01, max_grad_norm=1.0, offload=options.get("offload") == "true"
            ),
            batching=megascend.Batching(
                micro_batch_tokens=budget,
                packing=options.get("packing") != "false",
                cuda_graphs=megascend.CudaGraphs(max_tokens=budget) if options.get("graphs") == "true" else None,
            ),
            seed=work.seed,
            **extra,
        )
        self.adapter = "adapter" if work.lora else None
        if self.adapter is not None:
            lora = megascend.Lora(rank=work.lora, alpha=2 * work.lora, targets=work.targets or "all-linear")
            self.backend.add_adapter(self.adapter, lora)
        self.document_lengths = work.document_lengths()

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
        import megascend

        documents = [
            row[start : start + length + 1]
            for row, lengths in zip(batch, self.document_lengths, strict=True)
            for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)
        ]
        samples = self.backend.shard([megascend.Sample.causal(document) for document in documents])
        result = self.backend.forward_backward(samples, adapter=self.adapter)
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


def execute(work: Work, run: str, model_dir: Path, profile: Path | None) -> Result:
    """Do one run in this process, on two batches by turns, so that the loss falls and a wrong update shows."""
    import torch

    name, options = parse_run(run)
    kinds = {"bare": BareSteps, "megascend": MegascendSteps, "fsdp": FsdpSteps, "plain": PlainSteps, "peft": PeftSteps}
    steps = kinds[name](work, model_dir, options)
    on_gpu = work.platform == "cuda"
    vocabulary = work.shape.get("text_config", work.shape)["vocab_size"] - 1  # without Gemma 4's padding token
    tokens = random_tokens(2 * work.sequences, work.length + 1, vocabulary, work.seed)
    batches = tokens.view(2, work.sequences, -1)
    result = Result(run=run, device=torch.cuda.get_device_name() if on_gpu else "CPU", versions=versions())
    for index in range(work.warmup + work.steps):
        elapsed, (loss, norm) = timed(lambda index=index: steps.step(batches[index % 2]), work.platform)
        result.losses.append(loss)
        result.norms.append(norm)
        if index >= work.warmup:
            result.ms.append(elapsed)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{run} step {index}: loss {loss:.5f} norm {norm:.4f} {elapsed:.1f} ms", flush=True)
    result.peak_gib = peak_gib(work.platform)
    if profile is not None:
        suffix = f"-{os.environ['RANK']}" if work.ranks > 1 else ""
        write_profile(steps, batches[0], profile / f"profile-{re.sub('[^a-z0-9]+', '-', run)}{suffix}.txt", on_gpu)
    return result


def write_profile(steps: Steps, batch: torch.Tensor, path: Path, on_gpu: bool) -> None:
    """Profile one more step with torch's profiler: kernels by device time, on a CPU operators by the host's."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        steps.step(batch)
    sort = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(trace.key_averages().table(sort_by=sort, row_limit=60, max_name_column_width=100))


def parse_run(text: str) -> tuple[str, dict[str, str]]:
    """Parse ``bare:micro_batch=4:fusions=rope`` into name and options."""
    name, *pairs = text.split(":")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    allowed = {
        "bare": {"micro_batch", "fusions", "recompute"},
        "megascend": {"micro_batch_tokens", "recompute", "packing", "experts", "graphs", "base", "offload", *SIZES},
        "fsdp": {"micro_batch_tokens", "recompute", "packing", "expert", "compile", "reshard"},
        "plain": {"micro_batch", "recompute"},
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


def report(work: Work, results: list[Result], flops: float) -> bool:
    """Print the table; return whether all runs agree numerically."""
    peak = next((flops for name, flops in PEAK_BF16.items() if name in results[0].device), None)
    print()
    print(f"{results[0].device}; {', '.join(f'{k} {v}' for k, v in results[0].versions.items())}")
    print(
        f"{work.ranks} ranks, {work.sequences} x {work.length} tokens a step, {work.precision}, "
        f"{work.warmup} warm-up and {work.steps} timed steps, {work.shape}"
    )
    width = max(len(result.run) for result in results)
    header = f"{'run':<{width}} {'tokens/s':>9} {'ms median':>10} {'min':>8} {'max':>8} {'GiB':>6} {'MFU':>6}"
    print(f"{header} {'loss first':>11} {'last':>9} {'norm':>8}")
    for result in results:
        median = statistics.median(result.ms)
        mfu = f"{flops / (median / 1000) / peak / work.ranks:6.1%}" if peak else "     -"
        print(
            f"{result.run:<{width}} {work.tokens / median * 1000:9.0f} {median:10.1f} {min(result.ms):8.1f}"
            f" {max(result.ms):8.1f} {result.peak_gib:6.1f} {mfu}"
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


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--run", action="append", help="one of the above, with options; default: bare, megascend")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter to train in place of the model")
    parser.add_argument(
        "--targets", default="", metavar="NAMES", help="its layers, with commas between them; default: all"
    )
    parser.add_argument("--documents", type=int, default=1, help="samples that a sequence packs")
    parser.add_argument("--ranks", type=int, default=1, help="processes of every run, a GPU each")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one optimizer step")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: 4096, tiny: 32")
    parser.add_argument("--lr", type=float, help="default: 1e-5, tiny: 1e-3")
    parser.add_argument("--model-dir", type=Path, help="keep (or reuse) the random checkpoint here")
    parser.add_argument("--profile", type=Path, help="folder for a kernel table of one more step of every run")
    parser.add_argument("--execute", nargs=2, metavar=("RUN", "RESULT"), help=argparse.SUPPRESS)


def work_of(options: argparse.Namespace) -> Work:
    return Work(
        shape=shape_of(options),
        platform=options.platform,
        precision=options.precision or ("bf16" if options.platform == "cuda" else "fp32"),
        sequences=options.sequences,
        length=options.length,
        warmup=options.warmup,
        steps=options.steps,
        lr=options.lr,
        seed=options.seed,
        ranks=options.ranks,
        lora=options.lora,
        targets=tuple(filter(None, options.targets.split(","))),
        documents=options.documents,
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    work = work_of(options)
    if options.execute:
        name, result_path = options.execute
        if name == "checkpoint":
            write_checkpoint(work.shape, options.model_dir, precision=work.precision, seed=work.seed)
        else:
            result = execute(work, name, options.model_dir, options.profile)
            if int(os.environ.get("RANK", "0")) == 0:
                Path(result_path).write_text(json.dumps(asdict(result)))
        return {}, True
    runs = options.run or ["bare", "megascend"]
    check_runs(work, runs)
    with tempfile.TemporaryDirectory(prefix="bench_train_") as folder:
        model_dir, path = options.model_dir or Path(folder) / "model", Path(folder) / "result.json"
        model_dir.mkdir(parents=True, exist_ok=True)

        def child(name: str) -> None:
            arguments = [*options.arguments, "--execute", name, str(path), "--model-dir", str(model_dir)]
            ranks = 1 if name == "checkpoint" else work.ranks
            subprocess.run(command("train", arguments, ranks), check=True, env=environment())

        if not (model_dir / "config.json").is_file():
            child("checkpoint")
        results = []
        for name in runs:
            try:
                child(name)
                results.append(Result(**json.loads(path.read_text())))
            except subprocess.CalledProcessError as error:
                print(f"{name}: failed with exit code {error.returncode}", flush=True)
        from megascend.models.checkpoint_files.info import inspect_checkpoint

        info, lengths = inspect_checkpoint(model_dir), itertools.chain(*work.document_lengths())
        flops = sum(length * info.flops_per_token(length, frozen=work.lora > 0) for length in lengths)
    agree = bool(results) and report(work, results, flops)
    figures = {"work": asdict(work), "model_flops": flops, "runs": [asdict(result) for result in results]}
    return figures, agree and len(results) == len(runs)


def check_runs(work: Work, runs: list[str]) -> None:
    """Refuse runs that cannot do the work."""
    for run in runs:
        name = parse_run(run)[0]
        if name in ("bare", "peft", "plain") and work.documents > 1:
            raise SystemExit(f"--run {name} packs no samples: leave out --documents")
        if name in ("bare", "peft") and work.ranks > 1:
            raise SystemExit(f"--run {name} is for one rank")
        if (name == "peft") != bool(work.lora) and name in ("peft", "bare", "plain"):
            raise SystemExit(
                f"--run {name} trains {'an adapter: set' if name == 'peft' else 'all parameters: leave out'} --lora"
            )
