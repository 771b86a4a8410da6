"""Byte counts of live tensors."""

from __future__ import annotations

import torch

from support.tensor_memory import TensorMemory

KIB = 1024


def test_storages_count_once_while_they_live():
    with TensorMemory() as memory:
        first = torch.zeros(KIB, dtype=torch.uint8)
        view = first[:10].view(2, 5)
        assert memory.allocated == KIB
        second = first + 1
        assert memory.allocated == memory.peak == 2 * KIB
        del first, second
        assert memory.allocated == KIB  # the view holds the first one
        del view
        assert (memory.allocated, memory.peak) == (0, 2 * KIB)
        memory.reset_peak()
        assert memory.peak == 0


def test_earlier_tensors_count_once_they_are_used():
    weight = torch.zeros(KIB, dtype=torch.float32)
    with TensorMemory() as memory:
        result = weight.sum()
        assert memory.allocated == 4 * KIB + result.nbytes


def test_resized_storages_are_counted():
    before = torch.UntypedStorage.resize_
    with TensorMemory() as memory:
        tensor = torch.zeros(KIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        assert memory.allocated == 0
        tensor.untyped_storage().resize_(3 * KIB)
        assert memory.allocated == memory.peak == 3 * KIB
    assert torch.UntypedStorage.resize_ is before


def test_backward_pass_is_counted():
    with TensorMemory(explain=True) as memory:
        x = torch.randn(KIB, requires_grad=True)
        y = (x * 2).exp()  # keeps its result
        del y
        assert memory.allocated == 4 * KIB
        loss = (x * 2).exp().sum()
        before = memory.allocated
        loss.backward()
        assert x.grad is not None
        assert memory.peak > before
        assert any("exp" in operator for operator, _, _ in memory.at_peak)
