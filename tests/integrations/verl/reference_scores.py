"""Reference log-probabilities and entropies of plain transformers.

    python reference_scores.py MODEL IDS.json OUT.json

verl's value at place t is that of token t + 1; the last one is of the sequence's first token and means nothing.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main(path: str, input_path: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    scores_by_name: dict[str, list[list[float]]] = {"log_probs": [], "entropy": []}
    with open(input_path) as file:
        sequences = json.load(file)
    for sequence in sequences:
        ids = torch.tensor(sequence)
        scores = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        scores_by_name["log_probs"].append(scores.gather(1, ids.roll(-1)[:, None])[:, 0].tolist())
        scores_by_name["entropy"].append((-scores.exp() * scores).sum(-1).tolist())
    with open(out, "w") as file:
        json.dump(scores_by_name, file)


main(*sys.argv[1:])
