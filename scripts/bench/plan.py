"""Compare predictions of ``megascend plan`` with measurements of this package and with figures that others have published.

    python scripts/bench.py plan [--parts] [--only measured|published] [--match TEXT]
    python scripts/bench.py plan --store           # what docs/planning.md shows

``benchmarks/planning/measured.json`` has steps of benchmarks/performance, ``published.json`` tables of other programs with their
sources. Nothing is fitted to a row: what other programs do otherwise than this engine is :data:`PROGRAMS`, by source.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megascend.apps.plan.hardware import load
from megascend.apps.plan.layers import Execution
from megascend.apps.plan.search import PlannedModel, stage_parameters, step_work
from megascend.apps.plan.step import StepTime, StepWork, step_time
from megascend.config import Lora, Parallel, Recompute, TrainerConfig
from megascend.config.training import Adam
from megascend.models.base import LatentAttention, LinearAttention
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory.estimate import estimate
from megascend.models.memory.sizes import ModelSizes, Workload
from megascend.runtime.topology.model_shape import ModelShape
from megascend.runtime.topology.topology import Topology, plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "planning"
STORED = FOLDER / "predictions.json"
MEGATRON = Execution(whole_logits=True, tensor_overlap=True, host_kernels=0.6, fused_expert_gradients=True)
"""NVIDIA's programs on Megatron-Core: collectives of tensor parallelism in pieces beside products (their recipes'
``tp_comm_overlap``), whole logits, Transformer Engine's experts, parts of layers in CUDA graphs."""
PROGRAMS = {"NVIDIA": MEGATRON, "Ascend": Execution(whole_logits=True, fused_expert_gradients=True)}


@dataclass(frozen=True)
class Shape:
    """A model by its sizes, as the files spell them."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    ffn: int = 0
    head_dim: int = 0
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    gated: bool = True
    qk_norm: bool = False
    tied: bool = False
    expert_bias: bool = False
    clamped: bool = False
    window: int | None = None
    latent: tuple[int, ...] | None = None
    linear: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def linear_attention(self) -> LinearAttention | None:
        """Three layers of linear attention before each one of softmax attention."""
        if self.linear is None:
            return None
        return LinearAttention(tuple((layer + 1) % 4 > 0 for layer in range(self.layers)), *self.linear)

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes(
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.width,
            query=self.heads * self.width,
            key_value=self.key_heads * self.width,
            ffn=self.ffn,
            expert_ffn=self.expert_ffn,
            shared_ffn=self.shared_ffn,
            experts=self.experts,
            topk=self.topk,
            vocabulary=self.vocabulary,
            tied=self.tied,
            qk_norm=self.qk_norm,
            gated=self.gated,
            clamped=self.clamped,
            latent=LatentAttention(*self.latent) if self.latent else None,
            with_experts=tuple(self.experts > 0 and layer >= self.dense_layers for layer in range(self.layers)),
            linear=self.linear_attention,
            output_gate=self.linear is not None,
        )

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Every other layer has the window."""
        if self.window is None:
            return ()
        return tuple(self.window if layer % 2 == 0 else None for layer in range(self.layers))

    def tensors(self) -> dict[str, TensorHeader]:
        """Return headers of the model's matrices, named as in a checkpoint of a plain decoder."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}{name}.weight": shape for name, shape in self._layer(layer).items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return {name: TensorHeader("BF16", shape) for name, shape in shapes.items()}

    def _layer(self, layer: int) -> dict[str, tuple[int, ...]]:
        h, query = self.hidden, self.heads * self.width
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        linear = self.linear_attention
        if linear is not None and linear.layers[layer]:
            mixed = 2 * linear.key_width + linear.value_width
            shapes |= {
                "linear_attn.in_proj_qkvz": (mixed + linear.value_width, h),
                "linear_attn.in_proj_ba": (2 * linear.value_heads, h),
                "linear_attn.out_proj": (h, linear.value_width),
            }
        elif self.latent:
            latent = LatentAttention(*self.latent)
            assert latent.query_latent is not None
            shapes |= {
                "self_attn.q_a_proj": (latent.query_latent, h),
                "self_attn.q_b_proj": (self.heads * latent.query_head_dim, latent.query_latent),
                "self_attn.kv_a_proj_with_mqa": (latent.key_value_latent + latent.rotated, h),
                "self_attn.kv_b_proj": (
                    self.heads * (latent.unrotated + latent.value_head_dim),
                    latent.key_value_latent,
                ),
                "self_attn.o_proj": (h, self.heads * latent.value_head_dim),
            }
        else:
            keys, gate = self.key_heads * self.width, 2 if self.linear else 1
            shapes |= {
                "self_attn.q_proj": (gate * query, h),
                "self_attn.k_proj": (keys, h),
                "self_attn.v_proj": (keys, h),
                "self_attn.o_proj": (h, query),
            }
        if self.experts and layer >= self.dense_layers:
            width = self.expert_ffn
            shapes |= {
                "mlp.gate": (self.experts, h),
                "mlp.experts.gate_proj": (self.experts, width, h),
                "mlp.experts.up_proj": (self.experts, width, h),
                "mlp.experts.down_proj": (self.experts, h, width),
            }
            prefix, ffn = "mlp.shared_expert.", self.shared_ffn
        else:
            prefix, ffn = "mlp.", self.ffn
        if ffn:
            shapes |= {f"{prefix}gate_proj": (ffn, h)} if self.gated else {}
            shapes |= {f"{prefix}up_proj": (ffn, h), f"{prefix}down_proj": (h, ffn)}
        return shapes

    @cached_property
    def model(self) -> PlannedModel:
        """Return the model as the planner takes it."""
        tensors = self.tensors()
        shape = ModelShape(
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_query_groups=self.key_heads,
            vocab_size=self.vocabulary,
            ffn_hidden_size=self.ffn or None,
            num_experts=self.experts or None,
            moe_ffn_hidden_size=self.expert_ffn or None,
            shared_expert_ffn_hidden_size=self.shared_ffn or None,
            tied=self.tied,
            expert_bias=self.expert_bias,
        )
        count = sum(math.prod(header.shape) for header in tensors.values())
        info = ModelInfo(shape, tensors, count, 0, self.heads * self.width, linear=self.linear_attention)
        return PlannedModel(info, {}, self.sizes, self.windows)


@dataclass(frozen=True)
class Row:
    """A figure and its prediction, in seconds of a step; memory in GiB."""

    source: str
    name: str
    seconds: float
    time: StepTime
    tokens: float
    gib: float | None = None
    predicted_gib: float | None = None
    note: str = ""

    @property
    def error(self) -> float:
        return self.time.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.gib is None or self.predicted_gib is None:
            return None
        return self.predicted_gib / self.gib - 1


def shapes(content: dict[str, Any]) -> dict[str, Shape]:
    """Read the models of a file."""
    result = {}
    for name, model in content["models"].items():
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in model.items()
        }
        result[name] = Shape(**values)
    return result


def measured() -> list[Row]:
    """Predict the steps that were measured here."""
    content = json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))
    models, rows = shapes(content), []
    for row in content["rows"]:
        shape, cards = models[row["model"]], row.get("cards", 1)
        model = shape.model
        parallel = Parallel(expert=row.get("expert", 1))
        topology = plan(parallel, cards, model.info.shape)
        config = TrainerConfig(
            model=Path("model"),
            output=Path("run"),
            parallel=parallel,
            lora=Lora(rank=row["lora"], targets=row.get("targets", "all-linear")) if "lora" in row else None,
            recompute=Recompute(granularity=row.get("recompute", "none"), modules=row.get("modules", ("core_attn",))),
        )
        tokens, count = row["micro_batch_tokens"], row["micro_batches"]
        groups, trained = stage_parameters(model, topology, config)
        work = step_work(model, config, topology, trained, tokens, row["length"], count)
        work = replace(work, execution=replace(work.execution, captured=row.get("graphs", False)))
        predicted = step_time(model.sizes, topology, trained, work, load(row["device"]), model.windows)
        workload = Workload(tokens, count, packed=False, longest=row["length"])
        memory = estimate(config, model.info, {}, topology, workload, "fused", sizes=model.sizes, groups=groups)
        assert memory is not None
        name = f"{row['model']}, {cards} x {row['device'].upper()}"
        name += f", EP{parallel.expert}" if parallel.expert > 1 else ""
        name += f", LoRA {row['lora']}" if "lora" in row else ""
        name += f", {row['recompute']} recompute" if "recompute" in row else ""
        name += f", {count} x {tokens} tokens" + (", CUDA graphs" if "graphs" in row else "")
        rows.append(
            Row(
                row["source"],
                name,
                row["ms"] / 1000,
                predicted,
                tokens * count,
                row.get("gib"),
                memory.tensors / 2**30,
                row.get("note", ""),
            )
        )
    return rows


def published() -> list[Row]:
    """Predict the rows of other programs' tables."""
    content = json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))
    models = shapes(content)
    return [_published(row, models[row["model"]]) for row in content["rows"]]


def _published(row: dict[str, Any], shape: Shape) -> Row:
    model, cards = shape.model, row["cards"]
    topology = _topology(row, shape)
    config = TrainerConfig(
        model=Path("model"),
        output=Path("run"),
        lora=Lora(rank=row["lora"], targets=("q_proj", "k_proj", "v_proj")) if "lora" in row else None,
        optimizer=Adam(overlap_grad_reduce=True, overlap_param_gather=True),
        recompute=Recompute(granularity="selective", modules=tuple(row["recompute"]))
        if "recompute" in row
        else Recompute(),
    )
    sizes = replace(model.sizes, prediction_head=row.get("prediction_head", False))
    _, trained = stage_parameters(replace(model, sizes=sizes), topology, config)
    count = row["global_batch"] // (row["micro_batch"] * topology.data)
    tokens = row["micro_batch"] * row["length"]
    work: StepWork = step_work(model, config, topology, trained, tokens, row["length"], count)
    program = PROGRAMS[row["source"].split("/")[0].split("-")[0]]
    execution = replace(
        program,
        fp8=row["precision"] == "fp8",
        expert_overlap=0.8 if row.get("expert_overlap") else 0.0,
        grouped=not shape.expert_bias,
        node_copies=row.get("node_copies"),
    )
    work = replace(work, execution=execution)
    predicted = step_time(sizes, topology, trained, work, load(row["device"]), model.windows)
    step_tokens = row["global_batch"] * row["length"]
    parts = {"TP": topology.tensor, "CP": topology.context, "PP": topology.pipeline, "VPP": topology.virtual_pipeline}
    parts |= {"EP": topology.expert, "DP": topology.data}
    layout = " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "one"
    name = f"{row['model']}, {cards} x {row['device'].upper()}, {row['precision']}, {layout}, batch {row['global_batch']} x "
    name += f"{row['length']}" + (", LoRA" if "lora" in row else "")
    seconds = step_tokens / cards / row["tokens_per_s"]
    return Row(row["source"], name, seconds, predicted, step_tokens / cards, note=row.get("note", ""))


def _topology(row: dict[str, Any], shape: Shape) -> Topology:
    """Return the layout of a published row, whose last chunk may have a prediction head alone, which is refused here."""
    parallel = Parallel(
        tensor=row["tensor"],
        pipeline=row["pipeline"],
        virtual_pipeline=row["virtual_pipeline"],
        pipeline_layout=row.get("pipeline_layout"),
        context=row["context"],
        expert=row["expert"],
        expert_tensor=1 if row["expert"] > 1 else None,
        sequence=True if row["tensor"] > 1 else None,
    )
    return plan(parallel, row["cards"], shape.model.info.shape)


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Return the medians of the absolute errors."""
    rows = list(rows)
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    result = {"rows": len(rows), "median": statistics.median(abs(row.error) for row in rows)}
    return result | ({"memory_rows": len(memory), "memory": statistics.median(memory)} if memory else {})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", action="store_true", help="print the time by part")
    parser.add_argument("--only", choices=("measured", "published"))
    parser.add_argument("--match", default="", help="rows whose name has this text")
    parser.add_argument("--store", action="store_true", help=f"write rows and medians to {STORED.name}")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    content: dict[str, Any] = {}
    for kind, function in (("measured", measured), ("published", published)):
        if options.only not in (None, kind):
            continue
        rows = [row for row in function() if options.match in row.name]
        print(f"{kind}: step in s, predicted, error{'; GiB, predicted, error' if kind == 'measured' else ''}")
        for row in rows:
            memory = (
                "" if row.memory_error is None else f" {row.gib:6.1f} {row.predicted_gib:6.1f} {row.memory_error:+6.1%}"
            )
            print(f"{row.seconds:9.4f} {row.time.seconds:9.4f} {row.error:+7.1%}{memory}  {row.name}")
            if options.parts:
                parts = sorted(row.time.parts.items(), key=lambda part: -part[1])
                print("    " + ", ".join(f"{name} {seconds / row.time.seconds:.1%}" for name, seconds in parts))
        if rows:
            print(json.dumps(summary(rows)))
        content[kind] = stored(rows)
    if options.store:
        STORED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content, True


def stored(rows: list[Row]) -> dict[str, Any]:
    """Return what is stored of rows: documentation shows it, and a test compares it with the code."""
    return {
        "summary": summary(rows) if rows else {},
        "rows": [
            {
                "name": row.name,
                "source": row.source,
                "seconds": round(row.seconds, 4),
                "predicted": round(row.time.seconds, 4),
                "gib": row.gib,
                "predicted_gib": None if row.gib is None else round(row.predicted_gib or 0.0, 1),
                "note": row.note,
            }
            for row in rows
        ],
    }
