"""The sampler in every layout and model of the parity matrix, with its cache, against Hugging Face's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint
from support.parity_matrix import matrix

pytestmark = [pytest.mark.usefixtures("megatron_imported"), pytest.mark.nightly]

PROMPTS = ([5, 6, 7, 8, 9], [40], list(range(11, 41)))
GREEDY, WARM = SamplingParams(8, temperature=0.0), SamplingParams(8, seed=3)
REQUESTS = [*(SampleRequest(prompt, GREEDY) for prompt in PROMPTS), SampleRequest(PROMPTS[0], WARM, num_samples=2)]
CASES = [case for case in matrix() if not (case.resumes or case.aux_loss or case.precision == "fp16")]
BOUND = {"fp32": 2e-5, "bf16": 0.1, "bf16 experts": 0.4}
"""Largest difference of log-probabilities from transformers' in fp32. In bf16 a token may be routed to other experts."""


def sampled(case: Case, checkpoint: Path) -> tuple[list[SampleResult], bool]:
    """Return results on this rank, and whether a cache was used."""
    from megascend.apps.sampling.sampler import Sampler

    with case_backend(case, checkpoint) as backend:
        sampler = Sampler(backend)
        return sampler.generate(REQUESTS), sampler.cache_unsupported_reason is None


def reference(checkpoint: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Compute log-probabilities [length, vocabulary] by transformers in fp32."""

    def compute() -> list[torch.Tensor]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return [model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1) for tokens in sequences]

    return run_distributed(compute, 1, init=False)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_responses_are_hugging_faces(case: Case, parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    ranks = run_distributed(sampled, case.world_size, case, checkpoint, init=False, timeout_s=120)
    bound = BOUND["bf16 experts" if (case.precision, case.arch) == ("bf16", "qwen3_moe") else case.precision]
    results, cached = ranks[0]
    assert ranks == [ranks[0]] * case.world_size
    assert cached == (case.parallel.context == 1)
    pairs = [
        (request, response) for request, result in zip(REQUESTS, results, strict=True) for response in result.samples
    ]
    assert len(pairs) == 5
    references = reference(checkpoint, [[*request.prompt, *response.tokens] for request, response in pairs])
    for (request, sample), logprobs in zip(pairs, references, strict=True):
        positions = logprobs[len(request.prompt) - 1 : -1]
        tokens = torch.tensor(sample.tokens)
        expected = positions.gather(1, tokens[:, None])[:, 0]
        assert len(tokens) == 8
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=bound)
        if request.params.temperature == 0:
            assert bool((expected >= positions.max(-1).values - bound).all())
