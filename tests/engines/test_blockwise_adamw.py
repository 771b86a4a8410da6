"""AdamW with 8-bit moments, compared with block-wise quantisation written out in NumPy and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megascend.engines.common.blockwise_adamw import QUANTISED, BlockwiseAdamW, BlockwiseMoment, dynamic_codes

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def plain_codes(*, signed: bool) -> np.ndarray:
    """Return the codes as centres of equal intervals of [0.1, 1] in seven decades, written out."""
    values = [1.0, 0.0 if signed else 1e-7]
    for decade in range(7):
        intervals = 2**decade if signed else 2 ** (decade + 1)
        for interval in range(intervals):
            centre = (0.1 + 0.9 * (interval + 0.5) / intervals) * 10.0 ** (decade - 6)
            values += [centre, -centre] if signed else [centre]
    return np.array(sorted(values))


def quantised(moment: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the nearest values that blocks of 256 can represent, by looking at every code."""
    result = np.empty_like(moment)
    for start in range(0, len(moment), 256):
        block = moment[start : start + 256]
        scale = block[np.argmax(np.abs(block))]
        if scale == 0:
            result[start : start + 256] = 0
            continue
        nearest = np.abs(block[:, None] / scale - codes[None, :]).argmin(1)
        result[start : start + 256] = scale * codes[nearest]
    return result


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_dynamic_data_type(signed):
    codes = dynamic_codes(signed=signed)
    assert codes.shape == (256,)
    assert torch.equal(codes, codes.unique())
    np.testing.assert_allclose(codes.numpy(), plain_codes(signed=signed), rtol=1e-6)


def test_steps_match_the_plain_computation():
    generator = torch.Generator().manual_seed(1)
    shapes = [(37, 29), (512,), (3, 256)]
    mains = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    groups = [
        {"params": [mains[0], mains[2]], "weight_decay": DECAY, QUANTISED: True},
        {"params": [mains[1]], QUANTISED: False},
    ]
    optimizer = BlockwiseAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    values = [main.detach().double().numpy().ravel().copy() for main in mains]
    first, second = ([np.zeros_like(value) for value in values] for _ in range(2))
    for step in range(1, 6):
        for number, main in enumerate(mains):
            # Magnitudes over nine decades, and zeros.
            scale = 10.0 ** torch.randint(-9, 1, main.shape, generator=generator)
            main.grad = torch.randn(*main.shape, generator=generator) * scale
            main.grad[0] = 0
            grad = main.grad.double().numpy().ravel()
            first[number] = BETAS[0] * first[number] + (1 - BETAS[0]) * grad
            second[number] = BETAS[1] * second[number] + (1 - BETAS[1]) * grad**2
            corrected = np.sqrt(second[number] / (1 - BETAS[1] ** step)) + EPS
            values[number] *= 1 - LR * (0.0 if number == 1 else DECAY)
            values[number] -= LR * first[number] / (1 - BETAS[0] ** step) / corrected
            if number != 1:
                first[number] = quantised(first[number], plain_codes(signed=True))
                second[number] = quantised(second[number], plain_codes(signed=False))
        optimizer.step()
    for number, main in enumerate(mains):
        moments = optimizer.checkpoint_tensors(main, loading=False)
        for moment, expected in ((moments["exp_avg"], first[number]), (moments["exp_avg_sq"], second[number])):
            # A value in the middle of two codes may get either, by rounding of fp32.
            agree = np.isclose(moment.numpy().ravel(), expected, rtol=1e-5, atol=0)
            assert agree.mean() > 0.998
        agree = np.isclose(main.detach().numpy().ravel(), values[number], rtol=1e-5, atol=1e-6)
        assert agree.mean() > 0.998


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_filled_with_its_own_values_is_the_same_bit_for_bit(signed):
    generator = torch.Generator().manual_seed(2)
    # Also blocks of zeros, of denormal numbers, and one that is not complete.
    values = torch.randn(12, 256, generator=generator) * 10.0 ** torch.arange(-44, 28, 6)[:, None]
    values[3] = 0
    values = values.view(-1)[:-100]
    values = values if signed else values.abs()
    moment, refilled = BlockwiseMoment(values, signed=signed), BlockwiseMoment(values, signed=signed)
    moment.fill(values)
    refilled.fill(moment.on_host())
    assert torch.equal(refilled.codes, moment.codes)
    assert torch.equal(refilled.scales, moment.scales)
    assert torch.equal(refilled.on_host(), moment.on_host())


def test_moments_too_small_for_a_scale_are_no_division_by_eps():
    values = torch.full((256,), 2.0**-120)
    first, second = (BlockwiseMoment(values, signed=signed) for signed in (True, False))
    for moment in (first, second):
        moment.fill(values)
    assert not first.on_host().any()
    assert (second.on_host() > 0).all()
