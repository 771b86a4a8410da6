"""Runs with a custom chat template that writes the date: resumed on another day, changed, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
KINDS = ["single", "single, lora", "fsdp", "megatron", "megatron, lora"]


@pytest.mark.nightly  # covered: models/checkpoint_files/test_files.py: beside an adapter
@pytest.mark.parametrize("kind", KINDS)
def test_run_keeps_its_date_and_exports_its_template(megascend, small_model: Path, tmp_path: Path, kind: str) -> None:
    engine, _, lora = kind.partition(", ")
    lines = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
        for n in range(8)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    settings = {
        "model": str(small_model),
        "output": "out",
        "data": {"path": "chat.jsonl", "chat_template": "own.jinja", "global_batch_size": 2},
        "steps": 1,
        "engine": engine,
        "platform": "cpu",
        "precision": "fp32",
        "checkpoint": {"every": 1},
        "plot": False,
        "lora": {"rank": 2} if lora else None,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    exported = tmp_path / "out" / ("adapter" if lora else "hf")

    first = megascend("train", "run.yaml", "--set", "template_date=2024-02-29", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "own.jinja in place of the model's; the export" in first.stdout
    assert AutoTokenizer.from_pretrained(exported).chat_template == TEMPLATE
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["template_date"] == "2024-02-29"

    # Today is another day. Only the template of the samples has changed: the date is the checkpoint's.
    changed = TEMPLATE.replace("###", "##")
    (tmp_path / "own.jinja").write_text(changed)
    refused = megascend("train", "run.yaml", "--resume", "auto", "--set", "steps=2", cwd=tmp_path)
    assert refused.returncode == 2
    message = "The samples changed and the data did not, by: chat template. Bring back what the run began with, or set "
    assert message + "data.on_changed: continue" in refused.stderr
    allowed = ("--set", "steps=2", "--set", "data.on_changed=continue")
    continued = megascend("train", "run.yaml", "--resume", "auto", *allowed, cwd=tmp_path)
    assert continued.returncode == 0, continued.stderr
    assert "the date that it writes is 2024-02-29" in continued.stdout
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("samples_changed") == 1
    assert AutoTokenizer.from_pretrained(exported).chat_template == changed
