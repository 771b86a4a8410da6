"""Files of a split, compared with datasets.load_dataset in every folder layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.files import iterate_documents, read_documents
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import SampleLimits
from megascend.apps.data.splits import read_folder
from megascend.apps.train.run_samples import RunSamples
from megascend.config import RunConfig
from megascend.errors import DataError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))


def fill(folder: Path, files: dict[str, str]) -> Path:
    """Write files with two rows that name the file; a card is written as its text."""
    for name, card in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": f"{name} {number}"} for number in range(2)]
        if card:
            path.write_text(card)
        elif path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix in (".csv", ".tsv"):
            path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
        elif path.suffix in (".txt", ".md", ".rst"):
            path.write_text(rows[0]["text"])
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def card(*configs: str) -> str:
    return "---\nlicense: mit\nconfigs:\n" + "".join(configs) + "---\nA card, which nobody wants to learn.\n"


def config(name: str, default: bool = False, **splits: str) -> str:
    files = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in splits.items())
    return f"- config_name: {name}\n" + "  default: true\n" * default + f"  data_files:\n{files}"


def named(*names: str, **cards: str) -> dict[str, str]:
    return dict.fromkeys(names, "") | {name.replace("__", "."): text for name, text in cards.items()}


LAYOUTS: dict[str, dict[str, str]] = {
    "one file without a split's name": named("a.jsonl"),
    "several files without a split's name": named("b.jsonl", "a.jsonl", "sub/c.jsonl"),
    "train and test": named("train.jsonl", "test.jsonl"),
    "train and test, with a card": named("train.jsonl", "test.jsonl", README__md="---\nlicense: mit\n---\nx"),
    "train and test, a card without front matter": named("train.csv", "test.csv", README__md="# About\n"),
    "shards": named(
        "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"
    ),
    "shards beside another file": named("data/train-00000-of-00001.jsonl", "extra.jsonl"),
    "folders": named("train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "validation/a.jsonl"),
    "folders in a folder": named("data/train/x/a.jsonl", "data/dev/a.jsonl"),
    "dev": named("train.jsonl", "dev.jsonl"),
    "names with more in them": named("my_train_set.jsonl", "my-test.v2.jsonl", "other.jsonl"),
    "a name that begins with a split's": named("trainer.jsonl", "tested.jsonl"),
    "a name with two words of one split": named("train-training.jsonl", "test.jsonl"),
    "a name of two splits": named("train_test.jsonl", "test.jsonl"),
    "test alone": named("test.jsonl"),
    "hidden files": named("train.jsonl", ".train.jsonl", ".cache/huggingface/train.jsonl", "__pycache__/train.jsonl"),
    "files of datasets' own": named("train.jsonl", "test.jsonl", dataset_infos__json="{}"),
    "formats mixed, even": named("a.jsonl", "b.csv"),
    "formats mixed, uneven": named("a.csv", "b.csv", "c.jsonl"),
    "formats mixed, a licence": named("train.jsonl", "LICENSE.txt"),
    "a card with splits": named(
        "x.jsonl", "y.jsonl", "z.jsonl", README__md=card(config("main", train="x.jsonl", test="y.jsonl"))
    ),
    "a card with patterns": named(
        "p/1.jsonl", "p/2.jsonl", "q/1.jsonl", README__md=card(config("default", train='"p/*"', dev='"q/*"'))
    ),
    "a card with a default": named(
        "x.jsonl", "y.jsonl", README__md=card(config("a", train="x.jsonl"), config("b", default=True, train="y.jsonl"))
    ),
    "a card with a folder": named(
        "en/train.jsonl", "en/test.jsonl", "de/train.jsonl", README__md=card("- config_name: en\n  data_dir: en\n")
    ),
    "a card in YAML alone": named(
        "x.jsonl", "y.jsonl", **{".huggingface.yaml": "configs:\n" + config("main", train="x.jsonl")}
    ),
}  # fmt: skip


COVERING = (
    "train and test, with a card",
    "shards",
    "folders",
    "dev",
    "names with more in them",
    "a card with a default",
)
"""Layouts that run in CI; the others are nightly."""


@pytest.mark.parametrize(
    "name", [name if name in COVERING else pytest.param(name, marks=pytest.mark.nightly) for name in LAYOUTS]
)
def test_splits_match_datasets(name: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "folder", LAYOUTS[name])
    reference = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "datasets"))
    texts = {str(split): sorted({row["text"] for row in rows}) for split, rows in reference.items()}
    assert {
        split: sorted(document.text or "" for document in iterate_documents(folder, split, None, Findings()))
        for split in read_folder(folder, None, "data.path").splits
    } == texts
    if "train" in texts:
        assert sorted(document.text or "" for document in read_documents(folder)) == texts["train"]
    else:
        with pytest.raises(DataError, match=rf"no split 'train' \(data\.split\); it has {next(iter(texts))}"):
            read_documents(folder)


def test_ignored_files_are_reported(tmp_path: Path) -> None:
    folder = fill(tmp_path, named("train.jsonl", "test.jsonl", "extra.jsonl", ".x.jsonl", "a.docx"))
    findings = Findings()
    [source] = {document.source.rpartition(":")[0] for document in iterate_documents(folder, "train", None, findings)}
    assert source == f"{folder}/train.jsonl"
    assert findings.lines() == [
        f"{folder}/.x.jsonl: hidden files are not read",
        f"{folder}/a.docx: '.docx' files are not read",
        f"{folder}/test.jsonl: belongs to split 'test' and is not read",
        f"{folder}/extra.jsonl: is not read: datasets counts it to no split",
    ]
    assert len(read_documents(folder, "all")) == 6


TWO = card(config("en", train="x.jsonl"), config("de", train="y.jsonl"))
REFUSED: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "several configs": (
        named("x.jsonl", "y.jsonl", README__md=TWO), {}, "lists 2 configs: en, de; name one with data.config_name",
    ),
    "an unknown config": (
        named("x.jsonl", README__md=TWO), {"config_name": "fr"}, r"no config 'fr' \(data.config_name\); its card lists en, de"
    ),
    "a config of no card": (named("x.jsonl"), {"config_name": "en"}, "no config 'en'.*its card lists none"),
    "an unknown split": (named("train.jsonl"), {"split": "dev"}, r"no split 'dev' \(data.split\); it has train; data.split: all"),
    "files elsewhere": (
        named("x.jsonl", README__md=card(config("a", train="https://host/x.jsonl"))), {}, "names files elsewhere"
    ),
    "settings of a reader": (
        named("x.csv", README__md=card('- config_name: a\n  data_files: x.csv\n  sep: ";"\n')), {},
        "sets sep: ';', which is not read",
    ),
    "a card that is not YAML": (named("x.jsonl", README__md="---\n: [\n---\n"), {}, "datasets cannot tell its splits"),
    "two formats": (named("train.jsonl", "test.csv"), {}, "datasets cannot tell its splits.*data.split: all"),
    "compressed tables": (
        named("train.jsonl", "train-2.parquet.gz"), {}, r"train-2.parquet.gz: .* split 'train', and '.gz' files are not read"
    ),
    "more texts than records": (
        named("a.txt", "b.txt", "c.jsonl"), {}, "takes the 2 text files .*leaves out c.jsonl.*move either out of the folder"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_folder_raises_data_error(name: str, tmp_path: Path) -> None:
    files, settings, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        read_documents(fill(tmp_path, files), **settings)


def test_a_config_is_chosen_by_name(tmp_path: Path) -> None:
    folder = fill(tmp_path, named("x.jsonl", "y.jsonl", README__md=TWO))
    assert [document.text for document in read_documents(folder, config_name="de")] == ["y.jsonl 0", "y.jsonl 1"]


@pytest.mark.parametrize("split", ["train", "all"])
def test_linked_folders_are_reported_as_ignored(split: str, tmp_path: Path) -> None:
    folder, findings = fill(tmp_path / "f", named("train.jsonl")), Findings()
    (folder / "more").symlink_to(fill(tmp_path / "other", named("train.jsonl")))
    assert len(list(iterate_documents(folder, split, None, findings))) == 2
    assert findings.lines() == [f"{folder}/more: is not read: a link to a folder"]


@pytest.mark.parametrize("split", ["train", "all"])
def test_two_names_of_a_file_are_read_once(split: str, tmp_path: Path) -> None:
    fill(tmp_path, {"a.jsonl": ""})
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    findings = Findings()
    documents = list(iterate_documents(tmp_path, split, None, findings))
    assert [document.source for document in documents] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 2)]
    assert findings.lines() == [f"{tmp_path}/b.jsonl: is not read: the same file as a.jsonl"]


def test_all_splits_of_a_config_leave_other_configs_out(tmp_path: Path) -> None:
    english_and_german = card(config("en", train="x.jsonl", test="z.jsonl"), config("de", train="y.jsonl"))
    folder, findings = fill(tmp_path, named("x.jsonl", "y.jsonl", "z.jsonl", README__md=english_and_german)), Findings()
    texts = [document.text for document in iterate_documents(folder, "all", None, findings, "en")]
    assert texts == ["x.jsonl 0", "x.jsonl 1", "z.jsonl 0", "z.jsonl 1"]
    assert f"{folder}/y.jsonl: is not read: datasets counts it to no split" in findings.lines()
    assert len(read_documents(folder, "all")) == 6


def held_out(folder: Path, data: dict[str, object], validation: dict[str, object]) -> tuple[int, int]:
    """Return the numbers of training samples and of held-out samples."""
    run = RunConfig(model=folder, output=folder / "o", data={"path": folder, **data}, validation=validation, steps=1)
    samples = RunSamples.prepare(run, byte_tokenizer(256), SampleLimits(60))
    assert samples.held_out is not None
    return len(samples.train), len(samples.held_out)


@pytest.mark.parametrize("make", [lambda folder: {"path": folder}, lambda folder: {"split": "validation"}])
def test_validation_takes_its_split_of_the_same_folder(make: Callable[[Path], dict], tmp_path: Path) -> None:
    folder = fill(tmp_path / "f", named("train.jsonl", "train-2.jsonl", "dev.jsonl", "test.jsonl"))
    assert held_out(folder, {}, make(folder)) == (4, 2)


def test_validation_takes_the_named_split(tmp_path: Path) -> None:
    folder = fill(tmp_path / "f", named("train.jsonl", "dev.jsonl", "test.jsonl", "test-2.jsonl"))
    assert held_out(folder, {}, {"split": "test"}) == (2, 4)
    other = fill(tmp_path / "other", named("a.jsonl"))
    assert held_out(folder, {}, {"path": other}) == (2, 2)
    two_configs = fill(tmp_path / "both", named("x.jsonl", "y.jsonl", README__md=TWO))
    for path in (other, other / "a.jsonl"):  # without a config of that name
        assert held_out(two_configs, {"config_name": "en"}, {"path": path}) == (2, 2)
    with pytest.raises(DataError, match=r"no split 'dev' \(validation.split\); it has train, validation, test$"):
        held_out(folder, {}, {"split": "dev"})
    with pytest.raises(DataError, match=r"validation.split: .* so the run would train on .*train.jsonl"):
        held_out(folder, {}, {"split": "train"})
    with pytest.raises(DataError, match=r"validation.path: .* so the run would train on .*dev.jsonl"):
        held_out(folder, {"split": "all"}, {"path": folder})
    unnamed = fill(tmp_path / "unnamed", named("train.jsonl", "test.jsonl"))
    with pytest.raises(DataError, match=r"several splits, of which none is named 'validation' \(validation.split\)"):
        held_out(folder, {}, {"path": unnamed})
