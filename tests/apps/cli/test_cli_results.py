"""The export is checked before the first step; a failed export leaves a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import GenerationConfig

from support.forked_programs import PLUGGED_COMMAND, run_forked
from support.runs import chats, sets, write_lines, write_run

FAULT = """
import megascend
import megascend.backend
def fail(self, path, adapter=None):
    raise megascend.CheckpointError(f"export: {path} could not be written: No space left on device")
megascend.backend.Backend.export_hf = fail
"""


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Path:
    """Create a directory with data, settings and a model."""
    shutil.copytree(small_model, tmp_path / "model")
    write_lines(tmp_path / "chat.jsonl", chats([("up?", "down")]))
    data = {"path": "chat.jsonl", "global_batch_size": 1}
    write_run(tmp_path, model="model", engine="single", data=data, steps=2)
    return tmp_path


def test_failed_export_leaves_a_checkpoint_from_which_resume_exports(megascend, folder):
    (folder / "late_fault.py").write_text(FAULT)
    completed = run_forked(PLUGGED_COMMAND, "train", "run.yaml", *sets("plugins=[late_fault]"), directory=folder)
    assert completed.returncode == 2, completed.stderr
    [checkpoint] = (folder / "out" / "checkpoints").glob("step-*")
    message = " ".join(completed.stderr.split())
    assert "No space left on device" in message
    assert f"{checkpoint.relative_to(folder)} holds the trained state" in message
    assert "--resume auto exports it" in message
    assert not (folder / "out" / "hf").exists()

    megascend("train", "run.yaml", "--resume", "auto", cwd=folder)
    trained, before = (load_file(folder / path / "model.safetensors") for path in ("out/hf", "model"))
    assert set(trained) == set(before)
    assert any(not trained[name].equal(before[name]) for name in before)


IM_END, END_OF_TEXT = 257, 258


def with_base_ends(folder: Path) -> Path:
    """Make the model a base model, which ends texts with another token than the template's turns."""
    for file, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", END_OF_TEXT),
        ("generation_config.json", "eos_token_id", END_OF_TEXT),
    ):
        path = folder / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return folder


def answer(model: Path) -> tuple[str, int]:
    """Return what transformers generates, with its defaults, and the number of tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    question = [{"role": "user", "content": "up?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = network.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens), len(tokens)


def test_export_stops_at_the_end_that_was_learned(megascend, folder):
    with_base_ends(folder)
    settings = ("steps=40", "optimizer={lr: 2.0e-2}", "checkpoint={every: 40, hf: true}")
    for stream in ("{}", "{path: chat.jsonl, global_batch_size: 1, streaming: true, on_too_long: skip}"):
        values = [*settings, *([f"data={stream}"] if stream != "{}" else [])]
        megascend("train", "run.yaml", "--overwrite", *sets(*values), cwd=folder)
        [checkpoint] = (folder / "out" / "checkpoints").glob("step-*")
        for export in (folder / "out" / "hf", checkpoint / "hf"):
            assert answer(export) == ("down<|im_end|>", 5)
            assert GenerationConfig.from_pretrained(export).eos_token_id == [END_OF_TEXT, IM_END]


def test_adapter_names_the_end_that_was_learned(megascend, folder):
    with_base_ends(folder)
    completed = megascend("train", "run.yaml", *sets("steps=1", "lora={rank: 4}"), cwd=folder)
    assert f"ends its answers with token {IM_END}, at which model does not stop" in " ".join(completed.stderr.split())
    merge = ("model", "merged", "--adapter", "out", "--engine", "single", "--dtype", "fp32")
    megascend("export", *merge, cwd=folder)
    for path in ("out/adapter", "merged"):
        assert GenerationConfig.from_pretrained(folder / path).eos_token_id == [END_OF_TEXT, IM_END]
