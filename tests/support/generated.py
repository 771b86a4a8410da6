"""Greedy responses of transformers' ``generate``, and of peft's models, to compare a sampler's with. Also a script, for them:

python generated.py JOB RESULT
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.sampling.request import SampleResult, SamplingParams
from support.forked_programs import run_forked

GREEDY = SamplingParams(10, temperature=0.0)
Response = tuple[list[int], list[float], float]
"""Tokens, their log-probabilities, and the smallest distance of a token's log-probability to that of the next best."""


def prompts() -> list[list[int]]:
    """Return prompts of different lengths, one longer than YaRN's original context and a chunk of linear attention."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (5, 1, 150, 33)]


def generated(
    checkpoint: Path, requests: list[tuple[list[int], Path | None]], images: list[dict[str, Any]] | None = None
) -> list[Response]:
    """Return the greedy responses of transformers to (prompt, adapter), in a process without a bootstrap.

    Args:
        images: further inputs of the model for each prompt: ``pixel_values`` and others.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job", Path(folder) / "result"
        inputs = images or [{} for _ in requests]
        rows = [
            (prompt, adapter and str(adapter), extra) for (prompt, adapter), extra in zip(requests, inputs, strict=True)
        ]
        torch.save((str(checkpoint), rows), job)
        completed = run_forked(Path(__file__), job, result, timeout_s=120)
        assert completed.returncode == 0, completed.stderr[-4000:]
        return torch.load(result, weights_only=False)


def assert_equal(results: list[SampleResult], expected: list[Response]) -> None:
    for result, (tokens, logprobs, margin) in zip(results, expected, strict=True):
        assert result.error is None
        assert margin > 1e-4, "the reference's choice is within rounding: choose another prompt"
        assert list(result.samples[0].tokens) == tokens
        assert result.samples[0].logprobs == pytest.approx(logprobs, abs=2e-5)


def _response(checkpoint: str, prompt: list[int], adapter: str | None, images: dict[str, Any]) -> Response:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from support import peft_reference  # only here: it imports peft

    if adapter is None:
        loader = AutoModelForImageTextToText if images else AutoModelForCausalLM
        model: Any = loader.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    else:
        model = peft_reference.load(checkpoint, adapter)
    output = model.eval().generate(
        input_ids=torch.tensor([prompt]),
        **images,
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(output.logits).float().log_softmax(-1)
    best = logprobs.topk(2, dim=-1).values
    return tokens, logprobs[range(len(tokens)), tokens].tolist(), float((best[:, 0] - best[:, 1]).min())


if __name__ == "__main__":
    checkpoint, requests = torch.load(sys.argv[1], weights_only=False)
    torch.save([_response(checkpoint, *request) for request in requests], sys.argv[2])
