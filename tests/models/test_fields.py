"""Every field of every family's configuration, one at a time with another value: followed as transformers does, or refused by name."""

from __future__ import annotations

import json
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
from support.covering import FIRST_STACK, stack_marks
from support.field_variants import Variant, variants

pytestmark = pytest.mark.usefixtures("megatron_imported")

REFERENCE = Path(__file__).with_name("field_references.py")
BOUND = 1e-4
"""Largest difference of a log-probability that counts as the same; fields that act change some by 1e-3 to 5."""


@dataclass(frozen=True)
class Outcome:
    """What became of a variant on engine megatron: ``followed``, ``without effect``, ``refused``, ``illegal``, or a fault."""

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
    return {
        variant.label: judge(variant, results[variant.label], references[variant.label], own) for variant in chosen
    }


def on_megatron(folder: Path, acts_in_training: bool) -> dict[str, Any]:
    from field_references import TOKENS

    from megascend.backends import MegatronBackend
    from megascend.batch.sample import Sample
    from megascend.config import Batching

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
        name = variant.field.rpartition(".")[2].partition("=")[0]
        named = name in result["refused"] or variant.field.partition(".")[0] in result["refused"]
        kind = "illegal" if "problem" in reference else "refused" if named else "refused without its name"
        return Outcome(kind, result["refused"])
    if "problem" in reference:
        return Outcome("computed", f"transformers: {reference['problem']}")
    expected, values = torch.tensor(reference["logprobs"]), torch.tensor(result["logprobs"])
    difference = float((expected - values).abs().max())
    if not difference <= BOUND:
        return Outcome("differs", f"by {difference:.2g}; its effect is {effect(expected, own):.2g}")
    if reference["acts_in_training"] and abs(result["trained"] + float(values.mean())) < 1e-6:
        return Outcome("without effect in training", "")
    return Outcome("followed" if effect(expected, own) > BOUND or reference["acts_in_training"] else "without effect")


def effect(values: torch.Tensor, own: list[float]) -> float:
    return float((values - torch.tensor(own)).abs().max())
