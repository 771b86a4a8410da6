"""Checks of a vLLM worker on the tensors of its model."""

from __future__ import annotations

import pytest
import torch

from weightwire.errors import ManifestError
from weightwire.vllm.checkpoint import tied_head_checked

EMBEDDING = torch.arange(6.0).reshape(3, 2)
NORM = torch.ones(2)


@pytest.mark.parametrize(
    "order", [("model.embed_tokens.weight", "lm_head.weight"), ("lm_head.weight", "transformer.wte.weight")]
)
def test_an_output_layer_that_differs_from_a_tied_embedding_raises(order: tuple[str, str]) -> None:
    tensors = [(order[0], EMBEDDING), ("model.norm.weight", NORM), (order[1], EMBEDDING + 1)]
    passed = tied_head_checked(tensors)
    assert [next(passed)[0], next(passed)[0]] == [order[0], "model.norm.weight"]
    with pytest.raises(ManifestError, match=r"differs from the embedding.*tie_word_embeddings: false"):
        next(passed)


@pytest.mark.parametrize("head", [[], [("lm_head.weight", EMBEDDING.clone())]])
def test_a_tied_head_passes_unchanged(head: list[tuple[str, torch.Tensor]]) -> None:
    tensors = [("model.embed_tokens.weight", EMBEDDING), *head, ("model.norm.weight", NORM)]
    assert list(tied_head_checked(tensors)) == tensors
