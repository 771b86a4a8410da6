"""``megascend export`` and ``megascend push``: write a checkpoint in Hugging Face format, and upload it.

An export passes the checkpoint through an engine's model: in another precision, or with a LoRA adapter merged into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megascend.config.documents import load_json, load_yaml

if TYPE_CHECKING:
    from megascend.config import Classification, Lora


def weight_type(text: str) -> str:
    """Parse the name of a precision, in any of its spellings."""
    from megascend.config.training import PRECISIONS, precision_name

    if (name := precision_name(text)) not in PRECISIONS.values():
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(dict.fromkeys(PRECISIONS.values()))}")
    return name


def export_command(
    model: Annotated[
        Path, typer.Argument(help="Hugging Face checkpoint, Hub name, or run directory of `megascend train`.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    dtype: Annotated[
        str, typer.Option("--dtype", parser=weight_type, metavar="fp32|fp16|bf16", help="Type of the exported weights.")
    ] = "bf16",
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter", metavar="DIR", help="Merge this LoRA adapter into MODEL: a run directory, or what peft wrote."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="What loads the model: megatron, single (transformers) or fsdp.")
    ] = "megatron",
) -> None:
    """Load MODEL into an engine and write it to OUT in Hugging Face format.

    Converts the precision, merges an adapter, and shows that the engine can take the checkpoint. A run directory stands for the
    model that its training exported (RUN/hf).
    """
    from megascend.models.checkpoint_files.files import end_tokens
    from megascend.runtime.io.atomic import require_vacant

    # Checked before the model is loaded, which may take minutes.
    require_vacant(out)
    source = find_checkpoint(model)
    settings: dict[str, Any] = {"model": source, "precision": dtype}
    if (stored := stored_head(source)) is not None:
        settings["head"] = stored
    merged = ""
    if adapter is not None:
        from megascend.config import Adapters

        adapter = find_adapter(adapter)
        lora, head_rows = read_settings(adapter)
        settings["adapters"] = Adapters(max_count=1, max_rank=lora.rank, targets=lora.targets)
        if head_rows:
            settings["head"] = head_of(adapter, head_rows, source)
        merged = f" with {adapter} merged"
        # A warning only: the recorded name may be a path on another machine, or a name on the Hub.
        if (trained_on := other_base(adapter, source)) is not None:
            typer.secho(
                f"{adapter} says that it was trained on {trained_on}, and is merged into {source}: make sure that these are "
                "the same model",
                fg=typer.colors.YELLOW,
                err=True,
            )

    import megascend

    megascend.bootstrap(engine=engine)
    backend = megascend.make_backend(engine, **settings)
    try:
        if adapter is not None:
            backend.load_adapter("default", adapter, optimizer=False)
            template = adapter / "chat_template.jinja"  # the template it was trained with
            backend.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
            backend.ends = end_tokens(adapter)
        backend.export_hf(out, adapter=None if adapter is None else "default")
    finally:
        backend.close()
    typer.echo(f"{source}{merged} -> {out} ({dtype})")


def find_adapter(path: Path) -> Path:
    """Return the adapter in peft's format at ``path``: the directory itself, or that of a run."""
    from megascend.errors import CheckpointError
    from megascend.models.checkpoint_files.hub import snapshot

    path = snapshot(path, setting="--adapter")
    # A run directory holds its adapter there.
    for folder in (path, path / "adapter"):
        if (folder / "adapter_config.json").is_file():
            return folder
    problem = "holds no adapter_config.json" if path.exists() else "does not exist"
    raise CheckpointError(
        f"--adapter {path} {problem}; expected what peft's save_pretrained writes, or the directory of a finished run with lora"
    )


def read_settings(adapter: Path) -> tuple[Lora, int]:
    """Return the adapter's rank and targets, and the labels of its scalar head, 0 without; reject anything beyond plain LoRA."""
    from megascend.training.lora import peft_format
    from megascend.training.lora.target_modules import HEAD

    lora, factors = peft_format.read(adapter)
    return lora, len(factors[HEAD].b) if HEAD in factors else 0


def head_of(adapter: Path, rows: int, model: Path) -> Literal["reward_model"] | Classification:
    """Return the kind of an adapter's head of so many labels: as recorded with it, in its run, or with the model."""

    from megascend.config import Classification
    from megascend.config.data import default_labels
    from megascend.errors import CheckpointError
    from megascend.models.checkpoint_files.files import read_config
    from megascend.training.lora.adapter_io import read_head

    recorded = read_head(adapter)
    if recorded is not None:
        labels, problem_type = recorded
        if len(labels) != rows:
            raise CheckpointError(
                f"{adapter} records {len(labels)} labels ({', '.join(labels)}), and its head has {rows} rows: copy it again"
            )
        if problem_type is None:
            return "reward_model"
        names: dict[str, Any] = {"num_labels": rows} if labels == default_labels(rows) else {"labels": labels}
        return Classification(problem_type=problem_type, **names)
    # A relative path may not name the run's directory.
    run_file = adapter.resolve().parent / "config.yaml"
    if run_file.is_file():
        values = load_yaml(run_file.read_text(encoding="utf-8"))
        settings = (values.get("classification") if isinstance(values, dict) else None) or {}
        if not settings and rows == 1:
            return "reward_model"
        if settings:
            head = Classification.model_validate(settings)
            if head.label_names is not None and len(head.label_names) != rows:
                raise CheckpointError(
                    f"{run_file} names {len(head.label_names)} labels ({', '.join(head.label_names)}), and the head of "
                    f"{adapter} has {rows} rows: does the adapter belong to this run?"
                )
            return head if head.label_names is not None else head.model_copy(update={"num_labels": rows})
    problem_type = read_config(model).get("problem_type")
    unknown = f"neither {adapter} nor a run's directory above it tells what its head of {rows} label{'s' * (rows > 1)} learned"
    if rows == 1 and problem_type is None:
        typer.secho(f"{unknown}: exported as a reward model, without problem_type", fg=typer.colors.YELLOW, err=True)
        return "reward_model"
    problem_type = problem_type or "single_label_classification"
    typer.secho(
        f"{unknown}: exported with the names of {model}, or as {' to '.join(dict.fromkeys(('LABEL_0', f'LABEL_{rows - 1}')))}, "
        f"and problem_type: {problem_type}",
        fg=typer.colors.YELLOW,
        err=True,
    )
    return Classification(num_labels=rows, problem_type=problem_type)


def other_base(adapter: Path, model: Path) -> str | None:
    """Return the adapter's recorded base model if it differs from ``model`` in path or, if that is gone, in name."""
    from megascend.models.checkpoint_files.hub import repository_of

    try:
        base_name = load_json((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(base_name, str) or not base_name:
        return None
    base = Path(base_name)
    name = (repository_of(model) or model.resolve().name).rpartition("/")[2]
    same = base.resolve() == model.resolve() if base.is_dir() else base.name == name
    return None if same else base_name


def stored_head(model: Path) -> Literal["scalar"] | Classification | None:
    """Return the kind of a checkpoint's scalar head by its configuration; None for a language model."""
    from megascend.config import Classification
    from megascend.models.checkpoint_files.files import read_config, tensor_headers
    from megascend.models.checkpoint_files.scalar_head import WEIGHT

    header, config = tensor_headers(model).get(WEIGHT), read_config(model)
    if header is None:
        return None
    rows, problem_type = header.shape[0], config.get("problem_type")
    if rows == 1 and problem_type in (None, "regression"):
        return "scalar"
    # transformers' pipelines read several labels without a problem type so, too.
    return Classification(num_labels=rows, problem_type=problem_type or "single_label_classification")


def find_checkpoint(path: Path) -> Path:
    """Return the Hugging Face checkpoint at ``path``: itself, a run's export, or downloaded from the Hub."""
    from megascend.apps.train.run_directory import METRICS
    from megascend.errors import CheckpointError
    from megascend.models.checkpoint_files.hub import snapshot

    path = snapshot(path, setting="MODEL")
    if (path / "config.json").is_file():
        return path
    if (path / "hf" / "config.json").is_file():
        return path / "hf"
    for adapter in (path, path / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{adapter} is a LoRA adapter, not a model. To merge it into its base model: megascend export BASE OUT "
                f"--adapter {adapter}"
            )
    if (path / METRICS).is_file():
        raise CheckpointError(
            f"{path} is a run directory without an exported model (no hf/), unfinished or with export: false; train it to its "
            "end with megascend train --resume auto"
        )
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the directory does not exist")
    raise CheckpointError(f"{path} holds neither config.json nor hf/config.json: not a Hugging Face checkpoint")


def push_command(
    directory: Annotated[
        Path, typer.Argument(help="Exported model or adapter, or run directory of `megascend train` or `rl`.")
    ],
    repository: Annotated[str, typer.Argument(help="Model on the Hub, NAMESPACE/NAME; created if it does not exist.")],
    public: Annotated[
        bool, typer.Option("--public", help="Create it as a public repository; one that exists stays as it is.")
    ] = False,
) -> None:
    """Upload DIRECTORY to REPOSITORY on the Hugging Face Hub, with a model card if it has none.

    The token is that of HF_TOKEN, or of `hf auth login`.
    """
    from megascend.apps.train.push import find_export, push
    from megascend.config import Push
    from megascend.models.checkpoint_files import hub

    settings = Push(repository=repository, private=not public)
    export = find_export(directory)
    hub.check_access(repository)
    typer.echo(f"{export} -> {push(export, settings)}")
