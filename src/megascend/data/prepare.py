"""Make the samples of a run from its data settings; all problems of the data are reported here, before training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megascend.batch.sample import Sample
from megascend.config import Data
from megascend.data.chat import check_template, writes_date
from megascend.data.document import Document
from megascend.data.files import iterate_documents, read_template
from megascend.data.findings import Findings
from megascend.data.pictures import PictureProcessor
from megascend.data.samples import Encoder, SampleLimits
from megascend.data.splits import files_of, is_saved
from megascend.data.store import SampleStore, write_store
from megascend.errors import DataError
from megascend.io.hashing import digest
from megascend.io.paths import cache_folder, cache_limit
from megascend.io.shared import cached, prune

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""Suffixes of files that do not affect tokenisation."""
TOKENIZER = ("tokenizer", "vocab", "merges", "added_tokens", "special_tokens_map", "spiece", "sentencepiece")
"""Prefixes of the names of a tokenizer's files."""
PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "huggingface_hub", "pillow")
"""Packages that decide which files are read, and how they are rendered and tokenised."""
PROGRESS_S = 20.0
"""Seconds between two progress lines of a long tokenisation."""
PATIENCE_S = 7 * 24 * 3600.0
"""Seconds that a rank waits for another one on its machine that tokenises the same data; a lock ends with its process."""


def set_template(data: Data, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give the tokenizer the chat template that the settings name; return its text, or None where they name none."""
    template = read_template(data.chat_template)
    if template is not None and data.chat_template is not None:
        check_template(template, data.chat_template)
        tokenizer.chat_template = template
    return template


def prepare_samples(
    path: Path,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limits: SampleLimits,
    model: Path,
    setting: str = "data.path",
    template_date: date | None = None,
) -> SampleStore:
    """Return the samples of the data at ``path``, tokenised once on this machine and kept in the cache folder.

    One rank of a machine writes, the others wait for it, without a process group. ``model``: directory of the tokenizer;
    ``setting``: the one that ``path`` is of; ``template_date``: date for the chat template, by default today.
    """
    # Also reports problems of the folder before anything is tokenised.
    files_read = files_of(path, data.split, data.config_name, Findings(setting))
    set_template(data, tokenizer)
    template_date = template_date or date.today()
    pictures = PictureProcessor.for_model(model, data.pictures)
    settings = data.model_dump(
        mode="json",
        include={"split", "config_name", "columns", "train_on_prompt", "on_too_long", "chat_template_options"}
        | (set() if pictures is None else {"pictures"}),
    )
    content, files, code = content_of(path, files_read, setting), tokenizer_of(model), versions()
    sources = {
        "data": json_digest(content[1]),
        **{f"data.{name}": json.dumps(value) for name, value in settings.items()},
        "chat template": json_digest(tokenizer.chat_template),
        **({"date in the chat template": template_date.isoformat()} if writes_date(tokenizer) else {}),
        **{name: code for name, code in files if name.startswith(TOKENIZER)},
        "longest sample": str(limits.length),
        f"versions of {', '.join(PACKAGES)} or megascend": json_digest(code),
    }
    # The key of the cache: all that decides about tokens and weights, so that a change of any of it makes new samples.
    # Paths of pictures are relative to the data, whose own path may be relative to the working directory.
    location = None if pictures is None else str(path.resolve())
    key = json_digest([sources, content, files, asdict(limits), location])

    def make(fresh: Path) -> None:
        findings = Findings(setting)
        encoder = Encoder(
            tokenizer,
            limits,
            findings,
            train_on_prompt=data.train_on_prompt,
            on_too_long=data.on_too_long,
            template_options=data.chat_template_options,
            template_date=template_date,
            pictures=pictures,
        )
        write_store(fresh, _encoded(path, data, encoder, findings), findings, sources, scored=limits.scored)
        # After write_store: raising here makes cached() discard the directory, so only data without problems is kept.
        findings.raise_problems()

    try:
        store = _in_cache(key, make, pictures)
    except OSError as error:
        raise DataError(
            f"{path}: its samples cannot be kept in {cache_folder()}: {error}; set MEGASCEND_CACHE to one that can be written"
        ) from error
    # The same samples may be those of another setting, in another run or this one.
    store.sources = {f"data ({setting})" if name == "data" else name: value for name, value in store.sources.items()}
    if not len(store):
        remarks = "".join(f"; {line}" for line in store.remarks)
        raise DataError(f"no training samples: {path} holds no token to predict{remarks}")
    if store.has_pairs and not store.all_pairs:
        raise DataError(f"{path} holds preference pairs and other documents: they cannot be trained together")
    if store.has_labels and not store.all_labels:
        raise DataError(f"{path} holds completions with 'label' and other documents: they cannot be trained together")
    if store.has_margins and not store.all_margins:
        raise DataError(f"{path} holds pairs with 'margin' and others without: give each pair one, 0 for example")
    if store.has_candidates and not store.all_candidates:
        raise DataError(
            f"{path} holds documents with a teacher's distributions (top_ids) and others without: they cannot be trained together"
        )
    return store


def _in_cache(key: str, make: Callable[[Path], None], pictures: PictureProcessor | None) -> SampleStore:
    """Return the samples that the cache folder keeps under ``key``; they are made if there are none.

    One process of the machine makes them; the others wait at the lock and then map the same files.
    """
    limit, folder = cache_limit(), cache_folder() / "samples" / key
    is_new = not folder.exists()
    store = SampleStore(cached(folder, make, PATIENCE_S), pictures)
    # The data are the same, and pictures that they name are not.
    if (files_now := store.changed_files()) is not None:
        folder = folder.with_name(json_digest([key, files_now]))
        store = SampleStore(cached(folder, make, PATIENCE_S), pictures)
    # Only after adding an entry: the cache can only have grown then.
    if is_new:
        prune(folder.parent, limit, keep=folder)
    return store


def _encoded(path: Path, data: Data, encoder: Encoder, findings: Findings) -> Iterator[tuple[int, list[Sample]]]:
    documents = iterate_documents(path, data.split, data.columns or None, findings, data.config_name)
    reported = time.monotonic()
    for number, document in enumerate(with_mismatches(documents, findings)):
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            print(f"{path}: {number} documents turned into tokens so far", flush=True)
        with findings.collecting():
            yield number, encoder.encode(document, number)


def with_mismatches(documents: Iterator[Document], findings: Findings) -> Iterator[Document]:
    """Yield the documents in their order, each labelled one with the completion of another, to a different prompt.

    That is the nearest one before it; for those before the second prompt, the first one to that.
    """
    waiting: list[Document] = []
    # The last document, and the last one before it with another prompt.
    last: Document | None = None
    other: Document | None = None
    for document in documents:
        if document.label is None:
            yield document
            continue
        if last is not None and document.parts[0] != last.parts[0]:
            other = last
        last = document
        if other is None:
            waiting.append(document)
            continue
        for earlier in waiting:
            yield replace(earlier, mismatch=document.parts[1])
        waiting.clear()
        yield replace(document, mismatch=other.parts[1])
    with findings.collecting():
        if waiting:
            raise DataError(
                f"{waiting[0].source}: all labelled completions have one prompt, and kto estimates its reference point from a "
                "prompt with another's completion: add data of other prompts"
            )


def content_of(path: Path, files: Sequence[Path], setting: str) -> list[Any]:
    """Return what identifies data: digests of the files read (of a folder that datasets saved: all), and all files' names."""
    read = [entry for file in files for entry in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    # The names of all files, because datasets derives the splits from them.
    all_files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    if is_saved(path):
        read += [path / "dataset_dict.json"]
    try:
        digests = [[relpath(file, path), digest(file, xxhash.xxh3_128)] for file in read if file.is_file()]
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read ({setting}): {error.strerror or error}") from None
    return [str(path), digests, [relpath(file, path) for file in all_files]]


def json_digest(value: Any) -> str:
    """Return the hexadecimal digest of a value that JSON can hold."""
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tokenizer_of(model: Path) -> list[list[str]]:
    """Return what identifies a tokenizer: digests of all files of the model that are not weights, and of its chat templates."""
    patterns = ("*", "additional_chat_templates/*")
    files = sorted(file for pattern in patterns for file in model.glob(pattern) if file.is_file())
    return [[file.name, digest(file, xxhash.xxh3_128)] for file in files if file.suffix not in WEIGHTS]


def versions() -> list[str]:
    """Return versions of the packages that choose splits, render and tokenise, and digests of this package's own code."""
    # The code of this package, instead of a version to be increased by hand with each change of the format.
    code = [digest(file, xxhash.xxh3_128) for file in sorted(Path(__file__).parent.glob("*.py"))]
    return [*map(version, PACKAGES), *code]
