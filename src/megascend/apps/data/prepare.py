"""Make the samples of a run from its data settings; all problems of the data are reported here, before training."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megascend.apps.data.chat import check_template, writes_date
from megascend.apps.data.document import Document
from megascend.apps.data.files import iterate_documents, read_template
from megascend.apps.data.findings import Findings
from megascend.apps.data.images import ImageProcessor
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.apps.data.splits import CARD, SplitFiles, file_states, is_saved
from megascend.apps.data.store import Samples, write_store
from megascend.config import Data
from megascend.config.data import DataSource
from megascend.errors import DataError
from megascend.models.checkpoint_files import hub
from megascend.runtime.io.hashing import digest
from megascend.runtime.io.paths import cache_folder, cache_limit
from megascend.runtime.io.shared import cached, locked, prune
from megascend.runtime.io.shared import replace as replace_path
from megascend.training.batch.sample import Sample

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
PREPARED = "prepared.json"
"""File of a prepared folder: what its samples were made from."""
PAIR_LIMITS = "limits of pairs"
DATE = "date in the chat template"
DIGEST = re.compile("[0-9a-f]{32}")
PATIENCE_S = 7 * 24 * 3600.0
"""Seconds that a rank waits for another one on its machine that tokenises the same data; a lock ends with its process."""


def set_template(data: Data, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give the tokenizer the chat template that the settings name; return its text, or None where they name none."""
    template = read_template(data.chat_template)
    if template is not None and data.chat_template is not None:
        check_template(template, data.chat_template)
        tokenizer.chat_template = template
    return template


@dataclass(frozen=True)
class Recipe:
    """What documents become samples by: settings, tokenizer with the chat template, limits, date, images, and model files."""

    data: Data
    tokenizer: PreTrainedTokenizerBase
    limits: SampleLimits
    day: date
    image_processor: ImageProcessor | None
    files: list[list[str]]

    @classmethod
    def of(
        cls,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        limits: SampleLimits,
        model: Path,
        template_date: date | None = None,
    ) -> Recipe:
        """Give the tokenizer its template, and inspect the model's directory; ``template_date``: by default today."""
        set_template(data, tokenizer)
        image_processor = ImageProcessor.for_model(model, data.images)
        return cls(data, tokenizer, limits, template_date or date.today(), image_processor, tokenizer_of(model))

    def encoder(self, findings: Findings) -> Encoder:
        """Return the encoder, which reports to ``findings``."""
        return Encoder(
            self.tokenizer,
            self.limits,
            findings,
            train_on_prompt=self.data.train_on_prompt,
            on_too_long=self.data.on_too_long,
            template_options=self.data.chat_template_options,
            template_date=self.day,
            image_processor=self.image_processor,
        )

    def inputs(self, content: str, data: Data | None = None) -> dict[str, str]:
        """Return what samples are made from, by name: digests or values; ``content`` identifies the data.

        ``data``: settings of the source; default: those of the recipe.
        """
        names = {"split", "config_name", "columns", "train_on_prompt", "on_too_long", "chat_template_options"}
        names |= set() if self.image_processor is None else {"images"}
        settings = (data or self.data).model_dump(mode="json", include=names)
        limits = self.limits
        return {
            "data": content,
            **{f"data.{name}": json.dumps(value) for name, value in settings.items()},
            "chat template": json_digest(self.tokenizer.chat_template),
            **({DATE: self.day.isoformat()} if writes_date(self.tokenizer) else {}),
            **{name: code for name, code in self.files if name.startswith(TOKENIZER)},
            "longest sample": str(limits.length),
            **({} if limits.labels is None else {"labels": json.dumps([asdict(limits.labels), limits.padding])}),
            f"versions of {', '.join(PACKAGES)} or megascend": json_digest(versions()),
        }


def prepare_samples(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    limits: SampleLimits,
    model: Path,
    template_date: date | None = None,
) -> Samples:
    """Return the samples of a source, tokenised once on this machine and kept in the cache folder.

    One rank of a machine writes, the others wait for it, without a process group. ``model``: directory of the tokenizer.
    """
    path, data, setting = source.path, source.data, source.setting
    if data.prepared is None:
        # Before the model is read: reports problems of the folder.
        split = SplitFiles.of(path, data.split, data.config_name, Findings(setting))
        store = _cached_store(split, Recipe.of(data, tokenizer, limits, model, template_date))
    else:
        store = _prepared_store(source, data.prepared, Recipe.of(data, tokenizer, limits, model, template_date))
    # The same samples may be those of another setting, in another run or this one.
    store.sources = named_inputs(store.sources, setting)
    check_store(store, path)
    return store


def _cached_store(split: SplitFiles, recipe: Recipe) -> Samples:
    """Return the samples of a split from the cache folder, where they are kept once they are made."""
    path, setting, image_processor = split.path, split.setting, recipe.image_processor
    # Before the digests: what changes after them is noticed, and not kept as samples of the content that they are of.
    states = file_states(split.files)
    content = content_of(split)
    inputs = recipe.inputs(json_digest(content[1]))
    # The key of the cache: all that decides about tokens and weights, so that a change of any of it makes new samples.
    # Paths of images are relative to the data, whose own path may be relative to the working directory.
    location = None if image_processor is None else str(path.resolve())
    key = json_digest([inputs, content, recipe.files, asdict(recipe.limits), location])

    def make(fresh: Path) -> None:
        findings = Findings(setting)
        documents = _encoded(path, recipe.data, recipe.encoder(findings), findings)
        write_store(fresh, documents, findings, inputs, scored=recipe.limits.scored)
        changed = [file for file, state in file_states(split.files).items() if states.get(file) != state]
        # A new time of modification is not a change.
        if changed and content_of(split)[1] != content[1]:
            raise DataError(f"{changed[0]} ({setting}) has changed while it was read: start again once it is complete")
        # After write_store: raising here makes cached() discard the directory, so only data without problems is kept.
        findings.raise_problems()

    limit, folder = cache_limit(), cache_folder() / "samples" / key
    is_new = not folder.exists()
    try:
        # One process of the machine makes them; the others wait at the lock and then map the same files.
        store = Samples.open(cached(folder, make, PATIENCE_S), image_processor)
        # The data are the same, and images that they name are not.
        if (files_now := store.changed_files()) is not None:
            folder = folder.with_name(json_digest([key, files_now]))
            store = Samples.open(cached(folder, make, PATIENCE_S), image_processor)
        # Only after adding an entry: the cache can only have grown then.
        if is_new:
            prune(folder.parent, limit, keep=folder)
    except OSError as error:
        raise DataError(
            f"{path}: its samples cannot be kept in {cache_folder()}: {error}; set MEGASCEND_CACHE to one that can be written"
        ) from error
    return store


def check_store(store: Samples, path: Path) -> None:
    """Raise DataError if there are no samples of the data at ``path``, or if they cannot be trained on together."""
    if not len(store):
        remarks = "".join(f"; {line}" for line in store.remarks)
        raise DataError(f"no training samples: {path} holds no token to predict{remarks}")
    problems = {
        "pairs": "preference pairs and other documents: they cannot be trained together",
        "labels": "completions with 'label' and other documents: they cannot be trained together",
        "margins": "pairs with 'margin' and others without: give each pair one, 0 for example",
        "candidates": "documents with a teacher's distributions (top_ids) and others without: they cannot be trained together",
    }
    for name, problem in problems.items():
        if name in store.partial:
            raise DataError(f"{path} holds {problem}")


def write_prepared(
    folder: Path, stores: Mapping[str, Samples], limits: SampleLimits, paths: Mapping[str, Path]
) -> None:
    """Write stores to a new folder for ``data.prepared``; they and the paths of their data are by the setting that names them."""

    def make(fresh: Path) -> None:
        fresh.mkdir()
        entries = []
        for number, (setting, store) in enumerate(stores.items()):
            target = fresh / f"{number}"
            shutil.copytree(store.path, target)
            sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
            inputs = store.sources | (pair_inputs(limits) if store.has_pairs else {})
            name = _data_name(paths[setting])
            entries.append({"setting": setting, "name": name, "folder": target.name, "files": sizes, "inputs": inputs})
        (fresh / PREPARED).write_text(json.dumps({"data": entries}, indent=1) + "\n", encoding="utf-8")

    try:
        with locked(folder):
            replace_path(folder, make)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error


def _prepared_store(source: DataSource, folder: Path, recipe: Recipe) -> Samples:
    """Return the samples of :func:`write_prepared`, after comparing what they were made from, and the data if they are there."""
    path, data, setting = source.path, source.data, source.setting
    try:
        entries = {entry["setting"]: entry for entry in json.loads((folder / PREPARED).read_bytes())["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.prepared: {folder} is no folder of megascend prepare --output ({error})") from None
    if setting not in entries:
        raise DataError(
            f"data.prepared: {folder} has no samples of {setting}; it has those of {', '.join(entries)}: prepare this run file"
        )
    entry = entries[setting]
    for name, size in entry["files"].items():
        file = folder / entry["folder"] / name
        if not file.is_file() or file.stat().st_size != size:
            raise DataError(f"data.prepared: {file} is missing or incomplete ({size} bytes written): copy it again")
    content = entry["inputs"][f"data ({setting})"]
    name = entry.get("name")  # None in folders of earlier versions
    if not path.exists() and name not in (None, _data_name(path)):
        # Sources in another order would be mixed by the weights of others.
        raise DataError(
            f"data.prepared: {folder} has samples of {name} as {setting}, which is {path} now: name and order the data as they "
            "were prepared"
        )
    if path.exists():
        split = SplitFiles.of(path, data.split, data.config_name, Findings(setting))
        content = json_digest(content_of(split)[1])
    now, saved = named_inputs(recipe.inputs(content), setting) | pair_inputs(recipe.limits), entry["inputs"]
    if PAIR_LIMITS not in saved:
        del now[PAIR_LIMITS]
    changed = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if changed:
        values = ", ".join(
            f"{name} ({saved.get(name, 'none')}, now {now.get(name, 'none')})"
            if not DIGEST.fullmatch(saved.get(name, ""))
            else name
            for name in changed
        )
        day = f"; template_date: {saved[DATE]} is that of the folder" if DATE in changed and DATE in saved else ""
        raise DataError(
            f"data.prepared: {folder} was prepared from something else: {values}. Prepare it again, or leave data.prepared out "
            f"to tokenise here{day}"
        )
    store = Samples.open(folder / entry["folder"], recipe.image_processor)
    if (images_now := store.changed_files()) is not None:
        missing = next((file for file, size, _ in images_now if size < 0), None)
        problem = f"{missing} is missing" if missing else "files of images have changed"
        raise DataError(f"data.prepared: {folder}: {problem}: images stay where they were: prepare it again here")
    return store


def _data_name(path: Path) -> str:
    """Return the last part of a path, or of the name on the Hub that a snapshot's directory was downloaded by."""
    repository = hub.repository_of(path) if path.parent.name == "snapshots" else None
    return Path(repository or path).name.partition("@")[0]


def pair_inputs(limits: SampleLimits) -> dict[str, str]:
    """Return the limits on pairs, which samples depend on in addition to :meth:`Recipe.inputs`."""
    layout = f"{limits.budget} tokens, multiples of {limits.multiple}, packing {limits.packing}"
    head = f"a scalar head, padding token {limits.padding}" if limits.scored else "logits"
    return {PAIR_LIMITS: f"{layout}, for {head}"}


def named_inputs(inputs: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return :meth:`Recipe.inputs` with the names of the data's own settings as ``setting`` has them."""
    names = {"data": f"data ({setting})"}
    if setting.startswith("data.sources"):
        names |= {f"data.{name}": f"{setting}.{name}" for name in ("split", "config_name", "columns")}
    return {names.get(name, name): value for name, value in inputs.items()}


def _encoded(path: Path, data: Data, encoder: Encoder, findings: Findings) -> Iterator[tuple[int, list[Sample]]]:
    documents = iterate_documents(path, data.split, data.columns or None, findings, data.config_name)
    reported = time.monotonic()
    if not encoder.classifies:
        documents = with_mismatches(documents, findings)
    for number, document in enumerate(documents):
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            print(f"{path}: {number} documents turned into tokens so far", flush=True)
        findings.kinds[document.kind] = findings.kinds.get(document.kind, 0) + 1
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
        if last is not None and isinstance(document.parts[0], str) != isinstance(last.parts[0], str):
            form, earlier = ("text", "messages") if isinstance(document.parts[0], str) else ("messages", "text")
            findings.problem(
                f"{document.source}: a labelled completion of {form}, and others of {earlier}: kto reads completions after other "
                "prompts, so that all must have one form"
            )
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


def content_of(split: SplitFiles) -> list[Any]:
    """Return what identifies data: digests of the files read (of a folder that datasets saved: all), and all files' names."""
    path = split.path
    read = [entry for file in split.files for entry in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    # The names of all files, because datasets derives the splits from them.
    all_files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    if is_saved(path):
        read += [path / "dataset_dict.json"]
    try:
        digests = [[relpath(file, path), digest(file, xxhash.xxh3_128)] for file in read if file.is_file()]
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read ({split.setting}): {error.strerror or error}"
        ) from None
    # Not all of the card, whose text does not matter.
    if split.features:
        digests.append([CARD, str(split.features)])
    return [str(path), digests, [relpath(file, path) for file in all_files]]


def json_digest(value: Any) -> str:
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
