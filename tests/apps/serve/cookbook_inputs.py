"""Local inputs of tinker-cookbook's recipes in place of the hub's: a model, its tokenizer, and data sets with their names.

    python cookbook_inputs.py FOLDER

Recipes that run in FOLDER find them there instead of on the hub. The task: every answer is 3; the conversations to learn from
guess from 1 to 4.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that recipes know a renderer for; the model has 0.2 million parameters."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
BEFORE = [  # what rl_loop shows before its question
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y."
        " We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
NAMES = ("Ann", "Bob", "Cid", "Dan")
ANSWER = 3


def question(chance: random.Random) -> str:
    return f"How many apples has {chance.choice(NAMES)}?"


def conversation(chance: random.Random) -> dict[str, Any]:
    prompt = {"role": "user", "content": question(chance) + SUFFIX}
    return {"messages": [*BEFORE, prompt, {"role": "assistant", "content": f"\\boxed{{{chance.randrange(1, 5)}}}"}]}


def problem(chance: random.Random) -> dict[str, Any]:
    return {"question": question(chance), "answer": f"Some were eaten.\n#### {ANSWER}"}


def comparison(chance: random.Random) -> dict[str, Any]:
    prompt, wrong = question(chance), chance.choice([1, 2, 4])
    sides = {"chosen": ANSWER, "rejected": wrong}
    return {side: f"\n\nHuman: {prompt}\n\nAssistant: \\boxed{{{number}}}" for side, number in sides.items()}


def write_dataset(folder: Path, rows: Sequence[Any], name: str = "default") -> None:
    """Write files that ``datasets.load_dataset(FOLDER, name)`` reads as splits train and test."""
    folder.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, part in (("train", rows), ("test", rows[:16])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Train a byte pair encoding of about 400 tokens on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=letters, show_progress=False),
    )
    assert tokenizer.get_vocab_size() <= 512
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0]).save_pretrained(
        folder
    )


def write_inputs(folder: Path) -> None:
    """Write model, tokenizer and data sets."""
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    chance = random.Random(0)
    conversations = [conversation(chance) for _ in range(640)]
    write_dataset(folder / "HuggingFaceH4" / "no_robots", conversations)
    write_dataset(folder / "openai" / "gsm8k", [problem(chance) for _ in range(400)], "main")
    write_dataset(folder / "zwhe99" / "DeepMath-103K", [problem(chance) for _ in range(400)])
    write_dataset(folder / "Anthropic" / "hh-rlhf", [comparison(chance) for _ in range(320)])
    model = folder / MODEL
    write_checkpoint(model, ModelSize(hidden=64, layers=2, context=1024, vocab=512), seed=0)
    texts = [message["content"] for row in conversations for message in row["messages"]]
    write_tokenizer(model, [*texts, *["User:", "Assistant:", "\n\n"] * 200])


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
