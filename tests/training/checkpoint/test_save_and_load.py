"""A resumed run continues exactly; under another layout it continues from the same numbers."""

import json

import pytest

from megascend import Adam, Batching, CheckpointError, ConfigError, Parallel, Schedule
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")
SCHEDULE = Schedule(kind="cosine", warmup_steps=2, total_steps=8)
LAYOUTS = {
    "single": (1, Parallel(), "qwen3"),
    "TP2": (2, Parallel(tensor=2), "qwen3"),
    "PP2": (2, Parallel(pipeline=2), "qwen3"),
    "PP2 x VPP2": (2, Parallel(pipeline=2, virtual_pipeline=2), "qwen3"),
    "DP2": (2, Parallel(), "qwen3"),
    "EP2": (2, Parallel(expert=2), "qwen3_moe"),
}


def run(
    checkpoint, layout, precision="fp32", distributed=True, save_to=None, load_from=None, steps=range(6), save_after=2
):
    world_size, parallel, _ = LAYOUTS[layout]

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(
            model=checkpoint,
            parallel=parallel,
            precision=precision,
            optimizer=Adam(lr=1e-2, distributed=distributed),
            schedule=SCHEDULE,
            batching=Batching(micro_batch_tokens=64),
            timeout_s=150,
        )
        if load_from is not None:
            backend.load(load_from)
        if save_to is not None and save_after is None:
            backend.save(save_to)
        samples, figures = backend.shard(causal_samples(token_lists())), []
        for step in steps:
            result = backend.forward_backward(samples)
            outcome = backend.optimizer_step()
            figures.append((result.loss, outcome.grad_norm, outcome.lr))
            if save_to is not None and step == save_after:
                backend.save(save_to)
        backend.close()
        return figures

    return run_distributed(on_rank, world_size, init=False, timeout_s=400)[0]


@pytest.mark.core_cases("PP2 x VPP2-True")
@pytest.mark.nightly_cases(
    "single-True",  # covered: reliability/test_resume.py: single
    "PP2-True",  # covered: PP2 x VPP2
    "EP2-False",  # covered: EP2-True, DP2-False
)
@pytest.mark.parametrize(
    ("layout", "distributed"), [*((layout, True) for layout in LAYOUTS), ("DP2", False), ("EP2", False)]
)
def test_same_layout_resumes_bit_for_bit(parity_folder, tmp_path, layout, distributed):
    checkpoint = case_checkpoint(parity_folder, LAYOUTS[layout][2])
    uninterrupted = run(checkpoint, layout, distributed=distributed, save_to=tmp_path / "step-3")
    rest = run(checkpoint, layout, distributed=distributed, load_from=tmp_path / "step-3", steps=range(3))
    assert rest == uninterrupted[3:]


def test_checkpoint_before_the_first_step_resumes_bit_for_bit(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    uninterrupted = run(checkpoint, "DP2", save_to=tmp_path / "step-0", save_after=None)
    assert run(checkpoint, "DP2", load_from=tmp_path / "step-0") == uninterrupted


def test_attention_dropout_draws_on_after_a_resume(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3", attention_dropout=0.2)
    uninterrupted = run(checkpoint, "single", save_to=tmp_path / "step-3")
    assert run(checkpoint, "single", load_from=tmp_path / "step-3", steps=range(3)) == uninterrupted[3:]


@pytest.mark.nightly_cases("bf16")  # covered: fp16; upstream's reader in bf16
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_main_parameters_are_saved(parity_folder, tmp_path, precision):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    uninterrupted = run(checkpoint, "DP2", precision, save_to=tmp_path / "step-3")
    assert run(checkpoint, "DP2", precision, load_from=tmp_path / "step-3", steps=range(3)) == uninterrupted[3:]


def test_unsuitable_directories_raise_checkpoint_error(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    old = tmp_path / "old"
    old.mkdir()
    (old / "megascend.json").write_text(json.dumps({"format": 1, "model": {"layers": 2}}))
    run(case_checkpoint(parity_folder, "qwen3_moe"), "single", save_to=tmp_path / "moe", steps=range(1), save_after=0)

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(model=checkpoint, precision="fp32", timeout_s=150)
        with pytest.raises(CheckpointError, match="is not a megascend checkpoint"):
            backend.save(other)
        with pytest.raises(CheckpointError, match=r"megascend\.json is missing"):
            backend.load(other)
        with pytest.raises(CheckpointError, match="has format 1; this version of megascend reads 2"):
            backend.load(old)
        with pytest.raises(CheckpointError, match="does not fit this model"):
            backend.load(tmp_path / "moe")
        backend.forward_backward(backend.shard(causal_samples(token_lists())))
        with pytest.raises(ConfigError, match="call optimizer_step"):
            backend.save(tmp_path / "new")

    run_distributed(on_rank, 2, init=False, timeout_s=400)
    assert (other / "thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "new").exists()
