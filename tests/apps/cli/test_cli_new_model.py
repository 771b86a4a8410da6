"""``megascend new-model``: plain transformers loads its models; the tokenizer has one token a byte."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megascend.apps.cli.random_checkpoint import (
    ModelSize,
    byte_characters,
    byte_tokenizer,
    hf_settings,
)
from megascend.models.registry import BUILT_IN
from support.forked_programs import run_forked

TEXT = "Héllo,  \n\tworld 你好 <b>{}</b> don't"

# Runs without megascend.
LOAD = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
answers = {}
for path in sys.argv[2:]:
    takes_images = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    model, tokenizer = loader.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": sys.argv[1]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = tokenizer(sys.argv[1])["input_ids"]
    answers[path] = {
        "class": type(model).__name__, "ids": ids, "text": tokenizer.decode(ids),
        "prompt": tokenizer.decode(prompt["input_ids"][0]), "vocab": model.get_input_embeddings().weight.shape[0],
        "generated": model.generate(**prompt, max_new_tokens=3, eos_token_id=None).shape[1] - prompt["input_ids"].shape[1],
        "eos": [tokenizer.eos_token_id, model.generation_config.eos_token_id], "dtype": str(model.dtype),
    }
assert "megascend" not in sys.modules
print(json.dumps(answers))
"""


# One process for many checkpoints: importing transformers takes longer than writing them.
WRITE = """
import json, sys
from pathlib import Path
from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
for path, seed, size in json.loads(sys.argv[1]):
    write_checkpoint(Path(path), ModelSize(**size), seed)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked(code, *arguments)


def write(*checkpoints: tuple[Path, int, dict]) -> None:
    """Write checkpoints given as (directory, seed, size)."""
    completed = run(WRITE, json.dumps([(str(path), seed, size) for path, seed, size in checkpoints]))
    assert completed.returncode == 0, completed.stderr


@pytest.mark.nightly  # covered: the command; every tiny model is used by parity
def test_plain_transformers_loads_every_architecture(tmp_path: Path) -> None:
    # Kimi-K2 is not known to transformers: its users trust the code beside its weights, or import megascend's registration.
    entries = {arch: entry for arch, entry in BUILT_IN.items() if entry.transformers is None}
    paths = [tmp_path / arch for arch in entries]
    write(*((path, 0, {"arch": path.name, "hidden": 32, "layers": 2}) for path in paths))
    completed = run(LOAD, TEXT, *map(str, paths))
    assert completed.returncode == 0, completed.stderr
    assert "RoPE" not in completed.stderr  # transformers warns of lengths and a factor that contradict each other
    answers = json.loads(completed.stdout.splitlines()[-1])
    assert [answers[str(path)]["class"] for path in paths] == [entry.model_class for entry in entries.values()]
    for answer in answers.values():
        assert answer["ids"] == list(TEXT.encode())
        assert answer["text"] == TEXT
        assert answer["prompt"] == f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
        assert answer["vocab"] == 320
        assert answer["generated"] == 3
        assert answer["eos"] == [257, 257]
        assert answer["dtype"] == "torch.float32"


def test_every_byte_has_a_token() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert characters[ord("a")] == "a"
    assert characters[ord(" ")] == "Ġ"  # as in every byte-level vocabulary since GPT-2
    assert characters[ord("\n")] == "Ċ"
    tokenizer = byte_tokenizer(128)
    text = "".join(map(chr, range(0x20, 0x800)))
    assert tokenizer(text)["input_ids"] == list(text.encode())


def test_vocabulary_is_padded_for_tensor_parallelism() -> None:
    assert hf_settings(ModelSize())["vocab_size"] == 320
    assert hf_settings(ModelSize(vocab=300))["vocab_size"] == 300
