"""The kernels between QKV projection and attention against float64, and full models with and without them. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

import megascend
from megascend.testing.parity import case_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

EPS = 1e-6
FP32_BOUND, BF16_BOUND = 1e-5, 4e-3
"""Bounds of relative differences of norms, in float32 and with results rounded to bfloat16."""
LENGTHS = (300, 1, 90, 500, 64, 17)


def table(positions: int, rotary: int, base: float = 1e6) -> Tensor:
    """Build Megatron's table of angles, [positions, 1, 1, rotary]."""
    steps = base ** -(torch.arange(0, rotary, 2, device="cuda") / rotary)
    angles = torch.outer(torch.arange(positions, device="cuda", dtype=torch.float32), steps)
    return torch.cat([angles, angles], -1)[:, None, None]


def exact(mixed: Tensor, angles: Tensor, lengths: tuple[int, ...], weights: list[Tensor], groups: int, width: int):
    """Compute q, k and v in the dtype of ``mixed``, step by step.

    Args:
        lengths: lengths of packed sequences; empty: a plain batch.
        weights: weights of the norms; empty: no norms.
    """
    parts = mixed.unflatten(-1, (groups, -1, width))
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    if weights:
        query, key = (
            rms_norm(tensor, (width,), weight, EPS) for tensor, weight in zip((query, key), weights, strict=True)
        )
    sequences = [torch.arange(length, device="cuda") for length in lengths or (len(mixed),)]
    angle = angles[torch.cat(sequences)].to(mixed.dtype)

    def rotated(tensor: Tensor) -> Tensor:
        rotary, unrotated = tensor[..., : angle.shape[-1]], tensor[..., angle.shape[-1] :]
        first, second = rotary.chunk(2, -1)
        return torch.cat([rotary * angle.cos() + torch.cat([-second, first], -1) * angle.sin(), unrotated], -1)

    return rotated(query), rotated(key), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize(
    ("groups", "heads", "width", "rotary"),
    [
        (8, 2, 128, 128),
        (1, 4, 64, 64),
        (2, 7, 128, 128),
        (8, 1, 64, 32),
        (2, 2, 128, 64),
        (3, 2, 256, 256),
        (2, 2, 16, 8),
    ],
)
def test_values_and_gradients(
    dtype: torch.dtype, packed: bool, norms: bool, groups: int, heads: int, width: int, rotary: int
) -> None:
    megascend.bootstrap("cuda")
    from megascend.training.kernels.qkv_rope import qkv_rope

    generator = torch.Generator("cuda").manual_seed(0)
    lengths = LENGTHS if packed else ()
    tokens, batch = (sum(LENGTHS), 1) if packed else (333, 3)
    starts = torch.tensor([0, *LENGTHS, 0], device="cuda").cumsum(0).int() if packed else None  # the last one is empty
    size = tokens, batch, groups * (heads + 2) * width
    mixed = torch.randn(size, device="cuda", generator=generator).to(dtype).requires_grad_()
    weights = [
        (1 + 0.3 * torch.randn(width, device="cuda", generator=generator)).to(dtype).requires_grad_() for _ in "qk"
    ]
    weights = weights if norms else []
    angles = table(512, rotary)
    out = qkv_rope(mixed, angles, starts, (*weights, EPS) if norms else None, groups, width)  # type: ignore[reportArgumentType]
    grads = [torch.randn(tensor.shape, device="cuda", generator=generator).to(dtype) for tensor in out]
    results = [*out, *torch.autograd.grad(out, [mixed, *weights], grads)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in (mixed, *weights)]
    references = exact(doubles[0], angles, lengths, doubles[1:], groups, width)
    references = [*references, *torch.autograd.grad(references, doubles, [grad.double() for grad in grads])]
    assert [tuple(tensor.shape) for tensor in out] == [
        (tokens, batch, count, width) for count in (groups * heads, groups, groups)
    ]
    for name, result, expected in zip(("q", "k", "v", "mixed", "q norm", "k norm"), results, references, strict=False):
        assert result.dtype == dtype
        assert result.is_contiguous()
        error = float((result.double() - expected).norm() / expected.norm())
        assert error < (FP32_BOUND if dtype == torch.float32 else BF16_BOUND), (name, error)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_rotation_equals_transformer_engine(packed: bool) -> None:
    """Compare up to large positions, where an angle has thousands of turns."""
    megascend.bootstrap("cuda")
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    from megascend.training.kernels.qkv_rope import qkv_rope

    lengths, width = (100_000, 31_072), 64
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int() if packed else None
    mixed = torch.randn(tokens, 1, 3 * width, device="cuda")
    angles = table(tokens, width)
    query, key, _ = qkv_rope(mixed, angles, starts, None, 1, width)
    for result, tensor in zip((query, key), mixed.split(width, -1), strict=False):
        if packed:
            reference = apply_rotary_pos_emb(tensor, angles, tensor_format="thd", fused=True, cu_seqlens=starts)[
                :, None
            ]
        else:
            reference = apply_rotary_pos_emb(tensor[:, :, None], angles, tensor_format="sbhd", fused=True)
        assert float((result - reference).abs().max()) < 1e-5


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    return case_checkpoint(parity_folder, "qwen3", max_position_embeddings=1024, **shape)


def trained(checkpoint, *, fused: bool) -> tuple[list[float], list[float], list[Tensor]]:
    """Return losses and gradient norms of packed and plain micro batches, and all gradients of the last."""
    from megascend.engines.megatron import fused_qkv

    backend = megascend.MegatronBackend(
        model=checkpoint, platform="cuda", precision="bf16", batching=megascend.Batching(micro_batch_tokens=600)
    )
    if not fused:
        for chunk in backend.engine.bare_chunks:
            for layer in chunk.decoder.layers:
                for name in ("forward", "get_query_key_value_tensors"):
                    method = vars(layer.self_attention).pop(name)
                    assert isinstance(method.__self__, fused_qkv.FusedQkv), "it is in place"
    losses, norms, gradients = [], [], []
    generator = torch.Generator().manual_seed(0)
    for lengths in ((300, 150, 90, 500, 64), (257, 257, 257, 257)):
        chosen = [megascend.Sample.causal(torch.randint(0, 300, (length,), generator=generator)) for length in lengths]
        losses.append(backend.forward_backward(chosen).loss)
        parameters = [entry for chunk in backend.engine.bare_chunks for entry in chunk.named_parameters()]
        gradients = [parameter.main_grad.clone() for _, parameter in parameters]
        norms.append(backend.optimizer_step().grad_norm)
    backend.close()
    return losses, norms, gradients


def test_models_with_and_without_the_kernel_train_alike(checkpoint, caplog) -> None:
    (losses, norms, gradients), (old_losses, old_norms, old_gradients) = (
        trained(checkpoint, fused=fused) for fused in (True, False)
    )
    print(losses, old_losses, norms, old_norms)
    assert "does not compute what torch does" not in caplog.text, "plain torch took its place"
    assert losses == pytest.approx(old_losses, rel=5e-3)
    assert norms == pytest.approx(old_norms, rel=2e-2)
    for result, other in zip(gradients, old_gradients, strict=True):
        assert float((result - other).norm() / other.norm()) < 0.1
