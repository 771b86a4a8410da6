"""Preparation of a run's samples: cached in files, rebuilt on changes, and refused as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data import prepare
from megascend.apps.data.files import read_documents
from megascend.apps.data.labels import LabelSet
from megascend.apps.data.order import fingerprint_of
from megascend.apps.data.prepare import prepare_samples, write_prepared
from megascend.apps.data.samples import SampleLimits, build_samples
from megascend.apps.data.store import Samples
from megascend.config import Data
from megascend.config.data import DataSource
from megascend.errors import DataError

CHAT = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
LIMITS = SampleLimits(40, vocab_size=300)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write data and a tokenizer (in ``model``), and use a separate cache."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    byte_tokenizer(256).save_pretrained(tmp_path / "model")
    lines = [{"messages": CHAT, "id": 1}, {"text": "0123456789" * 7}, {"prompt": "a", "completion": "b"}]
    write(tmp_path / "data.jsonl", *lines)
    return tmp_path


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def samples_of(folder: Path, limits: SampleLimits = LIMITS, **settings: Any) -> Samples:
    data = Data(path=folder / "data.jsonl", **settings)
    return prepare_samples(DataSource(data.path, data, "data.path"), byte_tokenizer(256), limits, folder / "model")


def stores(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "samples").iterdir())


def test_stored_samples_equal_samples_in_memory(folder: Path) -> None:
    store = samples_of(folder)
    reference = build_samples(read_documents(folder / "data.jsonl"), byte_tokenizer(256), 40)
    assert len(store) == len(reference) == 4
    for stored, expected in zip(store, reference, strict=True):
        for field in ("input_ids", "target_ids", "weights"):
            assert getattr(stored, field).dtype == getattr(expected, field).dtype
            assert torch.equal(getattr(stored, field), getattr(expected, field))
    assert store.fingerprint == fingerprint_of(reference)
    assert store.lengths.tolist() == [len(sample) for sample in reference]
    assert store.documents.tolist() == [0, 1, 1, 2]
    assert [len(sample) for sample in store[1:3]] == [40, 30]
    assert store.remarks == [f"{folder}/data.jsonl:1: 'id' is not read"]
    store[0].weights[0] = 5.0  # a copy
    assert float(samples_of(folder)[0].weights[0]) == 0.0


def test_scored_pairs_keep_all_tokens_but_padding_at_the_end(folder: Path) -> None:
    write(
        folder / "data.jsonl",
        {"prompt": "p", "chosen": "one", "rejected": "two", "margin": 0.5},
        {"prompt": "abcd", "chosen": "ef", "rejected": "eg", "margin": 1},
    )
    tokenizer = byte_tokenizer(256)
    eos = tokenizer.eos_token_id
    texts = [tokenizer(text)["input_ids"] for text in ("pone", "ptwo", "abcdef", "abcdeg")]
    store = samples_of(folder, SampleLimits(7, vocab_size=300, scored=True))
    assert [sample.input_ids.tolist() for sample in store] == [[*ids, eos] for ids in texts]
    assert store.lengths.tolist() == [5, 5, 7, 7]
    assert all(sample.weights.tolist() == [1.0] * len(sample) for sample in store)
    assert [sample.extra["margin"].tolist() for sample in store] == [[0.5] * 5] * 2 + [[1.0] * 7] * 2
    # transformers would take an end of sequence that is the padding token for padding. Cut to five tokens, sides are equal.
    limits = SampleLimits(5, vocab_size=300, scored=True, padding=eos)
    store = samples_of(folder, limits, on_too_long="truncate")
    assert [sample.input_ids.tolist() for sample in store] == texts[:2]
    assert store.remarks[-1].endswith("left out: both sides of the pair are the same tokens")


CLASSES = replace(LIMITS, scored=True, padding=9, labels=LabelSet(("a", "b"), "single_label_classification"))


def test_cut_classified_sample_ends_with_a_token_that_is_not_padding(folder: Path) -> None:
    """Keep the token that transformers reads: the last that is not padding."""
    write(folder / "data.jsonl", *({"token_ids": ids, "label": 0} for ids in ([5, 6, 9, 9, 7], [5, 9, 6, 9])))
    store = samples_of(folder, replace(CLASSES, length=3), on_too_long="truncate")
    assert [sample.input_ids.tolist() for sample in store] == [[5, 6], [5, 9, 6]]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"weights": [1, 1, 0.5]}, "weights"),
        ({"prompt_length": 2}, "prompt_length"),
        ({"top_ids": [[1], [2], [3]], "top_logprobs": [[-1], [-1], [-1]]}, "top_ids"),
    ],
)
def test_columns_of_single_tokens_are_refused_for_a_classifier(folder: Path, columns: Any, name: str) -> None:
    write(folder / "data.jsonl", {"token_ids": [5, 6, 7], "label": 0} | columns)
    with pytest.raises(DataError, match=f"'{name}'.* have no meaning for a classifier"):
        samples_of(folder, CLASSES)
    columns = {"token_ids": "token_ids", "label": "label"}
    assert samples_of(folder, CLASSES, columns=columns)[0].input_ids.tolist() == [5, 6, 7]


def test_pairs_are_stored_as_pairs(folder: Path) -> None:
    write(
        folder / "data.jsonl",
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt": "q", "chosen": "d", "rejected": "s"},
    )
    store = samples_of(folder)
    assert [(sample.pair, sample.chosen) for sample in store] == [(0, True), (0, False), (1, True), (1, False)]
    assert store.has_pairs
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"text": "not a pair"}\n')
    with pytest.raises(DataError, match="holds preference pairs and other documents"):
        samples_of(folder)


@pytest.mark.parametrize("prepared_scored", [False, True])
def test_pairs_prepared_for_another_head_are_refused(folder: Path, prepared_scored: bool) -> None:
    """Samples for logits and for a scalar head have other tokens and positions, though the data are the same."""
    write(folder / "data.jsonl", {"prompt": "p", "chosen": "c", "rejected": "r"})
    limits, other_limits = (replace(LIMITS, scored=scored) for scored in (prepared_scored, not prepared_scored))
    store = samples_of(folder, limits)
    write_prepared(folder / "prepared", {"data.path": store}, limits, {"data.path": folder / "data.jsonl"})
    assert samples_of(folder, limits, prepared=folder / "prepared").fingerprint == store.fingerprint
    with pytest.raises(DataError, match=r"was prepared from something else: limits of pairs .*scalar head"):
        samples_of(folder, other_limits, prepared=folder / "prepared")
    padded = replace(limits, scored=True, padding=0)
    with pytest.raises(DataError, match="padding token 0"):
        samples_of(folder, padded, prepared=folder / "prepared")


def test_prepared_samples_of_other_data_are_refused_where_the_data_are_missing(folder: Path) -> None:
    """Two sources in another order would be mixed by each other's weights."""
    write(folder / "other.jsonl", {"text": "others"})
    paths = {f"data.sources[{number}]": folder / name for number, name in enumerate(("data.jsonl", "other.jsonl"))}

    def read(path: Path, setting: str, **settings: Any) -> Samples:
        data = Data(path=path, **settings)
        return prepare_samples(DataSource(path, data, setting), byte_tokenizer(256), LIMITS, folder / "model")

    read_stores = {setting: read(path, setting) for setting, path in paths.items()}
    write_prepared(folder / "prepared", read_stores, LIMITS, paths)
    first = folder / "elsewhere" / "data.jsonl"
    assert len(read(first, "data.sources[0]", prepared=folder / "prepared")) == 4
    with pytest.raises(
        DataError, match=r"has samples of other\.jsonl as data\.sources\[1\], which is .*data\.jsonl now"
    ):
        read(first, "data.sources[1]", prepared=folder / "prepared")


def test_labelled_completions_of_text_and_of_messages_are_refused(folder: Path) -> None:
    chat = {"prompt": CHAT[:1], "completion": CHAT[1:], "label": False}
    plain = [{"prompt": prompt, "completion": "c", "label": True} for prompt in "pq"]
    write(folder / "data.jsonl", *plain, chat)
    with pytest.raises(DataError, match=r"data\.jsonl:3: a labelled completion of messages, and others of text"):
        samples_of(folder)


def test_data_are_tokenised_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = samples_of(folder)
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_store", None)
        repeated = samples_of(folder)
        assert repeated.fingerprint == first.fingerprint
        assert repeated.remarks == first.remarks
    [store_name] = stores(folder)

    def differs(**settings: Any) -> None:
        before = stores(folder)
        samples_of(folder, **settings)
        assert len(stores(folder)) == len(before) + 1

    differs(limits=SampleLimits(39, vocab_size=300))
    differs(train_on_prompt=True)
    differs(chat_template_options={"enable_thinking": False})
    write(folder / "data.jsonl", {"messages": CHAT, "id": 2})
    differs()
    template = folder / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}")
    differs(chat_template=template)
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text()) | {"model_max_length": 255}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    differs()
    assert store_name in stores(folder)


def test_data_that_change_while_they_are_read_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, write_store = (folder / "data.jsonl").read_bytes(), prepare.write_store

    def write_late(path: Path, documents: Any, *arguments: Any, **options: Any) -> None:
        write(folder / "data.jsonl", {"text": "written in the meantime"})
        write_store(path, documents, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_store", write_late)
        with pytest.raises(DataError, match=r"data\.jsonl \(data\.path\) has changed while it was read"):
            samples_of(folder)
    (folder / "data.jsonl").write_bytes(original)
    assert len(samples_of(folder)) == 4  # of the content that the cache's key is of


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_files_outside_of_the_folder_are_part_of_the_key(folder: Path, absolute: bool) -> None:
    """Key the cache by files that a card names and by the names, not the contents, of files outside the split."""
    outside = write(folder / "outside.jsonl", {"text": "first"})
    (folder / "data").mkdir()
    write(folder / "data" / "beside.jsonl", {"text": "1"})
    name = outside if absolute else "../outside.jsonl"
    (folder / "data" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: {name}\n---\n"
    )

    def prepared() -> Samples:
        data = Data(path=folder / "data")
        return prepare_samples(DataSource(data.path, data, "data.path"), byte_tokenizer(256), LIMITS, folder / "model")

    assert text_of(prepared()) == "first"
    write(outside, {"text": "second"})
    assert text_of(prepared()) == "second"
    write(folder / "data" / "beside.jsonl", {"text": "2"})
    prepared()
    assert len(stores(folder)) == 2
    write(folder / "data" / "more.jsonl", {"text": "2"})
    assert any("beside.jsonl and 1 more: is not read" in line for line in prepared().remarks)
    assert {"datasets", "huggingface_hub"} < set(prepare.PACKAGES)


def test_all_problems_are_raised_at_once_and_nothing_is_stored(folder: Path) -> None:
    long = {"messages": [CHAT[0], {"role": "assistant", "content": "x" * 40}]}
    path = write(
        folder / "data.jsonl", {"text": 3}, long, {"messages": CHAT[:1]}, {"messages": CHAT}, {"text": "a\ud800"}
    )
    with pytest.raises(DataError) as caught:
        samples_of(folder)
    heading, *problems = str(caught.value).split("\n  ")
    assert heading == "4 problems in the data:"
    for number, expected, problem in zip(
        (1, 2, 3, 5),
        ("'text' must be a string", "the limit is 40", "no assistant turn", "surrogate pair"),
        problems,
        strict=True,
    ):
        assert problem.startswith(f"{path}:{number}: ")
        assert expected in problem
    assert stores(folder) == []


DATED = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"


def dated(folder: Path, day: date | None = None, *, model_template: Any = None) -> Samples:
    """Prepare chats with a template that writes the date: the settings' or, if given, the tokenizer's."""
    write(folder / "data.jsonl", {"messages": CHAT})
    (folder / "dated.jinja").write_text(DATED)
    tokenizer = byte_tokenizer(256)
    data = Data(path=folder / "data.jsonl", chat_template=None if model_template else folder / "dated.jinja")
    tokenizer.chat_template = model_template or tokenizer.chat_template
    return prepare_samples(
        DataSource(data.path, data, "data.path"), tokenizer, SampleLimits(100), folder / "model", template_date=day
    )


def text_of(store: Samples) -> str:
    return str(byte_tokenizer(256).decode(store[0].input_ids))


def test_samples_with_a_date_are_cached_by_day(folder: Path) -> None:
    """Key the cache by the date: two dates make two entries, and an equal date hits the cache."""
    first, second = dated(folder, date(2024, 2, 29)), dated(folder, date(2024, 3, 1))
    assert text_of(first).startswith("29 Feb 2024 00:00user")
    assert text_of(second).startswith("01 Mar 2024 00:00user")
    assert first.fingerprint != second.fingerprint
    assert first.sources["date in the chat template"] == "2024-02-29"
    assert {name for name in first.sources if first.sources[name] != second.sources[name]} == {
        "date in the chat template"
    }
    assert dated(folder, date(2024, 2, 29)).fingerprint == first.fingerprint
    assert len(stores(folder)) == 2
    assert text_of(dated(folder)).startswith(date.today().strftime("%d %b %Y 00:00user"))
    # The tokenizer's own methods still use the clock.
    tokenizer = byte_tokenizer(256)
    now = str(tokenizer.apply_chat_template(CHAT, chat_template=DATED, tokenize=False))
    assert now.startswith(date.today().strftime("%d %b %Y "))


def test_every_template_of_a_tokenizer_is_in_the_key(folder: Path) -> None:
    """Key the cache also by the tokenizer's template for tools."""
    plain = DATED.partition("}}")[2]
    first = dated(folder, model_template={"default": plain, "tool_use": "a" + plain})
    second = dated(folder, model_template={"default": plain, "tool_use": "b" + plain})
    assert [name for name in first.sources if first.sources[name] != second.sources[name]] == ["chat template"]
    assert len(stores(folder)) == 2
    dated(folder, model_template={"default": plain, "tool_use": "b" + plain})
    assert len(stores(folder)) == 2


@pytest.mark.parametrize("expression", ["['a', 'b'] | random", "lipsum(n=1)"])
def test_random_template_raises_data_error(folder: Path, expression: str) -> None:
    template = "{{ " + expression + " }}" + DATED.partition("}}")[2]
    with pytest.raises(DataError, match="the chat template draws at random"):
        dated(folder, model_template=template)


def test_candidates_are_stored_with_their_samples(folder: Path) -> None:
    """The second record is cut, and has more candidates than the first."""
    long = list(range(60))
    records = [
        {"token_ids": [5, 9, 7], "top_ids": [[], [9, 2], [7]], "top_logprobs": [[], [-0.5, -1.5], [-0.25]]},
        {"token_ids": long, "top_ids": [[t, t + 1, t + 2] for t in long], "top_logprobs": [[-2.0, -3.0, -4.0]] * 60},
    ]
    write(folder / "data.jsonl", *records)
    store = samples_of(folder, on_too_long="truncate")
    assert (store.has_candidates, store.partial, store.lengths.tolist()) == (True, (), [2, 40])
    first, second = store[0].candidates, store[1].candidates
    assert first is not None and second is not None  # noqa: PT018
    assert (first.ids.tolist(), first.logprobs.tolist()) == ([[9, 2], [7, -1]], [[-0.5, -1.5], [-0.25, 0.0]])
    assert second.ids[-1].tolist() == [40, 41, 42]
    assert second.ids.shape == second.logprobs.shape == (40, 3)
    records[0]["top_logprobs"][2] = [-0.5]
    write(folder / "data.jsonl", *records)
    assert samples_of(folder, on_too_long="truncate").fingerprint != store.fingerprint
    write(folder / "data.jsonl", records[0], {"text": "abc"})
    with pytest.raises(DataError, match=r"with a teacher's distributions .* and others without"):
        samples_of(folder)


def test_candidate_outside_the_vocabulary_is_refused(folder: Path) -> None:
    write(folder / "data.jsonl", {"token_ids": [5, 9], "top_ids": [[], [300]], "top_logprobs": [[], [-0.5]]})
    with pytest.raises(DataError, match=r"data.jsonl:1: token id 300 lies outside the model's vocabulary"):
        samples_of(folder)
