"""Optimizers on every engine and layout: parameter groups and Muon, held against plain computations in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optimizer_ranks
import pytest
import torch
from safetensors.torch import load_file

from megascend import Parallel
from megascend.testing import parity
from megascend.testing.parity import MAX_GRAD_NORM, PROMPT, case_checkpoint, token_lists
from support.forked_programs import run_forked

pytestmark = pytest.mark.usefixtures("megatron_imported")
LR, DECAY, STEPS = 1e-2, 0.1, 4
FOLDER = Path(__file__).parent
GROUPS = [
    {"match": "model.embed_tokens.*", "lr_scale": 0.1, "weight_decay": 0.0},
    {"match": "*.layers.0.*", "lr_scale": 0.5, "weight_decay": 0.4},
    {"match": "*.mlp.*", "weight_decay": 0.0},
    {"match": "*norm.weight", "lr_scale": 3.0},
]
ADAM = {"lr": LR, "weight_decay": DECAY, "max_grad_norm": MAX_GRAD_NORM}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "groups": {"groups": GROUPS},
    "muon": {"kind": "muon"},
    "muon, original, with groups": {
        "kind": "muon",
        "groups": GROUPS,
        "muon": {"update_scale": "original", "nesterov": False, "momentum": 0.9},
    },
}


@dataclass(frozen=True)
class Layout:
    """An engine on some ranks."""

    engine: str = "megatron"
    world_size: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    arch: str = "qwen3"
    optimizer: dict[str, Any] = field(default_factory=dict)


PLAIN = {"distributed": False}
LAYOUTS = {
    "one process": Layout(),
    "TP2": Layout(world_size=2, parallel=Parallel(tensor=2)),
    "TP2, sequence parallel": Layout(world_size=2, parallel=Parallel(tensor=2, sequence=True)),
    "PP2": Layout(world_size=2, parallel=Parallel(pipeline=2)),
    "PP2 x VPP2": Layout(world_size=2, parallel=Parallel(pipeline=2, virtual_pipeline=2)),
    "DP2": Layout(world_size=2),
    "DP2, plain optimizer": Layout(world_size=2, optimizer=PLAIN),
    "TP2 x DP2": Layout(world_size=4, parallel=Parallel(tensor=2)),
    "EP2": Layout(world_size=2, parallel=Parallel(expert=2), arch="qwen3_moe"),
    "TP2 of experts": Layout(world_size=2, parallel=Parallel(tensor=2), arch="qwen3_moe"),
    "single": Layout("single"),
    "single, experts": Layout("single", arch="qwen3_moe"),
    "FSDP2": Layout("fsdp", 2),
    "FSDP2 of experts": Layout("fsdp", 2, arch="qwen3_moe"),
    "FSDP2 x EP2": Layout("fsdp", 4, Parallel(expert=2), "qwen3_moe"),
}


def train(folder: Path, tmp_path: Path, layout: Layout, optimizer: dict[str, Any], steps: int = STEPS, **options: Any):
    """Run the layout, Megatron's ranks as forks of this process, others of one without Megatron."""
    checkpoint = str(case_checkpoint(folder, layout.arch))
    options |= {} if layout.engine == "single" else {"parallel": layout.parallel}
    arguments = (checkpoint, layout.engine, layout.world_size, ADAM | optimizer | layout.optimizer, steps)
    if layout.engine == "megatron":
        return optimizer_ranks.train(*arguments, **options)
    torch.save([("train", arguments, options)], tmp_path / "job")
    completed = run_forked(FOLDER / "optimizer_ranks.py", tmp_path / "job", tmp_path / "result", timeout_s=300)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(tmp_path / "result", weights_only=False)[0]


def plain(folder: Path, arch: str, optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    muon = None
    if optimizer.get("kind") == "muon":
        settings = optimizer.get("muon", {})
        muon = {
            "momentum": settings.get("momentum", 0.95),
            "nesterov": settings.get("nesterov", True),
            "scale": settings.get("update_scale", "match_rms_adamw"),
        }
    job = {
        "checkpoint": str(case_checkpoint(folder, arch)),
        "hf_reference": str(Path(parity.__file__).with_name("hf_reference.py")),
        "samples": [{"token_ids": ids, "prompt_length": PROMPT} for ids in token_lists()],
        "steps": STEPS,
        **ADAM,
        "groups": optimizer.get("groups", []),
        "muon": muon,
    }
    return load_file(parity.reference(folder, FOLDER / "plain_optimizers.py", job))


def distances(results: dict[str, Any], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of each weight's difference, relative to the weight's."""
    weights = {name.removeprefix("weights."): value for name, value in expected.items() if name.startswith("weights.")}
    assert results["weights"].keys() == weights.keys()
    return {
        name: float((results["weights"][name].double() - weight.double()).norm() / weight.double().norm())
        for name, weight in weights.items()
    }


# The other pairs are nightly.
IN_CI = {
    "groups": ("PP2",),
    "muon": ("TP2, sequence parallel", "DP2", "DP2, plain optimizer", "FSDP2"),
    "muon, original, with groups": ("PP2",),
}


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        pytest.param(layout, optimizer, marks=[] if layout in IN_CI[optimizer] else [pytest.mark.nightly])
        for layout in LAYOUTS
        for optimizer in OPTIMIZERS
    ],
)
def test_training_matches_the_plain_computation(parity_folder, tmp_path, layout, optimizer):
    case, settings = LAYOUTS[layout], OPTIMIZERS[optimizer]
    assert_matches_plain(train(parity_folder, tmp_path, case, settings), plain(parity_folder, case.arch, settings))


def assert_matches_plain(results: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert "error" not in results, results["error"]
    relative = distances(results, expected)
    name = max(relative, key=lambda weight: relative[weight])
    losses = max(abs(a - b) for a, b in zip(results["losses"], expected["losses"].tolist(), strict=True))
    print(f"losses within {losses:.1e}, weights within {relative[name]:.1e} ({name})")
    assert results["losses"] == pytest.approx(expected["losses"].tolist(), abs=2e-5)
    assert results["norms"] == pytest.approx(expected["grad_norms"].tolist(), rel=1e-4)
    assert relative[name] < 1e-3, name


def test_muon_in_bf16_is_close_to_the_plain_computation(parity_folder, tmp_path):
    case, settings = LAYOUTS["DP2"], OPTIMIZERS["muon"]
    results = train(parity_folder, tmp_path, case, settings, precision="bf16")
    expected = plain(parity_folder, case.arch, settings)
    relative = max(distances(results, expected).values())
    losses = max(abs(a - b) for a, b in zip(results["losses"], expected["losses"].tolist(), strict=True))
    print(f"bf16: losses within {losses:.1e}, weights within {relative:.1e}")
    assert losses < 0.05
    assert relative < 0.02  # exported in bf16, whose rounding is 2e-3


@pytest.mark.parametrize("layout", ["TP2", "EP2", "single"])
@pytest.mark.nightly_cases("TP2", "single")  # covered: EP2; TP2 to FSDP2
def test_muon_resumes_bit_for_bit(parity_folder, tmp_path, layout):
    case, settings = LAYOUTS[layout], OPTIMIZERS["muon, original, with groups"]
    checkpoint = str(tmp_path / "step-2")
    uninterrupted = train(parity_folder, tmp_path, case, settings, save=(2, checkpoint))
    assert_matches_plain(uninterrupted, plain(parity_folder, case.arch, settings))
    rest = train(parity_folder, tmp_path, case, settings, steps=STEPS - 2, load=checkpoint)
    assert rest["losses"] == uninterrupted["losses"][2:]
    assert rest["norms"] == uninterrupted["norms"][2:]
    assert all(torch.equal(rest["weights"][name], value) for name, value in uninterrupted["weights"].items())


@pytest.mark.parametrize(("saved", "loaded"), [("DP2", "PP2"), ("TP2", "FSDP2")])
@pytest.mark.nightly_cases("DP2-PP2")  # covered: TP2-FSDP2
def test_muon_resumes_in_another_layout_or_engine(parity_folder, tmp_path, saved, loaded):
    settings, checkpoint = OPTIMIZERS["muon"], str(tmp_path / "step-2")
    train(parity_folder, tmp_path, LAYOUTS[saved], settings, steps=3, save=(2, checkpoint))
    rest = train(parity_folder, tmp_path, LAYOUTS[loaded], settings, steps=STEPS - 2, load=checkpoint)
    expected = plain(parity_folder, LAYOUTS[loaded].arch, settings)
    assert rest["losses"] == pytest.approx(expected["losses"].tolist()[2:], abs=2e-5)
    assert max(distances(rest, expected).values()) < 1e-4


def test_checkpoints_of_another_optimizer_are_refused(parity_folder, tmp_path):
    case, checkpoint = LAYOUTS["one process"], str(tmp_path / "step-1")
    train(parity_folder, tmp_path, case, {}, steps=2, save=(1, checkpoint))
    refused = train(parity_folder, tmp_path, case, {"kind": "muon"}, steps=1, load=checkpoint)["error"]
    assert "has the state of optimizer.kind: adamw, this run is of kind muon: set optimizer.kind: adamw" in refused


@pytest.mark.parametrize("layout", ["PP2", "EP2"])
def test_patterns_without_a_weight_raise_config_error(parity_folder, tmp_path, layout):
    groups = [{"match": "*.mlp.*", "lr_scale": 2.0}, {"match": "transformer.wte.*", "lr_scale": 0.1}]
    error = train(parity_folder, tmp_path, LAYOUTS[layout], {"groups": groups})["error"]
    assert error.startswith(
        "ConfigError: optimizer.groups.1.match: 'transformer.wte.*': no trained weight has such a name"
    )
    groups = [
        {"match": "*.mlp.*", "lr_scale": 2.0},
        {"match": "*.mlp.down_proj.*" if layout != "EP2" else "*.mlp.gate.*"},
    ]
    error = train(parity_folder, tmp_path, LAYOUTS[layout], {"groups": groups})["error"]
    assert "optimizer.groups.1.match" in error
    assert "earlier groups match all of its weights" in error


def test_a_pattern_for_a_part_of_a_parameter_raises_config_error(parity_folder, tmp_path):
    groups = {"groups": [{"match": "*.2.self_attn.q_proj.weight", "lr_scale": 2.0}]}
    error = train(parity_folder, tmp_path, LAYOUTS["PP2"], groups)["error"]
    assert "optimizer.groups: engine megatron has model.layers.2.self_attn." in error
    assert "error" not in train(parity_folder, tmp_path, LAYOUTS["single"], groups, steps=1)


EIGHT_BITS: dict[str, Any] = {"moments": "8bit"}


@pytest.mark.parametrize(
    "layout",
    [layout if layout in ("DP2", "FSDP2") else pytest.param(layout, marks=pytest.mark.nightly) for layout in LAYOUTS],
)
def test_8bit_moments_are_close_to_adamw_and_resume_bit_for_bit(parity_folder, tmp_path, layout):
    case, checkpoint = LAYOUTS[layout], str(tmp_path / "step-2")
    results = train(parity_folder, tmp_path, case, EIGHT_BITS, save=(2, checkpoint))
    expected = plain(parity_folder, case.arch, EIGHT_BITS)
    relative = max(distances(results, expected).values())
    losses = max(abs(a - b) for a, b in zip(results["losses"], expected["losses"].tolist(), strict=True))
    print(f"{layout}, 8-bit moments: losses within {losses:.1e}, weights within {relative:.1e}")
    # The first step begins from moments that are 0 in every format.
    assert results["losses"][:2] == pytest.approx(expected["losses"].tolist()[:2], abs=2e-5)
    assert 1e-6 < losses < 0.02
    assert relative < 0.05
    rest = train(parity_folder, tmp_path, case, EIGHT_BITS, steps=STEPS - 2, load=checkpoint)
    assert rest["losses"] == results["losses"][2:]
    assert rest["norms"] == results["norms"][2:]
    assert all(torch.equal(rest["weights"][name], weight) for name, weight in results["weights"].items())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("saved", "loaded", "optimizers"),
    [
        ("TP2", "DP2", (EIGHT_BITS, EIGHT_BITS)),
        ("DP2", "FSDP2", (EIGHT_BITS, EIGHT_BITS)),
        ("one process", "one process", ({}, EIGHT_BITS)),
        ("FSDP2", "single", (EIGHT_BITS, {})),
    ],
    ids=["layout", "engine", "from fp32", "engine, to fp32"],
)
def test_8bit_moments_continue_elsewhere(parity_folder, tmp_path, saved, loaded, optimizers):
    checkpoint = str(tmp_path / "step-2")
    train(parity_folder, tmp_path, LAYOUTS[saved], optimizers[0], steps=3, save=(2, checkpoint))
    rest = train(parity_folder, tmp_path, LAYOUTS[loaded], optimizers[1], steps=STEPS - 2, load=checkpoint)
    expected = plain(parity_folder, LAYOUTS[loaded].arch, {})
    assert rest["losses"] == pytest.approx(expected["losses"].tolist()[2:], abs=0.02)
    assert max(distances(rest, expected).values()) < 0.05
