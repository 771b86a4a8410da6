"""The files of a split. datasets' own code decides which files of a folder belong to which split, offline.

megascend reads the files itself, so that values are not converted and every record has its file and line.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megascend.apps.data.findings import Findings
from megascend.apps.data.images import file_state
from megascend.config.documents import load_yaml
from megascend.config.registry import COMPRESSIONS, DATA_FORMATS, TEXT_FORMAT, load
from megascend.errors import DataError
from megascend.models.checkpoint_files.files import A_POINTER, is_pointer
from megascend.runtime.io.paths import real

TEXT_SUFFIXES = tuple(suffix for suffix, kind in DATA_FORMATS.items() if kind == TEXT_FORMAT)
_FIRST_SUFFIXES = {kind: suffix for suffix, kind in reversed(DATA_FORMATS.items())}
KNOWN_SUFFIXES = f"{', '.join(reversed(_FIRST_SUFFIXES.values()))} (docs/data.md has all)"
ALL = "all"
"""Names all readable files of a folder, or all splits of a saved one."""
HELD_OUT = "validation"
"""The split that validation.path takes of a folder with several, unless validation.split names one."""
SHARD = re.compile(
    r"(?P<stem>.*?)(?P<number>\d+(?=[-_.]of)|\d{3,})(?P<of>[-_.]of[-_.]\d+)?(-[\da-f]{8}[\da-f-]{8,}(-c\d+)?)?(?P<suffix>(\.\w+)+)",
    re.DOTALL | re.IGNORECASE,
)
"""Path of one of several files with their number, of three digits or more if the total is not there."""
MOST_SHARDS = 10_000
"""Files whose names are compared: more are taken as they are."""
CARD, CARD_YAML = "README.md", ".huggingface.yaml"
READ_OF_CARDS = {
    "config_name",
    "data_files",
    "data_dir",
    "default",
    "version",
    "description",
    "features",
    "drop_labels",
}
"""Keys of a card's config that are honoured, or that change nothing about text."""


def data_ending(path: Path) -> str:
    """Return the ending of a data file that names its format, a compression apart."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSIONS else path.suffix


def is_text(path: Path) -> bool:
    """Check whether a data file is one text by its ending."""
    return DATA_FORMATS.get(data_ending(path)) == TEXT_FORMAT


def is_readable(path: Path) -> bool:
    """Check whether a data file is read by its ending. Tables are not read compressed."""
    entry = DATA_FORMATS.get(data_ending(path))
    return entry is not None and (path.suffix not in COMPRESSIONS or load(entry).table is None)


@dataclass(frozen=True)
class SplitFiles:
    """The files that a split is read from, and what their folder's card says of them (``dataset_info``).

    Attributes:
        setting: setting that names the file or folder ``path``.
        files: in the order in which datasets reads them; of a folder that datasets saved its splits' folders.
        features: datasets' types of the columns; empty if the card has none.
        count: number of examples of the split; None if the card does not say.
    """

    path: Path
    setting: str
    files: list[Path]
    features: Mapping[str, Any] = field(default_factory=dict)
    count: int | None = None
    _is_all: bool = False

    @classmethod
    def of(cls, path: Path, split: str | None, config_name: str | None, findings: Findings) -> SplitFiles:
        """Find the files of a split of the file or folder ``path``.

        Args:
            split: None: ``validation``, or the only one; ``all``: every readable file of a folder or config.
            findings: gets the folder's other files, and those of the split that cannot be read.
        """
        setting = findings.setting
        if is_saved(path):
            return cls(path, setting, _saved_splits(path, split, config_name, setting))
        # A dangling link is neither a file nor a folder, and would get a misleading message below.
        if path.is_symlink() and not path.exists():
            target = path.readlink()
            raise DataError(f"no training data at {path} ({setting}): it is a link to {target}, which does not exist")
        if path.is_file():
            _check_file(path, split, config_name, setting)
            return cls(path, setting, _complete([path], findings))
        if not path.is_dir():
            raise DataError(f"no training data at {path.absolute()} ({setting}): neither a file nor a folder")
        readable = _readable_files(path, findings)
        if findings.problems:
            return cls(path, setting, [])
        if not readable:
            raise DataError(f"no training data in {path} ({setting}): no file in it ends in {KNOWN_SUFFIXES}")
        if split == ALL and config_name is None:
            folder = Folder({})
            if any((path / name).is_file() for name in (CARD, "dataset_infos.json")):  # the latter of old versions
                with contextlib.suppress(DataError):  # every file is read, also where datasets cannot tell their splits
                    folder = read_folder(path, None, setting)
            names, files = list(folder.counts), readable
        else:
            folder = read_folder(path, config_name, setting, text=all(is_text(file) for file in readable))
            names = list(folder.splits) if split == ALL else [choose_split(path, split, list(folder.splits), setting)]
            files = _files_of(path, readable, folder.splits, names, findings)
        known = names and all(name in folder.counts for name in names)
        count = sum(folder.counts[name] for name in names) if known else None
        return cls(path, setting, _complete(files, findings), folder.features, count, split == ALL)

    def count_problem(self, count: int) -> str | None:
        """Return a message if the files do not hold as many records as the card says, as datasets has an error then."""
        # All files may be more than those of the splits.
        if self.count is None or count == self.count or (count > self.count and self._is_all):
            return None
        return (
            f"{self.path} ({self.setting}): its card counts {self.count} examples, and the files hold {count}: download the "
            f"missing ones, or correct {CARD}"
        )


def is_saved(path: Path) -> bool:
    """Check whether ``save_to_disk`` of datasets has written this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _check_file(path: Path, split: str | None, config_name: str | None, setting: str) -> None:
    if not is_readable(path):
        raise DataError(f"{path}: files ending in {path.suffix!r} are not read ({setting}); known: {KNOWN_SUFFIXES}")
    if split not in (None, "train", ALL):
        raise DataError(f"{path} is one file and has no split {split!r} ({_split_setting(setting)}): leave it out")
    _check_config_name(path, config_name, setting)


def _check_config_name(path: Path, config_name: str | None, setting: str) -> None:
    """Raise DataError if a config is named for data without configs; validation data need not have those of ``data.path``."""
    if config_name is not None and setting != "validation.path":
        kind = "a folder that datasets has saved" if path.is_dir() else "one file"
        raise DataError(f"{path} is {kind} and has no configs (data.config_name: {config_name}): leave it out")


def _saved_splits(path: Path, split: str | None, config_name: str | None, setting: str) -> list[Path]:
    """Return the folders of the splits of a folder that datasets has saved."""
    _check_config_name(path, config_name, setting)
    try:
        if (path / "dataset_dict.json").is_file():
            names = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
            return [path / name for name in (names if split == ALL else [choose_split(path, split, names, setting)])]
        split_name = json.loads((path / "state.json").read_bytes()).get("_split")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the latter: of other JSON
        raise DataError(f"{path} ({setting}): datasets cannot load it: {error}") from error
    if split not in (None, "train", ALL, split_name):
        option = _split_setting(setting)
        raise DataError(f"{path} is one saved dataset and has no split {split!r} ({option}): leave it out")
    return [path]


def choose_split(path: Path, split: str | None, splits: Collection[str], setting: str) -> str:
    """Return the name of the split to read."""
    option = _split_setting(setting)
    if split is None and (HELD_OUT in splits or len(splits) == 1):
        return HELD_OUT if HELD_OUT in splits else next(iter(splits))
    if split is None or split not in splits:
        missing = "several splits, of which none is named 'validation'" if split is None else f"no split {split!r}"
        advice = f"; {option}: {ALL} reads every file" if option == "data.split" else ""
        raise DataError(f"{path} has {missing} ({option}); it has {', '.join(splits)}{advice}")
    return split


def _split_setting(setting: str) -> str:
    if setting.startswith("data.sources"):
        return f"{setting}.split"
    return "validation.split" if setting.startswith("validation") else "data.split"


class Folder(NamedTuple):
    """The files of each split of a folder, and what its card says: types of columns, and examples of each split."""

    splits: dict[str, list[Path]]
    features: Mapping[str, Any] = {}
    counts: Mapping[str, int] = {}


def read_folder(path: Path, config_name: str | None, setting: str, *, text: bool = False) -> Folder:
    """Inspect a folder as datasets does; ``text``: it holds text files only."""
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    # datasets resolves links, so its file names are relative to the real folder; below they are mapped back.
    root = path.resolve()
    try:
        # A cache of its own: datasets would otherwise look into, and write to, the user's.
        with _quiet(), tempfile.TemporaryDirectory(prefix="megascend-splits-") as cache:
            configs = card_configs(root)
            if setting == "validation.path" and config_name not in configs:
                config_name = None  # the name is of a config of data.path, which may be another folder
            chosen = _chosen_config(path, configs, config_name)
            _check_config(path, chosen, configs.get(chosen or "", {}))
            # For texts, datasets' builder would choose among modules by file count; the patterns alone give the splits.
            if text and not configs:
                split_files = DataFilesDict.from_patterns(get_data_patterns(str(root)), str(root), list(TEXT_SUFFIXES))
                info = datasets.DatasetInfo()
            else:
                builder = datasets.load_dataset_builder(str(root), name=chosen, cache_dir=cache)
                split_files, info = builder.config.data_files, builder.info
    except DataError:
        raise
    except Exception as error:  # datasets, YAML and the card's reader raise many kinds of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path} ({setting}): datasets cannot tell its splits: {reason}; data.split: {ALL} reads every file"
        ) from error
    splits = {}
    for name, files in dict(split_files or {}).items():
        # A name that fits two patterns of one split is listed twice, and would be learned twice.
        paths = dict.fromkeys(Path(file) for file in files)
        if paths:
            splits[str(name)] = [path / file.relative_to(root) if file.is_relative_to(root) else file for file in paths]
    return Folder(
        splits, info.features or {}, {name: entry.num_examples for name, entry in (info.splits or {}).items()}
    )


# --- the card ---


def card_configs(root: Path) -> dict[str, dict[str, Any]]:
    """Return the configs that the card of a folder lists, by name."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    values: dict[str, Any] = {}
    # Not by DatasetCard, which writes out what aliases in the card repeat, however often.
    if (root / CARD).is_file() and (block := REGEX_YAML_BLOCK.search((root / CARD).read_text(encoding="utf-8"))):
        values |= load_yaml(block[2]) or {}
    if (root / CARD_YAML).is_file():
        values |= load_yaml((root / CARD_YAML).read_text(encoding="utf-8")) or {}
    return {str(config["config_name"]): config for config in values.get("configs") or []}


def _chosen_config(path: Path, configs: Mapping[str, Mapping[str, Any]], name: str | None) -> str | None:
    if name is not None:
        if name not in configs:
            card = f"its card lists {', '.join(configs)}" if configs else "its card lists none"
            raise DataError(f"{path} has no config {name!r} (data.config_name); {card}")
        return name
    defaults = [config for config, values in configs.items() if config == "default" or values.get("default")]
    if len(configs) > 1 and len(defaults) != 1:
        names = ", ".join(configs)
        raise DataError(f"{path}: its card lists {len(configs)} configs: {names}; name one with data.config_name")
    return defaults[0] if defaults else next(iter(configs), None)


def _check_config(path: Path, name: str | None, values: Mapping[str, Any]) -> None:
    unread = [f"{key}: {value!r}" for key, value in values.items() if key not in READ_OF_CARDS]
    if unread:
        raise DataError(f"{path}: config {name!r} of its card sets {', '.join(unread)}, which is not read; remove it")
    if "://" in (files := str(values.get("data_files", ""))):
        raise DataError(f"{path}: config {name!r} of its card names files elsewhere ({files}): download them")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log messages of datasets and huggingface_hub about a folder."""
    import datasets
    from huggingface_hub.utils import logging

    level, datasets_level = logging.get_verbosity(), datasets.utils.logging.get_verbosity()
    logging.set_verbosity_error()
    datasets.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        datasets.utils.logging.set_verbosity(datasets_level)


# --- other files of the folder ---


def _readable_files(path: Path, findings: Findings) -> list[Path]:
    """Return the files of a folder that could be read, in name order; the others become remarks."""
    try:
        paths = sorted(file for file in path.rglob("*") if not file.is_dir() or file.is_symlink())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({findings.setting}): {error.strerror or error}") from None
    files = []
    for file in paths:
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            findings.remark("hidden files are not read", str(file))
        elif file.is_dir():
            findings.remark("is not read: a link to a folder", str(file))
        elif not is_readable(file):
            findings.remark(f"{file.suffix or file.name!r} files are not read", str(file))
        elif file.name.upper() == CARD.upper():
            findings.remark("is not read", str(file))
        elif not file.exists():
            findings.problem(f"{file}: a link to {file.readlink()}, which does not exist")
        else:
            files.append(file)
    return files


def _complete(files: Sequence[Path], findings: Findings) -> list[Path]:
    """Return the files without further names of one, whose records would be learned twice; report what is not there."""
    names: dict[Path, Path] = {}
    shards: dict[tuple[str, int, str, str], set[int]] = {}
    for file in files:
        with contextlib.suppress(OSError):  # readers report files that cannot be read
            if not file.stat().st_size:
                findings.remark("is empty", str(file))
            if is_pointer(file):
                findings.problem(f"{file}: {A_POINTER}")
        if match := SHARD.fullmatch(str(file)):
            key = (match["stem"], len(match["number"]), match["of"] or "", match["suffix"])
            shards.setdefault(key, set()).add(int(match["number"]))
        if (first := names.setdefault(real(file), file)) is not file:
            findings.remark(f"is not read: the same file as {first.name}", str(file))
    for (stem, digits, of, suffix), numbers in shards.items():
        # Most tools count from 0, some from 1. Without a total only gaps show, and numbers may be of another kind: years.
        last = int(of[4:]) - (int(of[4:]) not in numbers) if of else max(numbers)
        first = last - int(of[4:]) + 1 if of else min(numbers)
        for number in sorted({*range(first, last + 1)} - numbers if last <= MOST_SHARDS and first <= 1 else ()):
            findings.remark("is missing: the data are incomplete", f"{stem}{number:0{digits}}{of}{suffix}")
    return list(names.values())


def _files_of(
    path: Path,
    readable: Collection[Path],
    splits: Mapping[str, Collection[Path]],
    names: Collection[str],
    findings: Findings,
) -> list[Path]:
    """Return the files of the named splits; report the readable files of the folder that none of them has, and why."""
    files = list(dict.fromkeys(file for name in names for file in splits[name]))
    for name in names:
        for file in splits[name]:
            if not is_readable(file):
                findings.problem(
                    f"{file}: datasets counts it to split {name!r}, and {file.suffix!r} files are not read; known: "
                    f"{KNOWN_SUFFIXES}"
                )
    files = [file for file in files if is_readable(file)]
    split_of_file = {file: split for split, split_files in splits.items() if split not in names for file in split_files}
    no_split = [file for file in readable if file not in set(files) and file not in split_of_file]
    texts = [file for file in files if is_text(file)]
    records = [file for file in no_split if not is_text(file)]
    if texts and records:
        noun = "file" if len(texts) == 1 else "files"
        raise DataError(
            f"{path} ({findings.setting}): datasets takes the {len(texts)} text {noun} ({texts[0].name}) and leaves "
            f"out {records[0].name}, as it is rarer: move either out of the folder"
        )
    for file in readable:
        if file in split_of_file and file not in set(files):
            findings.remark(f"belongs to split {split_of_file[file]!r} and is not read", str(file))
    for file in no_split:
        findings.remark("is not read: datasets counts it to no split", str(file))
    return files


def file_states(files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return size and time of change of files, those within folders included."""
    entries = [entry for file in files for entry in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    return {entry: file_state(entry) for entry in entries if not entry.is_dir()}
