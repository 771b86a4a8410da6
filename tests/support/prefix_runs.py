"""Calls of backends whose samples share prefixes, for engines in the tests' process or, run as a script, in one without Megatron.

    python prefix_runs.py JOB RESULT

JOB and RESULT are files of ``torch.save``: functions' names and arguments, and their results. Ranks are forks of the script.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megascend import (
    Adam,
    Adapters,
    Backend,
    Batching,
    Candidates,
    Lora,
    Loss,
    LossInputs,
    Sample,
    make_backend,
)
from megascend.testing import run_distributed
from megascend.testing.parity import LR, MAX_GRAD_NORM, PROMPT, TINY_VOCABULARY, WEIGHT_DECAY, causal_samples
from support.images import image_samples

SHARED, SEPARATE = (Batching(micro_batch_tokens=4096, share_prefixes=setting) for setting in (2, "off"))


def tree(seed: int, depth: int, branches: int) -> list[list[int]]:
    """Return token ids of the leaves of a random tree, shuffled, with one list that shares nothing."""
    numbers = random.Random(seed)

    def tokens() -> list[int]:
        return [numbers.randrange(3, TINY_VOCABULARY) for _ in range(numbers.randint(2, 8))]

    def grow(prefix: list[int], depth: int) -> list[list[int]]:
        prefix = prefix + tokens()
        if depth == 0:
            return [prefix]
        return [leaf for _ in range(numbers.randint(2, branches)) for leaf in grow(prefix, depth - 1)]

    leaves = [*grow([], depth), [2, *tokens(), *tokens()]]
    numbers.shuffle(leaves)
    return leaves


GROUP, BRANCHES = tree(seed=1, depth=1, branches=4), tree(seed=2, depth=3, branches=2)
"""A prompt with responses, and turns that fork."""


def common_tokens(tokens: list[list[int]]) -> int:
    """Count the inputs of samples of ``tokens`` that a sample before them has, in the same place after the same tokens."""
    prefixes = {tuple(ids[:end]) for ids in tokens for end in range(1, len(ids))}
    return sum(len(ids) - 1 for ids in tokens) - len(prefixes)


def build(engine: str, checkpoint: Path, batching: Batching, **settings: Any) -> Backend:
    adam = Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
    arguments = {"precision": "fp32", "platform": "cpu", "self_check": False, "timeout_s": 60, "optimizer": adam}
    return make_backend(engine, model=checkpoint, batching=batching, **arguments | settings)


def trajectory(engine: str, checkpoint: Path, tokens: list[list[int]], **settings: Any) -> dict[str, Any]:
    """Return losses, norms and shared tokens of three steps with shared prefixes."""
    with build(engine, checkpoint, SHARED, **settings) as backend:
        samples = backend.shard(causal_samples(tokens))
        figures: dict[str, Any] = {"losses": [], "norms": []}
        for _ in range(3):
            result = backend.forward_backward(samples)
            figures["losses"].append(result.loss)
            figures["norms"].append(backend.optimizer_step().grad_norm)
            figures["shared"] = result.shared_tokens
        return figures


def entropic(logprobs: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    assert inputs.entropy is not None
    return -logprobs - 0.1 * inputs.entropy


def policy_samples(tokens: list[list[int]], experts: int) -> list[Sample]:
    """Build samples of responses, some with allowed tokens or recorded experts that differ from those of their siblings."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for number, ids in enumerate(tokens):
        sample = Sample.causal(ids, PROMPT)
        length = len(sample)
        sample.old_logprobs, sample.advantages, sample.ref_logprobs = (
            torch.randn(length, generator=generator) for _ in range(3)
        )
        sample.temperature = 0.7
        if number % 2:
            others = torch.rand(length, TINY_VOCABULARY, generator=generator).scatter(
                1, sample.target_ids[:, None], 2.0
            )
            sample.allowed = others.topk(4).indices.int()
            sample.allowed[: PROMPT - 1] = -1
        if experts:
            # Of the prompt they are the same, as an engine with a prefix cache reports them, and unknown in every third sample.
            routed = torch.rand(length, 4, experts, generator=torch.Generator().manual_seed(7)).topk(2).indices
            sample.routed_experts = routed if number % 3 else None
        samples.append(sample)
    return samples


def calls(experts: int) -> dict[str, tuple[list[Sample], Any]]:
    """Return samples and losses that read each kind of field."""
    tokens = [*GROUP, *BRANCHES]
    plain = causal_samples(tokens)
    even = plain[: len(plain) // 2 * 2]
    pairs = [replace(sample, pair=number // 2, chosen=number % 2 == 0) for number, sample in enumerate(even)]
    distilled = [replace(sample) for sample in plain]
    for sample in pairs:
        sample.ref_logprobs = torch.full((len(sample),), -4.0)
    for number, sample in enumerate(distilled):
        ids = torch.arange(3, 6).expand(len(sample), 3).clone()
        ids[::3, 1:] = -1
        sample.candidates = Candidates(ids, torch.full(ids.shape, -2.0 - number % 2) * (ids >= 0))
    whole = [Sample.causal(ids) for ids in tokens]
    return {
        "prompts with weight": (whole, "cross_entropy"),
        "ppo": (policy_samples(tokens, experts), "ppo"),
        "entropy": (whole, Loss("entropic", entropic, entropy=True)),
        "dpo": (pairs, "dpo"),
        "forward_kl": (distilled, "forward_kl"),
    }


def outcomes(
    engine: str, checkpoint: Path, batching: Batching, experts: int
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Return the shared tokens of each of the :func:`calls`, and all figures: of forward passes, gradients and a step."""
    shared, values = {}, {}
    for name, (samples, loss) in calls(experts).items():
        with build(engine, checkpoint, batching) as backend:
            forward = backend.forward(samples, entropy=True, logits=True)
            result = backend.forward_backward(samples, loss, logprobs=True)
            figures = {"loss": result.loss, "norm": backend.optimizer_step().grad_norm, **result.metrics}
            values |= {f"{name}: {figure}": torch.tensor(value) for figure, value in figures.items()}
            for number in range(len(samples)):
                for field in ("logprobs", "entropy", "logits"):
                    values[f"{name}: {field} {number}"] = getattr(forward, field)[number]
                assert result.logprobs is not None
                values[f"{name}: logprobs of the loss {number}"] = result.logprobs[number]
            shared[name] = result.shared_tokens
    return shared, values


def beside_images(engine: str, checkpoint: Path, batching: Batching) -> tuple[int, list[torch.Tensor]]:
    """Return the shared tokens and log-probabilities of a group of texts and of samples with images, in one micro batch."""
    with build(engine, checkpoint, batching, vision_tower="train") as backend:
        result = backend.forward_backward([*causal_samples(GROUP), *image_samples()], logprobs=True)
        norm = backend.optimizer_step().grad_norm
        return result.shared_tokens, [torch.tensor([result.loss, norm]), *(result.logprobs or [])]


def branches_before_and_after_one_changes(engine: str, checkpoint: Path) -> list[list[torch.Tensor]]:
    """Return the logits of a group twice; the second time the last sample has another last token."""
    branch, siblings = GROUP[0], GROUP[1:]
    other = [*branch[:-1], 3 + (branch[-1] - 2) % (TINY_VOCABULARY - 3)]
    with build(engine, checkpoint, SHARED) as backend:
        # Of the last token too: it is an input if another one follows.
        groups = ([Sample.causal([*ids, 3]) for ids in [*siblings, last]] for last in (branch, other))
        return [backend.forward(samples, logits=True).logits or [] for samples in groups]


def tenants(engine: str, checkpoint: Path, batching: Batching, dropout: float) -> tuple[int, list[float]]:
    """Return the shared tokens and losses of two adapters that train on the same prompt in one batch."""
    # The head computes other rows than the layers.
    targets = ("q_proj", "lm_head")
    with build(engine, checkpoint, batching, adapters=Adapters(targets=targets)) as backend:
        for name in ("one", "two"):
            backend.add_adapter(name, Lora(rank=4, dropout=dropout, targets=targets))
        samples = [
            replace(sample, adapter="one" if number < len(GROUP) else "two")
            for number, sample in enumerate(causal_samples([*GROUP, *GROUP[:2]]))
        ]
        losses, shared = [], 0
        for _ in range(3):
            result = backend.forward_backward(samples)
            backend.optimizer_step()
            losses += [figures.loss for figures in result.adapters.values()]
            shared = result.shared_tokens
        return shared, losses


def on_ranks(function: str, *arguments: Any, world_size: int = 1, **options: Any) -> Any:
    """Call a function of this module on forked ranks, and return the first one's result."""
    return run_distributed(globals()[function], world_size, *arguments, init=False, timeout_s=180, **options)[0]


if __name__ == "__main__":
    results = [on_ranks(name, *args, **options) for name, args, options in torch.load(sys.argv[1], weights_only=False)]
    torch.save(results, sys.argv[2])
