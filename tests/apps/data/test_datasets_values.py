"""Values of every container and type that datasets writes, compared with what datasets loads; and what it refuses."""

from __future__ import annotations

import decimal
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import ClassLabel, Features, Json, List, Value
from datasets.info import DatasetInfosDict
from pyarrow import parquet

from megascend.apps.data.files import iterate_records, read_documents, read_file
from megascend.apps.data.findings import Findings
from megascend.apps.data.labels import LabelSet, label_name
from megascend.apps.data.splits import SplitFiles
from megascend.apps.data.streaming import StreamedBatches
from megascend.config import Data
from megascend.config.data import default_labels
from megascend.errors import DataError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
PART = {"name": Value("string"), "note": Value("string")}
TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # type: values that datasets loads, and ours, where class labels are names and structs lack keys of other rows.
    "string": (Value("string"), ["a", None], ["a", None]),
    "large_string": (Value("large_string"), ["a", '{"b": null}'], ["a", '{"b": null}']),
    "bool": (Value("bool"), [True, False], [True, False]),
    "json": (Json(), [{"a": None, "b": [1, {"c": None}]}, None], [{"a": None, "b": [1, {"c": None}]}, None]),
    "list of json": (List(Json()), [[SCHEMA], []], [[SCHEMA], []]),
    "json in structs": (
        List({"name": Value("string"), "arguments": Json()}),
        [[{"name": "f", "arguments": {"x": None}}, {"name": None, "arguments": None}], [{"name": "g", "arguments": 1}]],
        [[{"name": "f", "arguments": {"x": None}}, {}], [{"name": "g", "arguments": 1}]],
    ),
    "label": (ClassLabel(names=["negative", "positive"]), [0, 1], ["negative", "positive"]),
    "missing label": (ClassLabel(names=["negative", "positive"]), [-1, None], [-1, None]),
    "labels": (List(ClassLabel(names=["x", "y", "z"])), [[2, 0], []], [["z", "x"], []]),
    "label in structs": (
        List({"role": ClassLabel(names=["user", "assistant"]), "content": Value("string")}),
        [[{"role": 1, "content": "c"}], [{"role": 0, "content": None}]],
        [[{"role": "assistant", "content": "c"}], [{"role": "user"}]],
    ),
    "list of structs": (
        List(PART),
        [[{"name": "a", "note": None}], [{"name": None, "note": "b"}]],
        [[{"name": "a"}], [{"note": "b"}]],
    ),
    "struct of lists": ({"ids": List(Value("int64"))}, [{"ids": [1, 2]}, {"ids": None}], [{"ids": [1, 2]}, {}]),
}
ARROW_TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "decimal": (Value("decimal128(3, 1)"), [decimal.Decimal("1.5"), None], [decimal.Decimal("1.5"), None]),
    "timestamp": (Value("timestamp[us]"), [datetime(2020, 1, 2), None], [datetime(2020, 1, 2), None]),
    "binary": (Value("binary"), [b"\x00", None], [b"\x00", None]),
    "float list": (List(Value("float32"), length=2), [[0.5, 1.0], [0.0, 2.0]], [[0.5, 1.0], [0.0, 2.0]]),
}


def write_card(folder: Path, features: Features, rows: int, data: str) -> Path:
    """Write a card as push_to_hub does."""
    split = datasets.splits.SplitDict({"train": datasets.SplitInfo("train", num_bytes=1, num_examples=rows)})
    info = datasets.DatasetInfo(features=features, splits=split, dataset_size=1, download_size=1)
    DatasetInfosDict({"default": info}).write_to_directory(str(folder))
    text = (folder / "README.md").read_text()
    configs = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {data}\n---"
    (folder / "README.md").write_text(configs.join(text.rsplit("---", 1)))
    return folder


def parquet_file(rows: datasets.Dataset, folder: Path) -> Path:
    rows.to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def parquet_folder(rows: datasets.Dataset, folder: Path) -> Path:
    """Write parquet without datasets' metadata: only the card has the features."""
    for number in range(2):
        table = pyarrow.Table.from_batches(rows.select([number]).with_format("arrow")[:].to_batches())
        parquet.write_table(table.replace_schema_metadata(None), folder / f"train-0000{number}-of-00002.parquet")
    return write_card(folder, rows.features, 2, "train-*")


def saved(rows: datasets.Dataset, folder: Path) -> Path:
    rows.save_to_disk(folder / "saved")
    return folder / "saved"


def saved_splits(rows: datasets.Dataset, folder: Path) -> Path:
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(folder / "saved")
    return folder / "saved"


def jsonl_folder(rows: datasets.Dataset, folder: Path) -> Path:
    rows.to_json(folder / "train.jsonl")
    return write_card(folder, rows.features, 2, "train.jsonl")


def json_folder(rows: datasets.Dataset, folder: Path) -> Path:
    (folder / "train.json").write_text(json.dumps(rows.to_list()))
    return write_card(folder, rows.features, 2, "train.json")


def csv_folder(rows: datasets.Dataset, folder: Path) -> Path:
    rows.to_csv(folder / "train.csv", index=False)
    return write_card(folder, rows.features, 2, "train.csv")


def loaded(path: Path) -> datasets.Dataset:
    """Return what datasets loads from a container."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        content = datasets.load_from_disk(str(path))
        return content["train"] if isinstance(content, datasets.DatasetDict) else content
    folder = {} if path.is_dir() else {"data_files": str(path)}
    return datasets.load_dataset("parquet" if folder else str(path), **folder, split="train")


def records(path: Path) -> list[dict[str, Any]]:
    findings = Findings()
    values = [record.value for record in iterate_records(path, "train", findings)]
    findings.raise_problems()
    return values


def streamed(path: Path) -> list[dict[str, Any]]:
    findings = Findings()
    split = SplitFiles.of(path, "train", None, findings)
    values = [
        record.value for file in split.files for record in read_file(file, split.features, findings, streaming=True)
    ]
    findings.raise_problems()
    return values


ARROW = (parquet_file, parquet_folder, saved, saved_splits)
TEXT = (jsonl_folder, json_folder, csv_folder)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("container", "read"),
    # A JSON list is not streamed.
    [(container, records) for container in (*ARROW, *TEXT)]
    + [(container, streamed) for container in (*ARROW, jsonl_folder, csv_folder)],
)
def test_values_are_those_that_datasets_loads(container: Callable[..., Path], read: Callable, tmp_path: Path) -> None:
    types = TYPES | (ARROW_TYPES if container in ARROW else {})
    if container is csv_folder:  # a table of texts without null: datasets casts only flat types
        types = {"label": types["label"], "other": (Value("string"), ["a", "7"], ["a", "7"])}
    features = Features({name: feature for name, (feature, _, _) in types.items()})
    values = {name: column for name, (_, column, _) in types.items()}
    path = container(datasets.Dataset.from_dict(values, features=features), tmp_path)
    rows = loaded(path)
    assert rows.features == features
    assert rows[:] == values
    found = read(path)
    for name, (_, _, expected) in types.items():
        assert [row.get(name) for row in found] == expected, name


def test_dictionary_encoded_strings_are_strings(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert [row["text"] for row in records(tmp_path / "a.parquet")] == loaded(tmp_path / "a.parquet")["text"][:]


CLASSES = Features({"text": Value("string"), "label": ClassLabel(names=["negative", "positive"])})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("positive", "negative"), [1, 0]),  # by name
        (("negative", "positive", "neutral"), [0, 1]),
        (default_labels(2), [0, 1]),  # classification.num_labels: by id
        (("bad", "good"), None),
    ],
)
@pytest.mark.parametrize("container", [parquet_folder, jsonl_folder])
def test_class_labels_are_read_by_name(
    container: Callable[..., Path], names: tuple[str, ...], expected: list[int] | None, tmp_path: Path
) -> None:
    path = container(datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=CLASSES), tmp_path)
    labels = LabelSet(names, "single_label_classification")
    if expected is None:
        with pytest.raises(DataError, match="negative"):
            [labels.parse(row["label"]) for row in records(path)]
        return
    assert [labels.parse(row["label"]) for row in records(path)] == expected


def test_label_out_of_range_is_refused_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 2}\n')
    write_card(tmp_path, CLASSES, 2, "train.jsonl")
    with pytest.raises(ValueError, match="Invalid integer class label 2"):
        CLASSES["label"].int2str(loaded(tmp_path)["label"][:])
    with pytest.raises(DataError, match=r"train.jsonl:2: .*negative, positive, found 2"):
        records(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_missing_shard_is_refused_by_the_cards_count(suffix: str, tmp_path: Path) -> None:
    for number in (0, 2):
        rows = datasets.Dataset.from_dict({"text": [f"shard {number}"]})
        file = tmp_path / f"train-0000{number}-of-00003.{suffix}"
        rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    # Without a card, datasets loads what is there.
    findings = Findings()
    assert loaded(tmp_path).num_rows == len(list(iterate_records(tmp_path, "train", findings))) == 2
    assert any(f"train-00001-of-00003.{suffix}: is missing" in line for line in findings.lines())
    write_card(tmp_path, rows.features, 3, "train-*")
    with pytest.raises(datasets.exceptions.NonMatchingSplitsSizesError):
        loaded(tmp_path)
    with pytest.raises(DataError, match="counts 3 examples, and the files hold 2"):
        records(tmp_path)
    if suffix == "parquet":
        streaming = Data(path=tmp_path, streaming=True, on_too_long="skip")
        with pytest.raises(DataError, match="counts 3 examples, and the files hold 2"):
            StreamedBatches(streaming.training_sources(), 1, 0, lambda findings: None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.json", "a.parquet", "a.md"])
@pytest.mark.parametrize("folder", [True, False])
def test_pointer_of_git_lfs_is_refused(name: str, folder: bool, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    with pytest.raises(DataError, match="pointer of Git LFS"):
        records(tmp_path if folder else file)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ("\ufeffversion https://git-lfs.github.com/spec/v1\r\noid sha256:00\r\nsize 1\r\n", True),
        ("version https://hawser.github.com/spec/v1\noid sha256:00\nsize 1\n", True),
        ("version https://git-lfs.github.com/spec/v1\next-0-a sha256:11\noid sha256:00\nsize 1\n", True),
        ("# xet version 0\nfilesize = 10\nhash = '00'\n", True),
        ("/annex/objects/SHA256E-s5--00.txt\n", True),
        ("../.git/annex/objects/aa/bb/SHA256E-s5--00/SHA256E-s5--00.txt", True),
        ("version https://git-lfs.github.com is where it is described\n", False),
        ("/annex/objects/ holds the files", False),
    ],
)
def test_text_in_place_of_a_file_is_refused(content: str, refused: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    if not refused:
        assert records(tmp_path)[0].text == content
        return
    with pytest.raises(DataError, match="a pointer of Git LFS, Xet or git-annex"):
        records(tmp_path)


def test_empty_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train-a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "train-b.jsonl").write_text("")
    findings = Findings()
    assert len(list(iterate_records(tmp_path, "train", findings))) == 1
    assert any("train-b.jsonl: is empty" in line for line in findings.lines())


def test_column_of_nulls_is_still_a_column(tmp_path: Path) -> None:
    """So that data.columns may name it, with null in some rows or in all of them."""
    rows = datasets.Dataset.from_dict({"q": ["a", "b"], "s": ["c", None], "n": [None, None]})
    rows.to_parquet(tmp_path / "a.parquet")
    columns = {"text": "q", "label": "s"}
    assert records(tmp_path / "a.parquet") == loaded(tmp_path / "a.parquet").to_list()
    labels = [document.class_label for document in read_documents(tmp_path / "a.parquet", columns=columns)]
    assert labels == ["c", None]


@pytest.mark.parametrize(
    ("value", "name"), [("1.0", "positive"), (1.0, "positive"), (" positive", "positive"), (1.5, None)]
)
def test_class_label_is_an_integer(value: Any, name: str | None) -> None:
    feature = CLASSES["label"]
    if name is None:
        with pytest.raises(DataError, match=r"negative, positive, found 1\.5"):
            label_name(feature, value)
        return
    assert label_name(feature, value) == name
