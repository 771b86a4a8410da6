"""Slices of the Hugging Face weights that a rank's tensors consist of, for every family: checkpoints move between engines, and
weights go to engines in slices, by this map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megascend.config import Parallel
from megascend.errors import CheckpointError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint
from megascend.training.checkpoint.hf_slices import held_weights
from support.parity_matrix import family_matrix
from support.stacks import family_params
from weightwire.slices import index_of

pytestmark = pytest.mark.usefixtures("megatron_imported")

LAYOUTS = ("single", "TP2 + SP", "PP2", "TP2 x EP2 + SP")
IMAGES = [
    Case(f"{arch}: {name}", 2, parallel, arch=arch)
    for arch in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe")
    for name, parallel in (("TP2", Parallel(tensor=2)), ("EP2", Parallel(expert=2)))
    if arch.endswith("moe") or name == "TP2"
]
# gpt_oss stores [experts, in, out], gate and up in turns: no slice of the parameters is one of the weights.
CASES = [case for case in family_matrix() if case.name.split(": ")[1] in LAYOUTS and case.arch != "gpt_oss"]
IN_CI = ("qwen3_vl_moe: EP2", "deepseek_v3: TP2 x EP2 + SP")


@pytest.mark.parametrize("case", family_params([*CASES, *IMAGES], IN_CI))
def test_slices_equal_the_weights_of_the_checkpoint(case: Case, parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch)

    def on_rank() -> tuple[list[str], dict[str, torch.Tensor], list[str]]:
        weights, problems = load_file(checkpoint / "model.safetensors"), []
        covered = {name: torch.zeros(weight.shape, dtype=torch.bool) for name, weight in weights.items()}
        with case_backend(case, checkpoint) as backend:
            for name, offsets, values in held_weights(backend.engine.weights(), backend.engine.hf_slices()):
                index = index_of(offsets, values.shape)
                covered[name][index] = True
                if not torch.equal(weights[name][index].float(), values.float()):
                    problems.append(f"{name} at {offsets}")
            return problems, covered, sorted(backend.engine.info.extra)

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=120)
    assert [problem for problems, _, _ in ranks for problem in problems] == []
    covered = {name: torch.stack([parts[name] for _, parts, _ in ranks]).any(0) for name in ranks[0][1]}
    # What exports copy from the checkpoint, such as towers that are not built, is in no parameter.
    copied = ranks[0][2]
    assert sorted(name for name, elements in covered.items() if not elements.all()) == copied
    assert [name for name in copied if covered[name].any()] == []


@pytest.mark.nightly
def test_weights_that_are_computed_from_parameters_are_refused_by_name(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "gpt_oss")

    def on_rank() -> str:
        with case_backend(Case("single"), checkpoint) as backend, pytest.raises(CheckpointError) as caught:
            backend.engine.hf_slices()
        return str(caught.value)

    message = run_distributed(on_rank, 1, init=False, timeout_s=120)[0]
    assert "gate_up_proj of shape [4, 64, 256] does not consist of complete rows" in message
