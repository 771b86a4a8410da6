"""Grouped products and segments of rows, against plain loops."""

import pytest
import torch

from megascend.training.lora import grouped
from megascend.training.lora.grouped import SegmentedLinear, Segments, accumulate, product
from megascend.training.lora.segments import by_expert_and_adapter, cut, token_segments

CPU = torch.device("cpu")


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [9], [0, 0]])
@pytest.mark.parametrize("counts_on_host", [True, False])
def test_products_of_runs(counts, counts_on_host):
    rows, weights = torch.randn(sum(counts), 4), torch.randn(len(counts), 4, 6)
    segments = Segments.of(counts, CPU)
    segments = segments if counts_on_host else Segments(segments.ends)
    owner = [g for g, count in enumerate(counts) for _ in range(count)]
    expected = (
        torch.stack([row @ weights[g] for row, g in zip(rows, owner, strict=True)]) if owner else rows @ weights[0]
    )
    torch.testing.assert_close(product(rows, weights, segments), expected)
    assert segments.sizes() == counts


@pytest.mark.parametrize("counts", [None, [2, 0, 3]])
@pytest.mark.parametrize("with_base", [False, True])
def test_gradients_equal_autograds(counts, with_base):
    segments = None if counts is None else Segments.of(counts, CPU)
    count = 1 if counts is None else len(counts)
    rows = torch.randn(5, 4, requires_grad=True)
    weights, base = torch.randn(count, 4, 3), torch.randn(5, 3, requires_grad=True) if with_base else None
    grads, grad = torch.full((count, 4, 3), 0.5), torch.randn(5, 3)
    SegmentedLinear.apply(rows, weights, grads, segments, base).backward(grad)
    gradients = rows.grad, None if base is None else base.grad

    rows.grad = None
    leaf = weights.clone().requires_grad_()
    owner = [0] * 5 if counts is None else [g for g, c in enumerate(counts) for _ in range(c)]
    torch.stack([row @ leaf[g] for row, g in zip(rows, owner, strict=True)]).backward(grad)
    torch.testing.assert_close(gradients[0], rows.grad)
    torch.testing.assert_close(grads, 0.5 + leaf.grad)
    if base is not None:
        assert torch.equal(gradients[1], grad)


@pytest.mark.parametrize("kernel", [None, "torch"])
def test_matrices_by_two_numbers(kernel, monkeypatch):
    """Multiply by matrices of segments (outer, inner) that are stored as [inner, outer], as adapters of experts are."""
    monkeypatch.setattr(grouped, "kernel_of", lambda device: kernel)
    counts, base = [3, 0, 5, 1, 2, 0], torch.randn(11, 8).bfloat16()
    segments = Segments.of(counts, CPU)
    rows, grad = torch.randn(11, 16).bfloat16(), torch.randn(11, 8).bfloat16()
    weights, target = torch.randn(2, 3, 16, 8).bfloat16().transpose(0, 1), torch.randn(2, 3, 16, 8).transpose(0, 1)
    flat, total, start = weights.flatten(0, 1), target.clone(), 0
    expected = torch.empty(11, 8)
    for g, count in enumerate(counts):
        part = slice(start, start + count)
        expected[part] = base[part].float() + rows[part].float() @ flat[g].float()
        total[g // 2, g % 2] += rows[part].float().T @ grad[part].float()
        start += count
    assert not weights.is_contiguous()
    torch.testing.assert_close(product(rows, weights, segments, base).float(), expected, rtol=2e-2, atol=2e-2)
    accumulate(target, rows, grad, segments)
    torch.testing.assert_close(target, total, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_by_expert_and_adapter(in_order):
    expert = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    adapter = torch.tensor([0, 1, 1, 0, 0, 1, 1] if in_order else [1, 0, 1, 1, 0, 0, 1])
    rows = by_expert_and_adapter(expert, adapter, 3, 2, in_order=in_order)
    assert rows.segments.sizes() == ([1, 2, 0, 0, 2, 2])
    if in_order:
        assert rows.order is rows.inverse is None
        with pytest.raises(RuntimeError, match="are not sorted by expert and adapter"):
            by_expert_and_adapter(expert, adapter.flip(0), 3, 2, in_order=True)
    else:
        assert rows.order.tolist() == [1, 0, 2, 4, 5, 3, 6]
        assert rows.order[rows.inverse].tolist() == list(range(7))


def test_one_runs_values_do_not_reach_anothers():
    counts = [3, 2, 4]
    rows, weights, grad = torch.randn(9, 4), torch.randn(3, 4, 6), torch.randn(9, 6)
    clean = product(rows, weights, Segments.of(counts, CPU))
    clean_grads = torch.zeros(3, 4, 6)
    accumulate(clean_grads, rows, grad, Segments.of(counts, CPU))
    rows[3:5] = torch.nan
    weights[1] = torch.inf
    spoiled = product(rows, weights, Segments.of(counts, CPU))
    spoiled_grads = torch.zeros(3, 4, 6)
    accumulate(spoiled_grads, rows, grad, Segments.of(counts, CPU))
    for expected, actual, rows_kept in ((clean, spoiled, [0, 1, 2, 5, 6, 7, 8]), (clean_grads, spoiled_grads, [0, 2])):
        assert torch.equal(expected[rows_kept], actual[rows_kept])


@pytest.mark.parametrize("counts", [[4, 0, 6, 2], [12], [0, 12, 0], [1] * 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cut_and_route_agree_with_counting(counts, ranks):
    adapter_index = torch.tensor([index for index, count in enumerate(counts) for _ in range(count)])
    size = len(adapter_index) // ranks
    for rank in range(ranks):
        local = adapter_index[rank * size : (rank + 1) * size]
        expected = [int((local == index).sum()) for index in range(len(counts))]
        assert cut(counts, rank * size, (rank + 1) * size) == expected
        result = token_segments(adapter_index, counts, None, (rank, ranks), CPU)
        assert torch.equal(result.adapter_index[result.local_slice], local)
        if len(counts) - counts.count(0) == 1:
            assert result.single == int(adapter_index[0])
            assert result.full is None
            assert result.local is None
        else:
            assert result.single is None
            assert result.full.sizes() == counts
            assert result.local.sizes() == expected


@pytest.mark.parametrize(
    "counts", [[3, 0, 5, 1, 2, 0, 7, 4], [0, 0, 0, 0, 0, 0, 0, 9], [9, 0, 0, 0, 0, 0, 0, 0], [2, 3, 4]]
)
def test_more_segments_than_one_call_takes(counts, monkeypatch):
    """Limit torch's grouped product to three segments per call."""
    assert grouped.TORCH_GROUPS < 1024, "torch's check on a GPU"
    monkeypatch.setattr(grouped, "TORCH_GROUPS", 3)
    segments = Segments(Segments.of(counts, CPU).ends)
    rows, grad = (torch.randn(sum(counts), size).bfloat16() for size in (16, 8))
    weights, target = torch.randn(len(counts), 16, 8).bfloat16(), torch.randn(len(counts), 16, 8)
    expected = product(rows, weights, segments), target.clone()
    accumulate(expected[1], rows, grad, segments)

    calls = []

    def grouped_product(left, right, offs):
        calls.append(len(offs))
        return torch_product(left, right, offs=offs)

    torch_product = torch._grouped_mm
    monkeypatch.setattr(grouped, "kernel_of", lambda device: "torch")
    monkeypatch.setattr(torch, "_grouped_mm", grouped_product)
    torch.testing.assert_close(product(rows, weights, segments), expected[0])
    accumulate(target, rows, grad, segments)
    torch.testing.assert_close(target, expected[1], rtol=1e-2, atol=1e-2)
    assert max(calls) <= 3
    assert sum(calls) >= 2 * len(counts)
