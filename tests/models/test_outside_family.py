"""A family that a package from outside declares (tests/outside/heron) trains, adapts and exports as the built-in ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megascend.config import Parallel
from megascend.models import architecture_of
from megascend.models.registry import from_reference, to_reference
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support.lora_parity import adapter_differences, case_adapter, peft_reference, train_adapter
from support.model_checks import assert_within

OUTSIDE = Path(__file__).parents[1] / "outside"
STEPS = 3
pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.fixture(scope="module", autouse=True)
def heron() -> Iterator[None]:
    sys.path.insert(0, str(OUTSIDE))
    import heron  # noqa: F401

    yield
    sys.path.remove(str(OUTSIDE))


@pytest.fixture(scope="module")
def checkpoint(parity_folder: Path) -> Path:
    return case_checkpoint(parity_folder, "heron")


@pytest.mark.nightly_cases("single")  # covered: TP2 + SP
@pytest.mark.parametrize(
    "case", [Case("single"), Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True))], ids=lambda case: case.name
)
def test_training_equals_hugging_face(case: Case, checkpoint: Path, parity_folder: Path) -> None:
    tokens = token_lists()
    difference = differences(
        train_case(case, checkpoint, tokens, steps=STEPS), hf_reference(parity_folder, checkpoint, tokens, steps=STEPS)
    )
    assert_within(difference, loss=2e-5, grad_norm=case.norm_bound, logits=case.logits_bound)


def test_adapter_equals_peft(checkpoint: Path, parity_folder: Path, tmp_path: Path) -> None:
    case = Case("single", arch="heron")
    adapter = case_adapter(checkpoint, case)
    run = train_adapter(case, checkpoint, adapter, tmp_path / "trained", steps=STEPS)
    difference = adapter_differences(
        run, peft_reference(parity_folder, checkpoint, adapter, token_lists(), steps=STEPS)
    )
    assert_within(difference, loss=case.loss_bound, grad_norm=case.norm_bound)


def test_self_check_agrees_and_export_is_the_source(checkpoint: Path, tmp_path: Path) -> None:
    def on_rank() -> str:
        with case_backend(Case("heron", arch="heron"), checkpoint, self_check=True) as backend:
            backend.export_hf(tmp_path / "export")
            return backend.self_check.status

    assert run_distributed(on_rank, 1, init=False, timeout_s=240) == ["agrees"]
    source, exported = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "export"))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


def test_its_refusal_is_named_and_it_travels_to_other_processes() -> None:
    heron = architecture_of({"model_type": "heron"})
    assert "reach: 0" in heron.unsupported({"model_type": "heron", "reach": 0})[0]
    assert from_reference(to_reference(heron)) == heron
