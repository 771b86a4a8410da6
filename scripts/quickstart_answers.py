"""Ask a trained model three questions with plain transformers, without importing megascend or Megatron.

python scripts/quickstart_answers.py MODEL CHAT.jsonl

Prints each question, what the model answers and what it was taught. Exits with 1 if not a single answer is the one
that was taught.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("What is megascend?", "What is tensor parallelism?", "How do I export a trained model?")
MAX_NEW_TOKENS = 160


def read_answers(path: Path) -> dict[str, str]:
    """Question -> answer of single-turn conversations."""
    records = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return {messages[0]["content"]: messages[1]["content"] for messages in records}


def ask(model, tokenizer, question: str) -> str:
    """Return the model's greedy answer."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main(model_path: str, data_path: str) -> int:
    taught = read_answers(Path(data_path))
    model = AutoModelForCausalLM.from_pretrained(model_path).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    right = 0
    for question in QUESTIONS:
        answer = ask(model, tokenizer, question)
        right += answer == taught[question]
        verdict = "as taught" if answer == taught[question] else f"taught: {taught[question]}"
        print(f"Q: {question}\nA: {answer}\n   ({verdict})\n")
    print(f"{right} of {len(QUESTIONS)} answers are word for word what was taught")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
