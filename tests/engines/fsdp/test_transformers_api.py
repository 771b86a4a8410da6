"""Buffers that are not in checkpoints: computed as transformers does, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megascend.engines.fsdp.transformers_api import compute_buffers
from megascend.errors import ConfigError


class Masked(nn.Module):
    """A model whose mask is a bool buffer that its initialisation may leave alone."""

    def __init__(self, *, computed: bool) -> None:
        super().__init__()
        self.computed = computed
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if self.computed:
            self.mask.copy_(torch.ones(3, 3, dtype=torch.bool).tril())


def test_bool_buffers_are_computed() -> None:
    model = Masked(computed=True)
    compute_buffers(model, torch.device("cpu"))
    assert torch.equal(model.mask, torch.ones(3, 3, dtype=torch.bool).tril())


def test_bool_buffer_that_is_not_computed_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="transformers does not compute the buffer mask of Masked; use engine single"):
        compute_buffers(Masked(computed=False), torch.device("cpu"))
