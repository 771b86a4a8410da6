"""Accuracy of the 2-norm of long float32 vectors."""

import pytest
import torch

from megascend.reference.reductions import ROW, global_norm, square_sum
from megascend.reference.te.optimizers import multi_tensor_l2norm

LONG = 20_000_000


@pytest.fixture(scope="module")
def long():
    return 0.5 + torch.rand(LONG, generator=torch.Generator().manual_seed(0))


def exact(vector):
    return sum(part.double().square().sum() for part in vector.flatten().split(1_000_000))


def test_a_long_vector(long):
    assert float(square_sum(long)) == pytest.approx(float(exact(long)), rel=1e-6)
    # The reason for this function: it can be removed once torch's norm is as accurate.
    assert float(torch.linalg.vector_norm(long)) != pytest.approx(float(exact(long).sqrt()), rel=1e-5)


def test_megatrons_norm_of_long_gradients(long):
    norm, norms = multi_tensor_l2norm(2048, None, [[long, long[:3]]], True)
    assert norm.item() == pytest.approx(float((exact(long) + exact(long[:3])).sqrt()), rel=1e-6)
    assert norms.tolist() == pytest.approx([float(exact(long).sqrt()), float(exact(long[:3]).sqrt())], rel=1e-6)


@pytest.mark.parametrize("shape", [(0,), (1,), (ROW - 1,), (ROW,), (3, ROW + 5), ()])
def test_any_shape(shape):
    vector = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert float(square_sum(vector)) == pytest.approx(float(vector.double().square().sum()), rel=1e-6)
    assert float(square_sum(vector.bfloat16())) == pytest.approx(
        float(vector.bfloat16().double().square().sum()), rel=3e-6
    )


def test_all_of_several_tensors():
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), 1.0).T]
    assert float(global_norm(tensors)) == pytest.approx(4.0)


def test_square_sum_of_non_finite_values_is_not_finite():
    assert not square_sum(torch.tensor([1.0, float("nan")])).isfinite()
    assert not square_sum(torch.tensor([1.0, float("inf")])).isfinite()
