"""Reward models and critics train as transformers' classifiers with torch's AdamW do, in every layout and with every engine."""

import json
from pathlib import Path

import pytest
import torch

from megascend import Classification, Sample
from megascend.errors import CheckpointError, ConfigError, DataError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from megascend.testing.reference import run_reference
from support import scalar_runs
from support.forked_programs import run_forked
from support.scalar_runs import (
    LAYOUTS,
    MODELS,
    TOKEN,
    TOKENS,
    assert_equal_to_transformers,
    checkpoint_of,
    expected,
    make_backend,
)

pytestmark = pytest.mark.usefixtures("megatron_imported")

IN_CI = {("single", "reward model"), ("TP2 + SP", "critic"), ("PP2", "tied critic")}
IN_CI |= {("CP2", "reward model"), ("engine fsdp, DP2", "critic")}


def on_ranks(folder, function, layout, *arguments):
    """Run a function of scalar_runs.py on the ranks of a layout, and return each rank's result."""
    if layout.engine == "megatron":
        return run_distributed(getattr(scalar_runs, function), layout.world_size, *arguments, init=False)
    torch.save((function, layout.world_size, arguments), folder / "job")
    completed = run_forked(Path(scalar_runs.__file__), folder / "job", folder / "result")
    assert not completed.returncode, completed.stderr[-6000:]
    return torch.load(folder / "result", weights_only=False)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=[] if (layout, kind) in IN_CI else pytest.mark.nightly)
        for layout in LAYOUTS
        for kind in MODELS
    ],
)
def test_training_equals_transformers(parity_folder, tmp_path, layout, kind):
    checkpoint, chosen = checkpoint_of(parity_folder, kind), LAYOUTS[layout]
    ranks = on_ranks(tmp_path, "trained", chosen, checkpoint, chosen, kind)
    assert_equal_to_transformers(ranks, expected(parity_folder, checkpoint, kind), kind)


RESUMED = {name: LAYOUTS[name] for name in ("TP2 + SP", "engine fsdp, DP2")}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "TP2 + SP" else pytest.mark.nightly) for name in RESUMED]
)
def test_a_critic_resumes_exactly(parity_folder, tmp_path, layout):
    """Save after a step and load in another backend: the trajectory is still transformers'."""
    checkpoint, chosen = checkpoint_of(parity_folder, "critic"), LAYOUTS[layout]
    ranks = on_ranks(tmp_path, "trained", chosen, checkpoint, chosen, "critic", tmp_path / "saved")
    assert_equal_to_transformers(ranks, expected(parity_folder, checkpoint, "critic"), "critic")


LOADED = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
with open(sys.argv[1] + "/config.json") as file:
    name = json.load(file)["architectures"][0]
loader = AutoModelForTokenClassification if "Token" in name else AutoModelForSequenceClassification
model, report = loader.from_pretrained(sys.argv[1], output_loading_info=True, dtype=torch.float32)
assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
model.eval()
with torch.no_grad():
    found = [model(torch.tensor([ids])).logits.flatten().tolist() for ids in json.load(sys.stdin)]
print(json.dumps([name, found]))
"""


def loaded_by_transformers(directory):
    """Return the class that transformers loads an export with, and its values of TOKENS; no weight is missing or unused."""
    completed = run_reference(LOADED, directory, stdin=json.dumps(TOKENS))
    assert not completed.returncode, completed.stderr
    return json.loads(completed.stdout)


NEW = [
    ("PP2", "new_sequence_classifier", "Qwen3ForSequenceClassification"),
    ("engine single", "new_token_classifier", "Qwen3ForTokenClassification"),
]


@pytest.mark.parametrize(
    ("layout", "head", "name"),
    [pytest.param(*case, marks=[] if case[0] == "PP2" else pytest.mark.nightly) for case in NEW],
)
def test_a_new_head_is_the_same_everywhere_and_is_exported_for_transformers(
    parity_folder, tmp_path, layout, head, name
):
    checkpoint = case_checkpoint(parity_folder / "lm", "qwen3", tie_word_embeddings=True)
    chosen = LAYOUTS[layout]
    ranks = on_ranks(tmp_path, "with_a_new_head", chosen, checkpoint, chosen, head, tmp_path / "out")
    torch.testing.assert_close(ranks[0][0], 0.02 * torch.randn(1, 64, generator=torch.Generator().manual_seed(5)))
    for weights, norm, _ in ranks:
        torch.testing.assert_close(weights, ranks[0][0], rtol=0, atol=0)
        assert norm == ranks[0][1] > 0
    class_name, references = loaded_by_transformers(tmp_path / "out")
    assert class_name == name
    for values, expected_values in zip(ranks[0][2], references, strict=True):
        assert values[-len(expected_values) :] == pytest.approx(expected_values, abs=1e-5)


def test_unsupported_combinations_with_a_scalar_head_raise(parity_folder):
    lm, critic = case_checkpoint(parity_folder, "qwen3"), checkpoint_of(parity_folder, "critic")
    three_labels = case_checkpoint(parity_folder / "several", "qwen3", **(TOKEN | {"num_labels": 3}))
    plain = LAYOUTS["single"]

    def refused(problem, match, *args, **options):
        with pytest.raises(problem, match=match):
            make_backend(*args, **options)

    def on_rank():
        refused(CheckpointError, "score.weight is the head of a classifier", critic, plain, "lm")
        refused(CheckpointError, "has no score.weight; for a new head", lm, plain)
        refused(CheckpointError, "has a head already", critic, plain, "new_token_classifier")
        refused(CheckpointError, "not the one row", three_labels, plain)
        refused(ConfigError, "head: Input should be 'lm', 'scalar'", lm, plain, "value")
        with make_backend(critic, plain) as backend:
            samples = [Sample.scored(ids, returns=[0.0] * len(ids)) for ids in TOKENS[:2]]
            with pytest.raises(ConfigError, match="loss 'cross_entropy' works on log-probabilities"):
                backend.forward_backward(samples)
            with pytest.raises(ConfigError, match="has a scalar head"):
                backend.forward(samples)
            with pytest.raises(ConfigError, match="has a scalar head"):
                backend.next_token_logits(samples)
            with pytest.raises(ConfigError, match="has a scalar head"):
                backend.forward_backward(samples, "value", logprobs=True)
            with pytest.raises(DataError, match="needs old_values"):
                backend.forward_backward(samples, "clipped_value")
            pair = [Sample.scored(TOKENS[0], pair=1, chosen=True, extra={"margin": [0.5] * len(TOKENS[0])})]
            pair += [Sample.scored(TOKENS[1], pair=1, chosen=False)]
            with pytest.raises(DataError, match="only one of the samples 0 and 1 has extra\\['margin'\\]"):
                backend.forward_backward(pair, "bradley_terry")
            pair = [Sample.scored(TOKENS[0], [1.0] * 19 + [0.0], pair=1, chosen=True)]
            pair += [Sample.scored(TOKENS[1], pair=1, chosen=False)]
            with pytest.raises(DataError, match="weight 0 at its last token"):
                backend.forward_backward(pair, "bradley_terry")
        with make_backend(lm, plain, Classification(labels=("a", "b", "c"))) as backend:
            assert [tuple(values.shape) for values in backend.values(samples)] == [(len(ids), 3) for ids in TOKENS[:2]]
            single, multi = "single_label_classification", "multi_label_classification"
            for loss, label, message in (
                (single, 3, "sample 0 has the label 3, and .* takes an integer from 0 to 2: the model has 3 labels"),
                (single, -1, "sample 0 has the label -1"),
                (single, [0.0, 1.0, 0.0], "takes an integer from 0 to 2"),
                (single, None, "needs label, which sample 0 does not have"),
                (multi, 1, "takes 3 floats, one for each label"),
                (multi, [0.0, 1.0], "takes 3 floats, one for each label"),
            ):
                with pytest.raises(DataError, match=message):
                    backend.forward_backward([Sample.scored(TOKENS[0], label=label)], loss)
            mixed = [Sample.scored(TOKENS[0], label=1), Sample.scored(TOKENS[1], label=[0.0, 1.0, 0.0])]
            with pytest.raises(DataError, match="the samples 0 and 1 have labels of different kinds"):
                backend.forward_backward(mixed, single)
        with make_backend(lm, plain, "lm") as backend:
            with pytest.raises(ConfigError, match="loss 'value' works on values, and this model has no scalar head"):
                backend.forward_backward(samples, "value")
            with pytest.raises(ConfigError, match="no scalar head"):
                backend.values(samples)

    run_distributed(on_rank, 1, init=False)


@pytest.mark.nightly  # covered: training equals transformers, without dropout
def test_token_classifier_dropout_acts_only_in_training(parity_folder):
    """Check with probability 0.5 that the mean of many passes is the value, that passes differ, and that evaluation does not."""
    arch, overrides, _ = MODELS["critic"]
    dropping = case_checkpoint(parity_folder / "dropping", arch, **overrides | {"classifier_dropout": 0.5})

    def on_rank():
        with make_backend(dropping, LAYOUTS["single"]) as backend:
            sample = Sample.scored(TOKENS[1], returns=[0.0] * len(TOKENS[1]))
            still = backend.values([sample])[0]
            passes = [backend.forward_backward([sample], "value", values=True).values[0] for _ in range(300)]
            assert torch.equal(backend.values([sample])[0], still)
        return still, torch.stack(passes)

    ((still, dropped),) = run_distributed(on_rank, 1, init=False)
    spread = dropped.std(0)
    assert spread.min() > 0.1 * still.abs().mean()
    assert ((dropped.mean(0) - still).abs() < 5 * spread / 300**0.5).all()
