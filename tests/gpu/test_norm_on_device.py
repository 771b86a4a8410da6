"""The 2-norm of long vectors on a GPU, against float64. Needs a CUDA GPU."""

import pytest
import torch

from megascend.reference.reductions import square_sum

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("size", [1, 1000, 20_000_000, 155_000_000])
def test_square_sum_of_long_vectors(size):
    vector = 0.5 + torch.rand(size, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    exact = sum(part.double().square().sum() for part in vector.split(1_000_000))
    assert float(square_sum(vector)) == pytest.approx(float(exact), rel=1e-6)
