"""Every field of every family's configuration, one at a time with another value: followed, or refused by name."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from field_steps import outcomes as engine_outcomes

from megascend.models import architecture_named
from megascend.models.registry import BUILT_IN
from megascend.testing import run_distributed
from megascend.testing.reference import run_reference
from support.field_variants import Variant, variants
from support.forked_programs import run_forked
from support.stacks import stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")

REFERENCE, STEPS = (Path(__file__).with_name(name) for name in ("field_references.py", "field_steps.py"))
BOUND = 1e-4
"""Largest difference of a log-probability that counts as the same; fields that act change some by 1e-3 to 5."""


@dataclass(frozen=True)
class Outcome:
    """What became of a variant on an engine: one of PASSES (``illegal``: transformers cannot compute it), or a fault."""

    kind: str
    detail: str = ""


def sweep(engine: str, model_type: str, chosen: Sequence[Variant], folder: Path) -> dict[str, Outcome]:
    """Compute variants of a family, the family's own configuration first, with transformers and on an engine."""
    folders = {variant.label: folder / str(number) for number, variant in enumerate(chosen)}
    jobs = [
        {"folder": str(folders[variant.label]), "config": variant.config, "in_training": variant.in_training}
        for variant in chosen
    ]
    modules = [module] if (module := architecture_named(model_type).transformers) else []
    done = run_reference(REFERENCE, stdin=json.dumps(jobs), timeout_s=600, modules=modules)
    assert done.returncode == 0, done.stderr[-2000:]
    references = {label: json.loads((path / "reference.json").read_text()) for label, path in folders.items()}
    paths = [str(path) for path in folders.values()]
    if engine == "megatron":
        (results,) = run_distributed(engine_outcomes, 1, engine, paths, init=False, timeout_s=900)
    else:  # in a process without Megatron
        done = run_forked(STEPS, engine, folder / "results.json", stdin=json.dumps(paths), timeout_s=900)
        assert done.returncode == 0, done.stderr[-2000:]
        results = json.loads((folder / "results.json").read_text())
    own = references[chosen[0].label]["logprobs"]
    return {
        variant.label: judge(engine, variant, results[str(folders[variant.label])], references[variant.label], own)
        for variant in chosen
    }


def judge(
    engine: str, variant: Variant, result: dict[str, Any], reference: dict[str, Any], own: list[float]
) -> Outcome:
    if "crashed" in result and engine == "fsdp" and "problem" in reference:
        return Outcome("illegal", f"transformers: {reference['problem']}")  # its model is the engine's
    if "crashed" in result:
        return Outcome("crashed", f"{result['crashed']} (transformers: {reference.get('problem', 'computes it')})")
    if "refused" in result:
        # transformers reads some layers of Mistral as another family's, which mcore-bridge does not have.
        named = any(word in result["refused"] for word in [*re.findall(r"\w+", variant.field), "model_type"])
        kind = "illegal" if "problem" in reference else "refused" if named else "refused without its name"
        return Outcome(kind, result["refused"])
    if "problem" in reference:
        return Outcome("illegal", f"transformers: {reference['problem']}")
    expected, values = torch.tensor(reference["logprobs"]), torch.tensor(result["logprobs"])
    if len(expected) != len(values):
        return Outcome("differs", f"{len(values)} values for {len(expected)}")
    difference = float((expected - values).abs().max())
    if not difference <= BOUND and (engine, variant.field) in INTENDED:
        return Outcome("followed", INTENDED[engine, variant.field])
    if not difference <= BOUND:
        return Outcome("differs", f"by {difference:.2g}; its effect is {effect(expected, own):.2g}")
    if reference["acts_in_training"] and abs(result["trained"] + float(values.mean())) < 1e-6:
        return Outcome("without effect in training", "")
    return Outcome("followed" if effect(expected, own) > BOUND or reference["acts_in_training"] else "without effect")


def effect(values: torch.Tensor, own: list[float]) -> float:
    return float((values - torch.tensor(own)).abs().max()) if len(values) == len(own) else torch.inf


IN_CI = (
    *("clip_qkv=", "swiglu_limit=0.5", "router_jitter_noise", "norm_topk_prob=false", "routed_scaling_factor=2.5"),
    *("experts_per_tok=1", "moe_k=1", "n_group=3", "v_head_dim=32", "rope_type=yarn, mscale_all_dim"),
    *("rope_parameters.partial_rotary_factor", "mrope_section, mrope_interleaved"),
)
"""Fields that the stack has in its code or reads otherwise than transformers, as a sweep of all showed; CI tries these."""
SAMPLED = {"megatron": 97, "fsdp": 97}
"""CI also tries one of so many variants, by a digest of its name."""
FAMILIES = {
    "megatron": [name for name, declared in BUILT_IN.items() if declared.proven or declared.proven_with_images],
    "fsdp": [*BUILT_IN],
}
FAMILIES_IN_CI = {
    "megatron": (
        *(
            "llama",
            "olmoe",
            "mixtral",
            "deepseek_v3",
            "glm4_moe",
            "minimax_m2",
            "ernie4_5_moe",
            "gpt_oss",
            "nemotron_h",
        ),
        *("qwen3_next", "qwen3_vl_moe", "deepseek_v32"),
    ),
    "fsdp": ("olmo3", "gpt_oss", "deepseek_v3", "qwen3_5"),
}
"""Families that CI tries: each of the fields above in one that has it, and each kind of layers. Others read them with the same
code, and engine fsdp computes with transformers' models."""
INTENDED = {
    # transformers takes time_step_min for the smallest step (huggingface/transformers#48989).
    ("fsdp", "time_step_limit"): "as the model's authors",
}
"""Fields that are followed otherwise than by transformers, with the reason."""
PASSES = {"followed", "without effect", "refused", "illegal"}


def in_ci(engine: str, model_type: str, variant: Variant) -> bool:
    if model_type not in FAMILIES_IN_CI[engine]:
        return False
    hashed = zlib.crc32(f"{model_type}: {variant.label}".encode())
    return (engine == "megatron" and any(part in variant.label for part in IN_CI)) or hashed % SAMPLED[engine] == 0


def parts() -> list[Any]:
    """Return the parameters of the test: of each engine and family what CI tries and, nightly, the rest."""
    return [
        pytest.param(
            engine,
            name,
            part,
            id=f"{engine}-{name}-{part}",
            marks=[
                *(stack_marks(name) if engine == "megatron" else []),
                *([pytest.mark.nightly] if part == "others" else []),
            ],
        )
        for part in ("in CI", "others")
        for engine in FAMILIES
        for name in FAMILIES[engine]
        if part == "others" or name in FAMILIES_IN_CI[engine]
    ]


@pytest.mark.parametrize(("engine", "model_type", "part"), parts())
def test_fields_are_followed_or_refused(
    engine: str, model_type: str, part: str, tmp_path: Path, record_property: Any
) -> None:
    own, *others = variants(model_type)
    chosen = [variant for variant in others if in_ci(engine, model_type, variant) == (part == "in CI")]
    outcomes = sweep(engine, model_type, [own, *chosen], tmp_path)
    assert outcomes.pop(own.label) == Outcome("without effect")
    counts = Counter(by_field(chosen, outcomes).values())
    record_property("fields", dict(counts))
    print(f"{engine}, {model_type}: {len(chosen)} values of {counts.total()} fields: {dict(counts)}")
    faults = [
        f"{label}: {outcome.kind} {outcome.detail}" for label, outcome in outcomes.items() if outcome.kind not in PASSES
    ]
    assert not faults, "\n".join(faults)


def by_field(chosen: Sequence[Variant], outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Return the outcome of each field: that of its values that says most, a fault before all others."""
    kinds: dict[str, set[str]] = {}
    for variant in chosen:
        kinds.setdefault(variant.field, set()).add(outcomes[variant.label].kind)
    order = ("followed", "refused", "without effect", "illegal")
    ranks = {kind: rank for rank, kind in enumerate(order, start=1)}
    return {field: min(of_field, key=lambda kind: ranks.get(kind, 0)) for field, of_field in kinds.items()}
