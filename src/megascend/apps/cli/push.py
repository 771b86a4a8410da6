"""``megascend push``: upload an exported model or adapter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from megascend.apps.train.exports import find_export
    from megascend.apps.train.push import push
    from megascend.config import Push
    from megascend.models.checkpoint_files import hub

    settings = Push(repository=repository, private=not public)
    export = find_export(directory)
    hub.check_access(repository)
    typer.echo(f"{export} -> {push(export, settings)}")
