"""``megascend export``: pass a checkpoint through an engine's model and write it in Hugging Face format.

The result has another precision, or a LoRA adapter merged into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megascend.apps.cli import options


def export_command(
    model: Annotated[
        Path, typer.Argument(help="Hugging Face checkpoint, Hub name, or run directory of `megascend train`.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    dtype: options.Dtype = "bf16",
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
    from megascend.apps.train.exports import find_adapter, find_checkpoint, head_of, stored_head, warn_of_other_base
    from megascend.models.checkpoint_files.files import end_tokens
    from megascend.runtime.io.atomic import require_vacant

    # Checked before the model is loaded, which may take minutes.
    require_vacant(out)
    source = find_checkpoint(model)
    settings: dict[str, Any] = {"model": source, "precision": dtype}
    if (stored := stored_head(source)) is not None:
        settings["head"] = stored
    if adapter is not None:
        from megascend.config import Adapters
        from megascend.training.lora import peft_format
        from megascend.training.lora.target_modules import HEAD

        adapter = find_adapter(adapter)
        lora, factors = peft_format.read(adapter)
        settings["adapters"] = Adapters(max_count=1, max_rank=lora.rank, targets=lora.targets)
        if HEAD in factors:
            settings["head"] = head_of(adapter, len(factors[HEAD].b), source)
        warn_of_other_base(adapter, source)

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
    typer.echo(f"{source}{'' if adapter is None else f' with {adapter} merged'} -> {out} ({dtype})")
