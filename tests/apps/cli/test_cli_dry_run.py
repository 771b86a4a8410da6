"""``megascend train --dry-run``: its output; it leaves no files behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.apps.cli.dry_run_text import Style
from support.runs import write_lines, write_run

CHATS = [
    [("system", "Be kind."), ("user", "one?\nor two"), ("assistant", "two & café \x1b[31m"), ("user", "really?")],
    [("user", "red?"), ("assistant", "blue")],
    [("user", "up?"), ("assistant", "down")],
]


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    chats = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    chats[0].append({"role": "assistant", "content": "yes", "weight": 0.5})
    write_lines(folder / "chat.jsonl", ({"messages": chat} for chat in chats))
    write_lines(folder / "held_out.jsonl", [{"messages": chats[1]}])
    write_run(
        folder,
        model=str(small_model),
        data={"path": "chat.jsonl", "global_batch_size": 2, "shuffle": False},
        validation={"path": "held_out.jsonl"},
        steps=6,
        schedule={"kind": "linear", "total_steps": 4},
        engine="fsdp",
        precision="bf16",
    )
    return folder


def test_dry_run_shows_samples_masks_and_statistics(megascend, folder: Path) -> None:
    completed = megascend("train", "run.yaml", "--dry-run", "--nproc", "4", cwd=folder)
    assert "\x1b" not in completed.stdout
    output = completed.stdout
    assert "⟦two & café \\x1b[31m<|im_end|>⟧↵\n<|im_start|>user↵\nreally?<|im_end|>↵\n" in output
    assert "⟦0.5 x yes<|im_end|>⟧↵" in output
    assert "<|im_start|>user↵\nred?<|im_end|>↵\n<|im_start|>assistant↵\n⟦blue<|im_end|>⟧↵" in output
    # This tokenizer has one token for each byte and each special token; a sample has one input less than tokens.
    texts = [[f"\x00{role}\n{text}\x00\n" for role, text in chat] for chat in CHATS]
    texts[0].append("\x00assistant\nyes\x00\n")
    lengths = [len("".join(chat).encode()) - 1 for chat in texts]
    supervised = sum(len(text.encode()) + 1 for text in (CHATS[0][2][1], "yes", "blue", "down"))
    [row] = [line.split() for line in output.splitlines() if line.startswith("learned")]
    assert row[1:5] == ["3", f"{sum(lengths):,}", str(supervised), f"({supervised / sum(lengths):.0%})"]
    assert (row[5], row[-1]) == (str(min(lengths)), str(max(lengths)))
    [row] = [line.split() for line in output.splitlines() if line.startswith("held out")]
    assert row[2:5] == ["1", str(lengths[1]), "5"]
    assert "6 of 2 samples = 4 epochs; one micro batch a rank" in output
    assert f"the largest with {max(lengths)} of 4096 tokens" in output
    assert "4 ranks = tensor 1 x context 1 x data 4" in output
    [line] = [line for line in output.splitlines() if line.startswith("  parameters")]
    assert line.split() == ["parameters", "0.0", "MiB"]  # 45 thousand, in fp32, a quarter of them
    for item in ("moments", "activations", "output head", "total", "recomputed"):
        assert f"\n  {item} " in output
    assert "per rank on this machine" in output
    assert "data parallel ranks have no sample in a step" in output
    assert "schedule.total_steps: 4 ends before the 6 steps do" in output
    assert not (folder / "out").exists()


# --- formatting ---


def test_ascii_output_gets_escapes() -> None:
    style = Style(colour=False, unicode=False)
    text = style.piece(style.visible("café\n\x07"), 0.5)
    assert text == "[[0.5 x caf\\xe9\\n\n\\x07]]"
    assert text.isascii()
