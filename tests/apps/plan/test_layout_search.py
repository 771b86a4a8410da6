"""Search of layouts: all legal ones, what fits, the fastest first; plans of published models."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascend.apps.cli.plan_text import draw
from megascend.apps.plan.hardware import load
from megascend.apps.plan.search import (
    MEMORY_SHARE,
    RECOMPUTE,
    Candidate,
    PlannedModel,
    PlanRequest,
    difference,
    joined_experts,
    layouts,
    search,
    stage_parameters,
    step_work,
)
from megascend.apps.plan.step import step_time
from megascend.apps.train import layout_plan
from megascend.config import Lora, Parallel, RunConfig, TrainerConfig, parsed
from megascend.errors import ConfigError, TopologyError
from megascend.models.checkpoint_files.files import TensorHeader, read_config
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint
from megascend.models.memory.estimate import estimate
from megascend.models.memory.parameters import elements, stages
from megascend.models.memory.sizes import Workload
from megascend.runtime.topology.topology import Topology, plan

PUBLISHED = Path(__file__).parents[2] / "models" / "published"
TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

MEMORY = 836 * 2**20
"""Bytes of a device on which layouts of the model above recompute nothing, some modules, or everything."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("models") / "tiny", TINY)


def model_of(checkpoint: Path) -> PlannedModel:
    return PlannedModel.from_checkpoint(inspect_checkpoint(checkpoint), read_config(checkpoint))


def config(checkpoint: Path, lora: int | None = None) -> TrainerConfig:
    return TrainerConfig(model=checkpoint, output=Path("run"), lora=None if lora is None else Lora(rank=lora))


def test_every_legal_layout_is_yielded(tiny: Path) -> None:
    model = model_of(tiny)
    request = PlanRequest(8, 4096, 64, config(tiny))
    yielded = {parallel: topology for topology, parallel in layouts(model, request, load("h100"))}
    # By trying every combination of sizes, and asking the code that refuses them at run time.
    sizes = (1, 2, 4, 8)
    legal = set()
    for tensor, pipeline, chunks, context, expert, expert_tensor in product(sizes, sizes, sizes, (1, 2), sizes, sizes):
        settings = Parallel(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=chunks,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence=True if tensor > 1 else None,
        )
        if expert_tensor not in (1, tensor):
            continue  # other divisions of experts are legal, and never faster
        try:
            legal.add(plan(settings, 8, model.info.shape))
        except TopologyError:
            continue
    assert set(yielded.values()) == legal
    assert len(legal) > 40


def test_fastest_variants_are_those_of_a_search_without_shortcuts(tiny: Path) -> None:
    model, device = model_of(tiny), replace(load("h100"), memory=MEMORY)
    request = PlanRequest(4, 4096, 16, config(tiny))
    result = search(model, request, device, best=1000)
    times = [candidate.time.seconds for candidate in result.candidates]
    assert times == sorted(times)
    fastest: dict[Topology, float] = {}
    for topology, parallel in layouts(model, request, device):
        _, trained = stage_parameters(model, topology, request.config)
        samples = -(-request.global_batch // topology.data)
        for micro_batch, recompute in product((1, 2, 4, 8, 16), RECOMPUTE):
            if micro_batch > samples or micro_batch * 4096 // topology.context > 65536:
                continue
            count = -(-samples // micro_batch)
            if topology.virtual_pipeline > 1:
                count = -(-count // topology.pipeline) * topology.pipeline
            settings = request.config.model_copy(update={"parallel": parallel, "recompute": recompute})
            workload = Workload(micro_batch * 4096, count, packed=False, longest=4096)
            memory_estimate = estimate(settings, model.info, model.hf_config, topology, workload, "fused")
            assert memory_estimate is not None
            if memory_estimate.total <= MEMORY_SHARE * device.memory:
                work = step_work(model, settings, topology, trained, micro_batch * 4096, 4096, count)
                seconds = step_time(model.sizes, topology, trained, work, device).seconds
                fastest[topology] = min(seconds, fastest.get(topology, math.inf))
    assert {candidate.topology: candidate.time.seconds for candidate in result.candidates} == pytest.approx(fastest)
    recomputing = {candidate.config.recompute.granularity for candidate in result.candidates}
    assert recomputing == {"none", "selective", "full"}


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("models") / "five", TINY | {"num_hidden_layers": 5})


def uneven_candidates(checkpoint: Path) -> list[Candidate]:
    run = layout_plan.settings(checkpoint, 4096, 16, None, ["optimizer.lr=1e-4"])
    candidates = search(model_of(checkpoint), PlanRequest(4, 4096, 16, run), load("h100"), best=200).candidates
    return [candidate for candidate in candidates if candidate.topology.is_uneven]


def test_layers_that_do_not_divide_are_planned_with_a_layout_that_runs(five_layers: Path) -> None:
    candidates = uneven_candidates(five_layers)
    shape = model_of(five_layers).info.shape
    assert {(c.topology.pipeline, c.topology.virtual_pipeline) for c in candidates} == {(2, 1), (2, 2), (4, 1)}
    for candidate in candidates:
        sizes = candidate.topology.chunk_layers
        assert sum(sizes) == 5
        run = parsed(RunConfig, yaml.safe_load(layout_plan.run_file(candidate)), "run file")
        assert plan(run.parallel, 4, shape) == candidate.topology
        assert str(run.parallel.pipeline_layout) in candidate.describe()
        lines = list(draw(candidate))
        stages = [line for line in lines if line.startswith("stage")]
        layers = [sum(map(int, line.split()[2].split("+"))) for line in stages]
        assert layers == [sum(sizes[stage :: len(stages)]) for stage in range(len(stages))]


@pytest.mark.nightly
@pytest.mark.usefixtures("megatron_imported")
def test_engine_accepts_planned_uneven_layouts(five_layers: Path) -> None:
    candidates = uneven_candidates(five_layers)
    accepted, refused, unchecked = layout_plan.checked(
        candidates, five_layers, model_of(five_layers).info, len(candidates)
    )
    assert (refused, unchecked) == ([], None)
    assert accepted == candidates


def test_differences_add_up_to_what_the_next_layout_loses(tiny: Path) -> None:
    first, second, *_ = search(model_of(tiny), PlanRequest(8, 4096, 64, config(tiny)), load("h100")).candidates
    changes = difference(first, second)
    assert sum(seconds for _, seconds in changes) == pytest.approx(second.time.seconds - first.time.seconds)
    assert abs(changes[0][1]) == max(abs(seconds) for _, seconds in changes)


def test_nothing_that_fits_is_reported_with_the_smallest_need(tiny: Path) -> None:
    device = replace(load("h100"), memory=2**20)
    result = search(model_of(tiny), PlanRequest(8, 4096, 64, config(tiny)), device)
    assert result.candidates == []
    assert result.smallest is not None
    assert result.smallest[1].total > 2**20


def test_samples_longer_than_the_context_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="length: 8192 is above the model's context of 4096 tokens"):
        search(model_of(tiny), PlanRequest(8, 8192, 64, config(tiny)), load("h100"))


def test_layouts_give_every_replica_a_sample(tiny: Path) -> None:
    topologies = [
        topology for topology, _ in layouts(model_of(tiny), PlanRequest(8, 4096, 2, config(tiny)), load("h100"))
    ]
    assert topologies
    assert max(topology.data for topology in topologies) == 2


def test_joined_experts_count_like_separate_ones() -> None:
    separate = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": TensorHeader("BF16", shape)
        for layer in range(4)
        for expert in range(8)
        for name, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items()
    }
    joined = joined_experts(separate)
    assert len(joined) == 12
    assert elements(joined) == elements(separate)
    topology = plan(Parallel(expert=4), 8)
    assert stages(joined, topology, 4, tied=False) == stages(separate, topology, 4, tied=False)
    # An expert's matrix, of gate and up, is not divided over expert parallel ranks.
    assert stages(joined, topology, 4, tied=False)[0].layer_matrix == 2 * 32 * 64


# --- published models ---

CLUSTERS = {
    # name: (devices, device, samples a step, rank of an adapter, most evaluations)
    "deepseek-v3": (1024, "h100", 8192, None, 10000),
    "qwen3-235b-a22b": (256, "h100", 2048, None, 7000),
    "kimi-k2-instruct": (64, "h100", 256, 16, 3000),
    "qwen3.5-35b-a3b": (8, "ascend-910b", 128, 16, 1200),
}
"""Evaluations are counted, since time depends on the machine: one takes about 1 ms on one core (docs/planning.md)."""


@pytest.mark.nightly
@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize("name", CLUSTERS)
def test_plans_of_published_models_are_accepted_by_the_engine(name: str) -> None:
    cards, device, batch, lora, budget = CLUSTERS[name]
    hardware = load(device)
    adapter = [] if lora is None else [f"lora.rank={lora}"]
    run = layout_plan.settings(Path(name), 4096, batch, None, adapter)
    with layout_plan.model_checkpoint(PUBLISHED / f"{name}.json") as checkpoint:
        result = layout_plan.plan_layouts(checkpoint, run, cards, 4096, hardware, best=5)
        assert (len(result.layouts), result.refused, result.unchecked) == (5, [], None)
        assert result.plan.evaluations < budget
        # The run file that a user starts has what the engine accepted, on the groups of all ranks.
        configs = [
            parsed(RunConfig, yaml.safe_load(layout_plan.run_file(layout)), "run file") for layout in result.layouts
        ]
        read = [replace(layout, config=config) for layout, config in zip(result.layouts, configs, strict=True)]
        assert [layout.config for layout in read] == [layout.config for layout in result.layouts]
        assert layout_plan.checked(read[:1], checkpoint, result.info, 1) == (read[:1], [], None)
    for layout in result.layouts:
        assert plan(layout.config.parallel, cards, result.info.shape) == layout.topology
        assert layout.memory.total <= MEMORY_SHARE * hardware.memory
        assert layout.micro_batch * layout.micro_batches * layout.topology.data >= batch
        flops = result.info.flops_per_token(4096, frozen=lora is not None) * layout.tokens_per_second
        assert 0.02 < flops / hardware.peak < 0.6
