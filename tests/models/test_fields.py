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

from megascend.errors import MegascendError
from megascend.models import architecture_named
from megascend.models.registry import BUILT_IN
from megascend.testing import run_distributed
from megascend.testing.reference import run_reference
from support.field_variants import Variant, variants
from support.stacks import stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")

REFERENCE = Path(__file__).with_name("field_references.py")
BOUND = 1e-4
"""Largest difference of a log-probability that counts as the same; fields that act change some by 1e-3 to 5."""


@dataclass(frozen=True)
class Outcome:
    """What became of a variant on engine megatron: one of PASSES (``illegal``: transformers cannot compute it), or a fault."""

    kind: str
    detail: str = ""


def sweep(model_type: str, chosen: Sequence[Variant], folder: Path) -> dict[str, Outcome]:
    """Compute variants of a family, the family's own configuration first, with transformers and on engine megatron."""
    folders = {variant.label: folder / str(number) for number, variant in enumerate(chosen)}
    jobs = [
        {"folder": str(folders[variant.label]), "config": variant.config, "in_training": variant.in_training}
        for variant in chosen
    ]
    modules = [module] if (module := architecture_named(model_type).transformers) else []
    done = run_reference(REFERENCE, stdin=json.dumps(jobs), timeout_s=600, modules=modules)
    assert done.returncode == 0, done.stderr[-2000:]
    references = {label: json.loads((path / "reference.json").read_text()) for label, path in folders.items()}

    def on_rank() -> dict[str, Any]:
        return {label: on_megatron(path, references[label].get("acts_in_training")) for label, path in folders.items()}

    (results,) = run_distributed(on_rank, 1, init=False, timeout_s=900)
    own = references[chosen[0].label]["logprobs"]
    return {variant.label: judge(variant, results[variant.label], references[variant.label], own) for variant in chosen}


def on_megatron(folder: Path, acts_in_training: bool) -> dict[str, Any]:
    from field_references import TOKENS

    from megascend.backends import MegatronBackend
    from megascend.config import Batching
    from megascend.training.batch.sample import Sample

    sample = Sample.causal(TOKENS, prompt_length=1)
    try:
        with MegatronBackend(model=folder, precision="fp32", batching=Batching(), self_check=False) as backend:
            logprobs = backend.forward([sample]).logprobs[0]
            trained = backend.forward_backward([sample]).loss if acts_in_training else None
            return {"logprobs": logprobs.tolist(), "trained": trained}
    except MegascendError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001  what this test is about
        return {"crashed": f"{type(error).__name__}: {error}"}


def judge(variant: Variant, result: dict[str, Any], reference: dict[str, Any], own: list[float]) -> Outcome:
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
    difference = float((expected - values).abs().max())
    if not difference <= BOUND:
        return Outcome("differs", f"by {difference:.2g}; its effect is {effect(expected, own):.2g}")
    if reference["acts_in_training"] and abs(result["trained"] + float(values.mean())) < 1e-6:
        return Outcome("without effect in training", "")
    return Outcome("followed" if effect(expected, own) > BOUND or reference["acts_in_training"] else "without effect")


def effect(values: torch.Tensor, own: list[float]) -> float:
    return float((values - torch.tensor(own)).abs().max())


IN_CI = (
    *("clip_qkv=", "swiglu_limit=0.5", "router_jitter_noise", "norm_topk_prob=false", "routed_scaling_factor=2.5"),
    *("experts_per_tok=1", "moe_k=1", "n_group=3", "v_head_dim=32", "rope_type=yarn, mscale_all_dim"),
    *("rope_parameters.partial_rotary_factor", "mrope_section, mrope_interleaved"),
)
"""Fields that the stack has in its code or reads otherwise than transformers, as a sweep of all showed; CI tries these."""
SAMPLED = 29
"""CI also tries one of so many variants, by a digest of its name."""
FAMILIES = [name for name, architecture in BUILT_IN.items() if architecture.proven or architecture.proven_with_images]
PASSES = {"followed", "without effect", "refused", "illegal"}


def in_ci(model_type: str, variant: Variant) -> bool:
    hashed = zlib.crc32(f"{model_type}: {variant.label}".encode())
    return any(part in variant.label for part in IN_CI) or hashed % SAMPLED == 0


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=stack_marks(name)) for name in FAMILIES])
@pytest.mark.parametrize("part", ["in CI", pytest.param("others", marks=pytest.mark.nightly)])
def test_fields_are_followed_or_refused(part: str, model_type: str, tmp_path: Path, record_property: Any) -> None:
    own, *others = variants(model_type)
    chosen = [variant for variant in others if in_ci(model_type, variant) == (part == "in CI")]
    outcomes = sweep(model_type, [own, *chosen], tmp_path)
    counts = Counter(outcome.kind for outcome in outcomes.values())
    record_property("outcomes", dict(counts))
    print(f"{model_type}: {len(outcomes)} configurations: {dict(counts)}")
    assert outcomes.pop(own.label) == Outcome("without effect")
    faults = [
        f"{label}: {outcome.kind} {outcome.detail}" for label, outcome in outcomes.items() if outcome.kind not in PASSES
    ]
    assert not faults, "\n".join(faults)
