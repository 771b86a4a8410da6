"""Upload of a run's export to the Hugging Face Hub, with a model card."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megascend.apps.train.event_log import EVENTS, read_lines
from megascend.apps.train.exports import ADAPTER_CONFIG, run_settings, setting
from megascend.apps.train.run_directory import METRICS
from megascend.config import Push
from megascend.config.documents import load_json
from megascend.errors import HubError
from megascend.models.checkpoint_files import hub
from megascend.runtime.io.atomic import replacing

CARD = "README.md"
CARD_SETTINGS = (
    *("optimizer.kind", "optimizer.lr", "optimizer.weight_decay", "schedule.kind", "schedule.warmup_steps"),
    *("data.global_batch_size", "rollout.prompts_per_step", "rollout.group_size", "batching.max_length"),
    *("lora.rank", "lora.alpha", "lora.targets", "base_weights", "precision", "engine", "seed"),
)
"""Settings of a run that a card lists, if it has them."""


def push(directory: Path, settings: Push) -> str:
    """Upload an exported model or adapter, with a card if it has none, and return the address of the commit.

    Raises:
        HubError: nothing, or not everything, was uploaded; the message has the command that repeats it.
    """
    try:
        write_card(directory)
        hub.create_repository(settings.repository, private=settings.private)
        with tempfile.TemporaryDirectory() as folder:
            source = with_base_model(directory, Path(folder))
            return hub.upload(source, settings.repository, f"Upload {directory.resolve().name} trained with megascend")
    except (HubError, OSError) as error:
        public = "" if settings.private else " --public"
        raise HubError(
            f"{directory} is complete, but was not uploaded: {error}. To repeat it: megascend push "
            f"{shlex.quote(str(directory))} {settings.repository}{public}"
        ) from error


def with_base_model(directory: Path, folder: Path) -> Path:
    """Return the directory to upload: links in ``folder`` where the adapter's base model has another name on the Hub."""
    file = directory / ADAPTER_CONFIG
    config = load_json(file.read_bytes()) if file.is_file() else {}
    repository = hub.repository_of(config.get("base_model_name_or_path") or "")
    if repository is None:
        return directory
    # The recorded path is one in this machine's cache.
    for path in directory.rglob("*"):
        if path.is_file() and path != file:
            link = folder / path.relative_to(directory)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    changed = config | {"base_model_name_or_path": repository}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return folder


# --- the model card ---


def write_card(directory: Path) -> None:
    """Write README.md, unless the directory has one: base model, data, settings and steps, as far as the run's files tell."""
    if not (directory / CARD).exists():
        with replacing(directory / CARD) as fresh:
            fresh.write_text(model_card(directory), encoding="utf-8")


def model_card(directory: Path) -> str:
    """Return the model card of an exported directory, which may be inside its run's directory."""
    import yaml

    run = run_settings(directory.resolve().parent)
    is_adapter = (directory / ADAPTER_CONFIG).is_file()
    base = run.get("model")
    if base is None and is_adapter:
        base = load_json((directory / ADAPTER_CONFIG).read_bytes()).get("base_model_name_or_path")
    data = list(_data_paths(run))
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["megascend"]}
    # The Hub refuses cards whose metadata name a model or data that are not on it.
    if base is not None and (repository := hub.repository_of(base)) is not None:
        metadata["base_model"] = repository
    if datasets := [repository for path in data if (repository := hub.repository_of(path)) is not None]:
        metadata["datasets"] = datasets
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {_title(directory)}", ""]
    kind = "LoRA adapter" if is_adapter else "model"
    lines += [f"A {kind} trained with megascend {_version()}.", ""]
    facts = {"base model": _name(base)} if base is not None else {}
    if data:
        facts["data"] = ", ".join(map(_name, data))
    facts |= _progress(directory.resolve().parent) if run else {}
    facts |= {key: _text(value) for key in CARD_SETTINGS if (value := setting(run, key)) is not None}
    if facts:
        rows = [f"| {name} | {value} |" for name, value in facts.items()]
        lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _progress(output: Path) -> dict[str, str]:
    rows = {row["step"]: row for row in read_lines(output / METRICS)[0] if "step" in row}
    if not rows:
        return {}
    last = max(rows)
    ends = [event for event in read_lines(output / EVENTS)[0] if event.get("event") == "finished"]
    exported = ends[-1].get("exported_step", last) if ends else last
    loss = rows.get(exported, {}).get("loss")
    title = "loss of the last step" if exported == last else f"loss of step {exported}"
    steps = str(last) if exported == last else f"{exported}, the best one of {last}"
    return {"steps": steps} | ({title: f"{loss:.4g}"} if isinstance(loss, float) else {})


def _data_paths(run: Mapping[str, Any]) -> Iterator[str]:
    data = run.get("data") or {}
    paths = [data.get("path"), *(source.get("path") for source in data.get("sources") or [])]
    yield from (str(path) for path in (*paths, setting(run, "rollout.prompts")) if path)


def _name(path: str) -> str:
    """Return the repository of a path in the Hub's cache, else its last part: other paths are private."""
    return hub.repository_of(path) or Path(path).name


def _title(directory: Path) -> str:
    resolved = directory.resolve()
    return resolved.parent.name if resolved.name in ("hf", "adapter") else resolved.name


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _version() -> str:
    import megascend

    return megascend.__version__
