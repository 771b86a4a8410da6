"""``megascend export``: a checkpoint through Megatron's model and back to Hugging Face format, in another precision."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class ExportType(str, Enum):
    """Type of the exported weights."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def export_command(
    model: Annotated[Path, typer.Argument(help="Hugging Face checkpoint, or run directory of `megascend train`.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    dtype: Annotated[ExportType, typer.Option("--dtype", help="Type of the exported weights.")] = ExportType.bf16,
) -> None:
    """Load MODEL into Megatron-Core and write it to OUT in Hugging Face format.

    Converts the precision, and shows that Megatron-Core and mcore-bridge can take the checkpoint. A run directory
    stands for the model that its training exported (RUN/hf).
    """
    from megascend.errors import ConfigError

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory; choose another one")
    source = find_checkpoint(model)

    import megascend

    megascend.bootstrap()
    backend = megascend.MegatronBackend(model=source, parallel=megascend.Parallel(), precision=dtype.value)
    try:
        backend.export_hf(out)
    finally:
        backend.close()
    typer.echo(f"{source} -> {out} ({dtype.value})")


def find_checkpoint(path: Path) -> Path:
    """The Hugging Face checkpoint that ``path`` stands for.

    Raises:
        CheckpointError: there is none; the message says what was found instead.
    """
    from megascend.errors import CheckpointError

    if (path / "config.json").is_file():
        return path
    if (path / "hf" / "config.json").is_file():
        return path / "hf"
    for adapter in (path, path / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{adapter} is a LoRA adapter, not a model. To merge it into its base model, in Python: "
                f"MegatronBackend(model=BASE, adapters=Adapters()), then load_adapter('default', {str(adapter)!r}) and "
                "export_hf(OUT, adapter='default')"
            )
    if (path / "metrics.jsonl").is_file():
        raise CheckpointError(
            f"{path} is a run directory without an exported model (no hf/): the run did not finish, or had "
            "export: false; sharded training checkpoints are not written by this version, so train it again"
        )
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the directory does not exist")
    raise CheckpointError(f"{path} holds neither config.json nor hf/config.json: not a Hugging Face checkpoint")
