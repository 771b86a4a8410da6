"""npu_fusion_attention against softmax attention written out, and its checks against the kernel's words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("sim_npu")

BATCH, HEADS, KV_HEADS, SEQUENCE, DIM = 2, 4, 2, 6, 8
SCALE = 1 / math.sqrt(DIM)


@pytest.fixture
def attention() -> Callable[..., Any]:
    import torch_npu

    return torch_npu.npu_fusion_attention


@pytest.fixture
def gradient() -> Callable[..., Any]:
    import torch_npu

    return torch_npu.npu_fusion_attention_grad


def triangle() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(q_length: int = SEQUENCE, kv_length: int = SEQUENCE) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, sequence, dim] on the CPU."""
    query = make(BATCH, HEADS, q_length, DIM, seed=1)
    return query, make(BATCH, KV_HEADS, kv_length, DIM, seed=2), make(BATCH, KV_HEADS, kv_length, DIM, seed=3)


def reference(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None, bias: Any = 0.0) -> Tensor:
    """softmax(scale q k^T + bias) v in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.double() @ key.double().transpose(-1, -2) * SCALE + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value.double()


def causal(q_length: int, kv_length: int, shift: int = 0) -> Tensor:
    return torch.ones(q_length, kv_length, dtype=torch.bool).triu(1 + shift)


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    orders = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}
    ordered = tensor.permute(orders[layout])
    return ordered.flatten(2).contiguous() if layout.endswith("H") else ordered.contiguous()


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert actual.device.type == "npu"
    torch.testing.assert_close(actual.detach().cpu().double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["SBH", "BSH", "BNSD", "BSND"])
def test_every_layout_gives_causal_attention_and_its_gradients(attention: Callable[..., Any], layout: str) -> None:
    tensors = qkv()
    leaves = [to_layout(t, layout).npu().requires_grad_() for t in tensors]
    output, maximum, total, *_ = attention(
        *leaves, HEADS, layout, atten_mask=triangle(), sparse_mode=2, scale=SCALE, next_tockens=0
    )
    expected_leaves = [t.double().requires_grad_() for t in tensors]
    expected = reference(*expected_leaves, causal(SEQUENCE, SEQUENCE))
    close(output, to_layout(expected.detach(), layout))
    weight = make(*output.shape, seed=9)
    (output * weight.npu()).sum().backward()
    (to_layout(expected, layout) * weight).sum().backward()
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        close(leaf.grad, to_layout(other.grad, layout))
    assert maximum.shape == total.shape == (BATCH, HEADS, SEQUENCE, 8)
    assert maximum.dtype == total.dtype == torch.float32


def test_statistics_are_maximum_and_sum_of_the_softmax(attention: Callable[..., Any]) -> None:
    query, key, value = qkv()
    _, maximum, total, *_ = attention(query.npu(), key.npu(), value.npu(), HEADS, "BNSD", scale=SCALE)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * SCALE
    largest = scores.amax(-1, keepdim=True)
    close(maximum, largest.expand(-1, -1, -1, 8))
    close(total, (scores - largest).exp().sum(-1, keepdim=True).expand(-1, -1, -1, 8))


@pytest.mark.parametrize(
    ("mode", "pre", "following", "shape", "hidden"),
    [
        (2, 65536, 0, (4, 6), causal(4, 6)),
        (3, 65536, 0, (4, 6), causal(4, 6, 2)),
        (4, 2, 1, (4, 6), causal(4, 6, 3) | ~torch.ones(4, 6, dtype=torch.bool).triu(0)),
        (4, 1, 0, (6, 6), causal(6, 6) | ~torch.ones(6, 6, dtype=torch.bool).triu(-1)),
    ],
)
def test_compressed_modes(
    attention: Callable[..., Any], mode: int, pre: int, following: int, shape: tuple[int, int], hidden: Tensor
) -> None:
    tensors = qkv(*shape)
    output = attention(
        *(t.npu() for t in tensors), HEADS, "BNSD", atten_mask=triangle(), sparse_mode=mode, scale=SCALE,
        pre_tockens=pre, next_tockens=following,
    )[0]  # fmt: skip
    close(output, reference(*tensors, hidden))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.bool), ((1, 1), torch.bool), ((BATCH, 1), torch.bool), ((BATCH, HEADS), torch.uint8)],
)
def test_dense_masks(attention: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = qkv()
    mask = make(*shape, SEQUENCE, SEQUENCE, seed=5) > 0.5
    mask[..., 0] = False
    output = attention(
        *(t.npu() for t in tensors), HEADS, "BNSD", atten_mask=mask.to(dtype).npu(), sparse_mode=1, scale=SCALE
    )[0]
    close(output, reference(*tensors, mask))


def test_mode_0_hides_what_lies_outside_the_tokens_too(attention: Callable[..., Any]) -> None:
    tensors = qkv()
    mask = torch.zeros(SEQUENCE, SEQUENCE, dtype=torch.bool)
    output = attention(
        *(t.npu() for t in tensors), HEADS, "BNSD", atten_mask=mask.npu(), scale=SCALE, pre_tockens=1, next_tockens=0
    )[0]
    close(output, reference(*tensors, causal(6, 6) | ~torch.ones(6, 6, dtype=torch.bool).triu(-1)))


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_without_a_mask_every_key_is_seen_whatever_the_mode(attention: Callable[..., Any], mode: int) -> None:
    tensors = qkv()
    npu = [t.npu() for t in tensors]
    output = attention(*npu, HEADS, "BNSD", sparse_mode=mode, scale=SCALE, pre_tockens=65536, next_tockens=0)[0]
    close(output, reference(*tensors))


def test_prefix_compressed(attention: Callable[..., Any]) -> None:
    tensors = qkv()
    mask = torch.zeros(3072, 2048, dtype=torch.bool).npu()
    npu = [t.npu() for t in tensors]
    output = attention(*npu, HEADS, "BNSD", atten_mask=mask, sparse_mode=6, prefix=[0, 4], scale=SCALE)[0]
    hidden = causal(SEQUENCE, SEQUENCE).expand(BATCH, 1, -1, -1).clone()
    hidden[1, :, :, :4] = False
    close(output, reference(*tensors, hidden))


def packed() -> tuple[list[int], list[int], list[int], Tensor, Tensor, Tensor]:
    """Lengths, cumulative lengths of queries and keys, and [T, N, D] tensors."""
    q_lengths, kv_lengths = [3, 1, 4], [5, 2, 4]
    q_ends, kv_ends = torch.tensor(q_lengths).cumsum(0).tolist(), torch.tensor(kv_lengths).cumsum(0).tolist()
    query = make(8, HEADS, DIM, seed=1)
    return q_lengths, q_ends, kv_ends, query, make(11, KV_HEADS, DIM, seed=2), make(11, KV_HEADS, DIM, seed=3)


def packed_reference(hide: Callable[[int, int, int], Tensor | None]) -> tuple[Tensor, list[Tensor]]:
    """Compute each sequence separately; ``hide(number, Sq, Skv)``."""
    _, q_ends, kv_ends, query, key, value = packed()
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    outputs, q_start, kv_start = [], 0, 0
    for number, (q_end, kv_end) in enumerate(zip(q_ends, kv_ends, strict=True)):
        q = leaves[0][q_start:q_end].transpose(0, 1)[None]
        k, v = (leaf[kv_start:kv_end].transpose(0, 1)[None] for leaf in leaves[1:])
        hidden = hide(number, q_end - q_start, kv_end - kv_start)
        outputs.append(reference(q, k, v, hidden)[0].transpose(0, 1))
        q_start, kv_start = q_end, kv_end
    return torch.cat(outputs), leaves


def right_down(number: int, q_length: int, kv_length: int) -> Tensor:
    return causal(q_length, kv_length, kv_length - q_length)


def band_at_end(number: int, q_length: int, kv_length: int) -> Tensor:
    if number < 2:
        return right_down(number, q_length, kv_length)
    return causal(q_length, kv_length) | ~torch.ones(q_length, kv_length, dtype=torch.bool).triu(-1)


def band_at_start(number: int, q_length: int, kv_length: int) -> Tensor:
    if number:
        return causal(q_length, kv_length)
    return causal(q_length, kv_length, 2) | ~torch.ones(q_length, kv_length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(("mode", "hide"), [(3, right_down), (7, band_at_end), (8, band_at_start)])
def test_packed_sequences(attention: Callable[..., Any], mode: int, hide: Callable[..., Tensor]) -> None:
    _, q_ends, kv_ends, *tensors = packed()
    leaves = [t.npu().requires_grad_() for t in tensors]
    output, maximum, *_ = attention(
        *leaves, HEADS, "TND", atten_mask=triangle(), sparse_mode=mode, scale=SCALE, actual_seq_qlen=q_ends,
        actual_seq_kvlen=kv_ends, pre_tockens=1, next_tockens=0,
    )  # fmt: skip
    expected, expected_leaves = packed_reference(hide)
    close(output, expected.detach())
    assert maximum.shape == (8, HEADS, 8)
    output.square().sum().backward()
    expected.square().sum().backward()
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        close(leaf.grad, other.grad, 1e-5)


def test_packed_mask_of_the_longest_sequences_and_trailing_zero_lengths(attention: Callable[..., Any]) -> None:
    _, q_ends, kv_ends, *tensors = packed()
    mask = causal(4, 5)
    output = attention(
        *(t.npu() for t in tensors), HEADS, "TND", atten_mask=mask.npu(), sparse_mode=1, scale=SCALE,
        actual_seq_qlen=[*q_ends, 0], actual_seq_kvlen=[*kv_ends, 0],
    )[0]  # fmt: skip
    close(output, packed_reference(lambda number, q, kv: mask[:q, :kv])[0].detach())


def test_packed_statistics_run_sequence_by_sequence_with_heads_outside(attention: Callable[..., Any]) -> None:
    lengths, q_ends, kv_ends, *tensors = packed()
    npu = [t.npu() for t in tensors]
    options = {"scale": SCALE, "actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends}
    plain = attention(*npu, HEADS, "TND", **options)[1].cpu()
    by_token = attention(*npu, HEADS, "TND", **options, softmax_layout="TND")[1].cpu()
    start = 0
    for length in lengths:
        rows = plain.reshape(-1, 8)[start * HEADS : (start + length) * HEADS].view(HEADS, length, 8)
        torch.testing.assert_close(rows.transpose(0, 1), by_token[start : start + length])
        start += length


def merge(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Ring attention's merge of (output BNSD, max, sum)."""
    largest = torch.maximum(first[1], second[1])
    weights = [part[2] * torch.exp(part[1] - largest) for part in (first, second)]
    total = weights[0] + weights[1]
    output = sum(part[0] * (weight / total)[..., :1] for part, weight in zip((first, second), weights, strict=True))
    return [output, largest, total]


def test_parts_merge_by_their_statistics_and_the_gradient_takes_the_merged_ones(
    attention: Callable[..., Any], gradient: Callable[..., Any]
) -> None:
    tensors = qkv(4, 8)
    query, key, value = (t.npu() for t in tensors)
    halves = [(key[:, :, part].contiguous(), value[:, :, part].contiguous()) for part in (slice(0, 4), slice(4, 8))]
    options: list[dict[str, Any]] = [{}, {"atten_mask": triangle(), "sparse_mode": 3, "next_tockens": 0}]
    parts = [
        list(attention(query, *half, HEADS, "BNSD", scale=SCALE, **option)[:3])
        for half, option in zip(halves, options, strict=True)
    ]
    output, maximum, total = merge(*parts)
    leaves = [t.double().requires_grad_() for t in tensors]
    expected = reference(*leaves, causal(4, 8, 4))
    close(output, expected.detach())

    dy = make(*output.shape, seed=7)
    expected.backward(dy.double())
    results = [
        gradient(query, *half, dy.npu(), HEADS, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=output,
                 scale_value=SCALE, **option)
        for half, option in zip(halves, options, strict=True)
    ]  # fmt: skip
    close(results[0][0] + results[1][0], leaves[0].grad)
    close(torch.cat([results[0][1], results[1][1]], 2), leaves[1].grad)
    close(torch.cat([results[0][2], results[1][2]], 2), leaves[2].grad)


def test_a_query_without_keys_gives_zeros_and_weighs_nothing(attention: Callable[..., Any]) -> None:
    tensors = qkv(6, 4)
    npu = [t.npu() for t in tensors]
    output, maximum, total, *_ = attention(*npu, HEADS, "BNSD", atten_mask=triangle(), sparse_mode=3, scale=SCALE)
    assert not output[:, :, :2].any()
    assert not total[:, :, :2].any()
    assert (maximum[:, :, :2] == torch.finfo(torch.float32).min).all()
    hidden = causal(6, 4, -2)
    hidden[:2] = False
    close(output[:, :, 2:], reference(*tensors, hidden)[:, :, 2:])


def test_dropout_is_the_same_forward_and_backward(attention: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    torch.npu.manual_seed(3)
    query, key, value = (t.npu().requires_grad_() for t in qkv())
    output, maximum, total, _, seed, offset, numels = attention(
        query, key, value, HEADS, "BNSD", scale=SCALE, keep_prob=0.5
    )
    assert numels == BATCH * HEADS * SEQUENCE * SEQUENCE
    dy = make(*output.shape, seed=7).npu()
    output.backward(dy)
    direct = gradient(
        query, key, value, dy, HEADS, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=output,
        scale_value=SCALE, keep_prob=0.5, seed=seed, offset=offset, numels=numels,
    )  # fmt: skip
    for leaf, actual in zip((query, key, value), direct, strict=False):
        close(leaf.grad, actual.cpu())
    torch.npu.manual_seed(3)
    repeated = attention(query, key, value, HEADS, "BNSD", scale=SCALE, keep_prob=0.5)[0]
    close(repeated, output.detach().cpu())
    other = attention(query, key, value, HEADS, "BNSD", scale=SCALE, keep_prob=0.5)[0]
    assert not torch.equal(other.cpu(), output.cpu())


def test_dropout_keeps_the_share_it_is_told_and_scales_what_is_kept(attention: Callable[..., Any]) -> None:
    torch.npu.manual_seed(1)
    length = 64
    query = torch.zeros(1, 1, length, length).npu()
    value = torch.eye(length).view(1, 1, length, length).npu()  # the output is the matrix of weights
    weights = attention(query, query, value, 1, "BNSD", keep_prob=0.8)[0].cpu() * length
    nonzero = weights > 0
    assert nonzero.float().mean().item() == pytest.approx(0.8, abs=0.02)
    torch.testing.assert_close(weights[nonzero], torch.full_like(weights[nonzero], 1 / 0.8))


def test_position_bias_and_its_gradient(attention: Callable[..., Any]) -> None:
    import torch_npu

    tensors = qkv()
    bias = make(1, HEADS, SEQUENCE, SEQUENCE, seed=6)
    leaf = bias.npu().requires_grad_()
    output = attention(*(t.npu() for t in tensors), HEADS, "BNSD", pse=leaf, scale=SCALE)[0]
    expected_leaf = bias.double().requires_grad_()
    expected = reference(*tensors, bias=expected_leaf)
    close(output, expected.detach())
    output.square().sum().backward()
    expected.square().sum().backward()
    close(leaf.grad, expected_leaf.grad)
    before = torch_npu.npu_fusion_attention_v2(
        *(t.npu() for t in tensors), HEADS, "BNSD", pse=bias.npu(), scale=SCALE, pse_type=0
    )[0]
    close(before, reference(*tensors, bias=bias * SCALE))


def test_bfloat16_sums_in_float32(attention: Callable[..., Any]) -> None:
    tensors = [t.bfloat16() for t in qkv()]
    output = attention(*(t.npu() for t in tensors), HEADS, "BNSD", scale=SCALE)[0]
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.cpu(), reference(*tensors).bfloat16())


ROWS_HIDDEN = torch.zeros(4, 5, dtype=torch.bool)
ROWS_HIDDEN[1] = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_prob": 0.0}, r"The keep_prob value must be in range of \(0, 1\], but got 0.0"),
        ({"keep_prob": 1.5}, r"The keep_prob value must be in range of \(0, 1\], but got 1.5"),
        ({"head_num": 0}, "head_num must > 0, but got 0"),
        ({"head_num": 3}, r"head_num is \[3\], but got query dim1 \[4\]"),
        ({"input_layout": "NBSD"}, "The input_layout should be BSH/SBH/BNSD/BSND/TND"),
        ({"input_layout": "SBH"}, r"Invalid layout\[SBH\]"),
        ({"sparse_mode": 7}, r"The sparse_mode value must be in range of \[0,6\], but got 7"),
        ({"sparse_mode": 2, "atten_mask": torch.zeros(6, 6, dtype=torch.bool)},
         r"In the attenmask compression, please set the atten_mask_shape to \[2048,2048\]"),
        ({"sparse_mode": 2, "atten_mask": torch.zeros(2, 1, 6, 6, dtype=torch.bool)},
         r"please set the atten_mask_shape to \[2048,2048\]"),
        ({"sparse_mode": 6, "prefix": [1, 1], "atten_mask": torch.zeros(6, 6, dtype=torch.bool)},
         r"In the prefix attenmask compression, please set the atten_mask_shape to \[3072,2048\]"),
        ({"sparse_mode": 6, "atten_mask": torch.zeros(3072, 2048, dtype=torch.bool)},
         r"prefixN is invalid, it should be the same size as bSize\[2\]"),
        ({"sparse_mode": 1, "atten_mask": torch.zeros(6, 6)}, r"invalid attenMask dtype\[torch.float32\]"),
        ({"sparse_mode": 1, "atten_mask": torch.zeros(2, 1, 1, 6, dtype=torch.bool)},
         r"get unsupported atten_mask shape, the shape is \[2, 1, 1, 6\]"),
        ({"sparse_mode": 1, "atten_mask": torch.zeros(2, 6, 6, dtype=torch.bool)},
         "atten mask dim should be 2 or 4, but got 3"),
        ({"sparse_mode": 2, "atten_mask": torch.zeros(2048, 2048, dtype=torch.bool)},
         "must be the compressed causal mask"),
        ({"pse": torch.zeros(1, 4, 6, 5)}, r"get unsupported pse shape, the shape is \[1, 4, 6, 5\]"),
    ],
)  # fmt: skip
def test_what_the_kernel_refuses(attention: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"head_num": HEADS, "input_layout": "BNSD"} | changes
    arguments = {name: value.npu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        attention(*(t.npu() for t in qkv()), **arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 6, 769), (1, 2, 6, 769)), r"dSize is not in range:\(0, 768\]"),
        (((1, 4, 6, 8), (1, 3, 6, 8)), r"n1Size \[4\] should be a multiple of n2Size \[3\]"),
        (((2, 4, 6, 8), (1, 2, 6, 8)), "batch of query and key must be equal"),
        (((4, 8), (4, 8)), "should be 3 or 4 dimensional, but got 2-dimensional"),
    ],
)
def test_shapes_the_kernel_refuses(attention: Callable[..., Any], shapes: Any, message: str) -> None:
    query, key = (make(*shape).npu() for shape in shapes)
    with pytest.raises(RuntimeError, match=message):
        attention(query, key, key, 4, "BNSD")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_seq_qlen": None}, "the size of actual_seq_qlen and actual_seq_kvlen must be the same"),
        ({"actual_seq_qlen": [3, 8]}, "the size of actual_seq_qlen and actual_seq_kvlen must be the same"),
        ({"actual_seq_qlen": [3, 4, 7]}, r"Query T\(8\) and key T\(11\) need equal to respectively sum of seqLen\(7\)"),
        ({"actual_seq_kvlen": [0, 7, 11]}, r"Batch\(0\) seqLen is not 0 and sekvLen is 0"),
        ({"sparse_mode": 5}, r"The sparse_mode value must be in range of \[0,5\) or \(5,8\], but got 5"),
        ({"sparse_mode": 1, "atten_mask": ROWS_HIDDEN}, "hides every key from a query of sequence 0"),
        ({"sparse_mode": 1, "atten_mask": torch.zeros(3, 1, 4, 5, dtype=torch.bool)}, r"TND takes \[maxSq, maxSkv\]"),
    ],
)
def test_packed_calls_the_kernel_refuses(attention: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    _, q_ends, kv_ends, *tensors = packed()
    arguments: dict[str, Any] = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends} | changes
    arguments = {name: value.npu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        attention(*(t.npu() for t in tensors), HEADS, "TND", **arguments)


def test_a_type_the_kernel_refuses(attention: Callable[..., Any]) -> None:
    query = make(1, 1, 4, 8).double().npu()
    with pytest.raises(RuntimeError, match=r"query must be float16, bfloat16 or float32, but got torch\.float64"):
        attention(query, query, query, 1, "BNSD")


def test_tensors_of_two_devices_are_refused(attention: Callable[..., Any]) -> None:
    query, key, value = qkv()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        attention(query.npu(), key.npu(), value, HEADS, "BNSD")
    with pytest.raises(NotImplementedError, match="Could not run 'npu::npu_fusion_attention' with arguments from the"):
        attention(query, key, value, HEADS, "BNSD")
