"""Held-out samples, and the length of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.findings import Findings
from megascend.apps.data.labels import LabelSet
from megascend.apps.data.samples import SampleLimits
from megascend.apps.data.store import Samples, hold_out, write_store
from megascend.apps.train.measurement import Measurement
from megascend.apps.train.run_samples import RunSamples, ambiguous_texts, padding_remark
from megascend.config import Lora, RunConfig, Schedule
from megascend.config.training import learning_rate
from megascend.errors import ConfigError, DataError
from megascend.runtime.distributed import objects
from megascend.training.batch.sample import Sample

RUN = {"model": "m", "output": "o", "data": {"path": "d", "global_batch_size": 4}}


def store(path: Path, documents: int, count: int = 2) -> Samples:
    """Write a store with ``count`` samples per document, whose first token is the document's number."""
    write_store(path, ((n, [Sample.causal([n, 1, 2]) for _ in range(count)]) for n in range(documents)), Findings())
    return Samples.open(path)


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    samples = store(tmp_path / "s", documents=10)
    learned, held_out = hold_out(samples, 0.3, seed=1)
    numbers = [[int(sample.input_ids[0]) for sample in part] for part in (learned, held_out)]
    assert [len(part) for part in numbers] == [14, 6]
    assert [len(set(part)) for part in numbers] == [7, 3]
    assert sorted(numbers[0] + numbers[1]) == sorted([*range(10)] * 2)
    assert [int(sample.input_ids[0]) for sample in learned[2:4]] == numbers[0][2:4]
    repeated, _ = hold_out(samples, 0.3, seed=1)
    other, _ = hold_out(samples, 0.3, seed=2)
    assert [int(sample.input_ids[0]) for sample in repeated] == numbers[0]
    assert [int(sample.input_ids[0]) for sample in other] != numbers[0]
    assert len({learned.fingerprint, held_out.fingerprint, other.fingerprint, samples.fingerprint}) == 4
    assert [len(part) for part in hold_out(samples, 0.001, seed=1)] == [18, 2]  # at least one


def test_copies_of_a_document_are_held_out_together(tmp_path: Path) -> None:
    # Of 12 documents with two samples each, 4 are different.
    documents = [(number, [Sample.causal([number % 4, 1]), Sample.causal([number % 4, 2])]) for number in range(12)]
    write_store(tmp_path / "s", documents, Findings())
    sides = hold_out(Samples.open(tmp_path / "s"), 0.25, seed=1)
    learned, held_out = ([int(sample.input_ids[0]) for sample in side] for side in sides)
    assert len(held_out) == 6
    assert len(set(held_out)) == 1
    assert set(learned) == set(range(4)) - set(held_out)
    with pytest.raises(DataError, match=r"0\.9 of 4 different documents leaves nothing to learn"):
        hold_out(Samples.open(tmp_path / "s"), 0.9, seed=1)


@pytest.mark.parametrize(
    ("problem_type", "numbers", "message"),
    [
        ("single_label_classification", [0, 1], "2 texts with unlike labels, in 6 samples: one has 'bad' and 'good'"),
        ("multi_label_classification", [[0.0, 1.0], [1.0, 1.0]], "one has 'good' and 'bad, good'"),
        ("regression", [[0.5, 1.0], [0.5, 2.0]], "one has '0.5, 1' and '0.5, 2'"),
    ],
)
def test_copies_with_unlike_labels_are_held_out_together_and_reported(
    tmp_path: Path, problem_type: Any, numbers: list[Any], message: str
) -> None:
    labels = [number if isinstance(number, int) else torch.tensor(number) for number in numbers]
    # Texts 0 and 1 have both labels, 2 and 3 one.
    documents = [(n, [Sample.scored([n % 4, 7], label=labels[n // 4 % 2 if n % 4 < 2 else 0])]) for n in range(12)]
    write_store(tmp_path / "s", documents, Findings(), scored=True)
    samples = Samples.open(tmp_path / "s")
    for seed in range(4):
        learned, held_out = hold_out(samples, 0.5, seed=seed)
        first, second = ({int(sample.input_ids[0]) for sample in side} for side in (learned, held_out))
        assert len(first) == len(second) == 2
        assert not first & second
    (remark,) = ambiguous_texts([samples], LabelSet(("bad", "good"), problem_type))
    assert message in remark
    write_store(tmp_path / "t", documents[:4], Findings(), scored=True)
    assert ambiguous_texts([Samples.open(tmp_path / "t")], LabelSet(("bad", "good"), problem_type)) == ()


def test_padding_token_other_than_the_tokenizers_is_reported() -> None:
    tokenizer: Any = byte_tokenizer(256)
    limits = SampleLimits(9, scored=True, padding=7)
    (remark,) = padding_remark(tokenizer, limits)
    assert f"pad_token_id is 7 in config.json, and {tokenizer.pad_token_id} (" in remark
    assert padding_remark(tokenizer, replace(limits, padding=tokenizer.pad_token_id)) == ()
    assert padding_remark(tokenizer, SampleLimits(9)) == ()


def test_outcomes_are_counted_beyond_those_of_float32() -> None:
    part = Measurement(1.0, 1.0, outcomes=((2.0**24, 1.0, 0.0),))
    assert (part + Measurement(1.0, 1.0, outcomes=((1.0, 0.0, 0.0),))).outcomes == ((2.0**24 + 1, 1.0, 0.0),)


def test_held_out_copies_of_learned_documents_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    for name, texts in (("a", ["one two", "three"]), ("b", ["four five", "one two", "six"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    settings = RUN | {"data": {"path": tmp_path / "a.jsonl"}, "validation": {"path": tmp_path / "b.jsonl"}}
    samples = RunSamples.prepare(RunConfig(**settings), byte_tokenizer(256), SampleLimits(9))
    assert [line[:54] for line in samples.remarks] == ["1 of 3 held-out documents are among those that are lea"]


def damage(path: Path, values: np.ndarray) -> None:
    """Write zeros over the last of ``values``, where they are last in a file, as a disk or a copy may leave it."""
    content = path.read_bytes()
    end = content.rindex(values.tobytes()) + values.nbytes
    path.write_bytes(content[: end - values.itemsize] + bytes(values.itemsize) + content[end:])


def test_damaged_bytes_of_a_store_are_an_error_of_their_sample(tmp_path: Path) -> None:
    for name, values in (("tokens", np.array([2, 1, 2], np.int32)), ("weights", np.array([0, 1, 1], np.float32))):
        store(tmp_path / name, documents=3)
        damage(tmp_path / name / "samples.arrow", values)
        samples = Samples.open(tmp_path / name)
        assert len(list(samples[:5])) == 5
        with pytest.raises(DataError, match=rf"sample 5 in .*{name} is not what was written there"):
            _ = samples[5]
    # Places of the samples, and a file that was cut off, are noticed at once.
    store(tmp_path / "places", documents=3)
    damage(tmp_path / "places" / "samples.arrow", np.array([0, 3, 6, 9, 12, 15], np.int32))
    with pytest.raises(DataError, match=r"samples\.arrow is damaged: .*prepare the data again"):
        Samples.open(tmp_path / "places")
    path = tmp_path / "tokens" / "samples.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"samples\.arrow is damaged"):
        Samples.open(tmp_path / "tokens")


def test_other_samples_on_another_host_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise on every rank, before any step, if hosts have different samples, for example of another date."""
    parts = []
    for number, day in enumerate(("2024-02-29", "2024-03-01")):
        sources = {"data (data.path)": "a", "date in the chat template": day}
        write_store(tmp_path / day, [(0, [Sample.causal([number, 1])])], Findings(), sources)
        parts.append(Samples.open(tmp_path / day))
    samples = [RunSamples(part, None, 1, ()) for part in parts]
    gathered: list[Any] = []

    def gather(value: Any, *_: Any) -> list[Any]:
        gathered.append((f"host-{len(gathered)}", *value[1:]))
        return gathered

    monkeypatch.setattr(objects, "gather_objects", gather)
    backend: Any = SimpleNamespace(groups=None)
    samples[0].check_same_on_all_ranks(backend)
    with pytest.raises(
        DataError, match="rank 1 on host-1 has other samples than rank 0 on host-0: date in the chat template"
    ):
        samples[1].check_same_on_all_ranks(backend)


def test_schedule_ends_with_the_run_by_default() -> None:
    lora = {"schedule": {"kind": "cosine"}}
    resolved = RunConfig.model_validate(RUN | {"steps": 9, "lora": lora}).for_samples(1)
    assert resolved.lora == Lora(schedule=Schedule(kind="cosine", total_steps=9))
    assert Schedule(kind="cosine", total_steps=5).ending_with(9).total_steps == 5
    assert Schedule().ending_with(9).total_steps == 0
    with pytest.raises(ConfigError, match="schedule linear needs total_steps"):
        learning_rate(Schedule(kind="linear"), 1.0, 0)
