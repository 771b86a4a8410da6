"""A q, k and v kernel is used where it agrees with plain torch, which is checked once per kind of call."""

from __future__ import annotations

import pytest
import torch

from megascend.training.kernels.qkv_rope_plain import VerifiedKernel, plain_qkv_rope

GROUPS, HEADS, WIDTH = 2, 3, 16


class Kernel:
    """Computes what plain torch does, and then ``spoil``."""

    def __init__(self, spoil=lambda *outputs: outputs):
        self.spoil, self.calls = spoil, 0

    def __call__(self, *inputs):
        self.calls += 1
        return self.spoil(*plain_qkv_rope(*inputs))


def inputs(*, packed=False, norms=True, trained=True, tokens=24):
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(tokens, 1, GROUPS * (HEADS + 2) * WIDTH, generator=generator, requires_grad=True)
    angles = torch.rand(tokens, 1, 1, WIDTH // 2, generator=generator).repeat(1, 1, 1, 2)
    starts = torch.tensor([0, 5, tokens], dtype=torch.int32) if packed else None
    weights = [torch.rand(WIDTH, generator=generator).requires_grad_(trained) for _ in "qk"]
    return mixed, angles, starts, (*weights, 1e-6) if norms else None, GROUPS, WIDTH


def test_one_that_agrees_is_tried_once_for_each_kind_and_used(caplog):
    kernel = Kernel()
    trusted = VerifiedKernel(kernel)
    for _ in range(3):
        for result, right in zip(trusted(*inputs()), plain_qkv_rope(*inputs()), strict=True):
            assert torch.equal(result, right)
    assert kernel.calls == 1 + 3
    trusted(*inputs(tokens=30))
    assert kernel.calls == 5, "sizes are not kinds"
    with torch.no_grad():
        trusted(*inputs(packed=True))
    trusted(*inputs(norms=False))
    trusted(*inputs(trained=False))
    assert kernel.calls == 5 + 3 * 2
    assert not caplog.text


def spoil_query(change):
    """Spoil q alone."""
    return lambda query, key, value: (change(query), key, value)


class _WrongWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.001


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_query(lambda query: query * 1.001),
        spoil_query(lambda query: torch.full_like(query, float("nan")) + 0 * query),
        lambda query, key, value: (query, key, value * float("nan")),
        spoil_query(_WrongWayBack.apply),
        lambda query, key, value: (query, value, key),
    ],
    ids=["values", "NaN", "NaN at the end", "gradients", "another order"],
)
def test_one_that_does_not_is_named_and_not_used(spoil, caplog):
    kernel = Kernel(spoil)
    trusted = VerifiedKernel(kernel)
    for _ in range(2):
        for result, right in zip(trusted(*inputs()), plain_qkv_rope(*inputs()), strict=True):
            assert torch.equal(result, right)
    assert kernel.calls == 1
    assert caplog.text.count("does not compute what torch does on this device") == 1
    trusted(*inputs(packed=True))
    assert kernel.calls == 2, "another kind is tried by itself"
