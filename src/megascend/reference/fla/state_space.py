"""Mamba-2's selective state spaces (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060), by chunks.

A head's state S is a [head width, state width] matrix. Token t with input x, step ``dt`` > 0, and the vectors B and C of its
group of heads, in a head with A < 0::

    S <- exp(dt A) S + dt x B^T
    output = S C + D x

Products are computed in fp32, or in fp64 if the inputs are. As mamba_ssm's, the functions are not compiled: they depend on
sequences' lengths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megascend.errors import ConfigError
from megascend.reference.fla.convolution import causal_conv1d_fn

CHUNK = 64
"""Tokens of a chunk; the cost within one grows with its square, and chunks follow each other one by one."""
NO_LIMIT = (0.0, float("inf"))


class GatedRMSNorm(torch.nn.Module):
    """RMSNorm over groups of features, of inputs that a gate multiplies."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``x`` [..., hidden size], whose gate is silu of ``z``, if there is one."""
        return gated_rms_norm(x, z, self.weight, self.eps, self.group_size, norm_before_gate=self.norm_before_gate)


def gated_rms_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int | None, *, norm_before_gate: bool
) -> Tensor:
    """Normalise groups of features and multiply by ``weight``; silu of ``z`` multiplies the result, or before it the input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values, gate = x.to(wide), None if z is None else torch.nn.functional.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        values = values * gate
    groups = values.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).flatten(-2) * weight.to(wide)
    if gate is not None and norm_before_gate:
        normed = normed * gate
    return normed.to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Compute a state space's outputs for whole sequences. Differentiable.

    Args:
        x: inputs, [batch, tokens, heads, head width].
        dt: steps, [batch, tokens, heads].
        A: [heads], negative.
        B: [batch, tokens, groups, state width]; a group serves consecutive heads.
        C: as ``B``.
        chunk_size: of mamba_ssm's kernels; the results do not depend on it.
        D: [heads] or [heads, head width].
        z: silu of it multiplies the outputs; as ``x``.
        dt_bias: [heads], added to the steps.
        initial_states: [batch, heads, head width, state width]; default: zeros.
        seq_idx: number of each token's packed sequence, int [batch, tokens]; tokens of one are consecutive. A sequence is
            computed by itself, so that others cannot change its outputs by a bit.
        cu_seqlens: refused.
        dt_softplus: softplus of the steps, after their bias.
        dt_limit: smallest and largest step, after that.
        return_final_states: return the states after the last tokens as well, as ``initial_states``.
        return_varlen_states: refused.

    Returns:
        outputs, as ``x`` and in its dtype, or outputs and states.
    """
    if cu_seqlens is not None or return_varlen_states:
        raise ConfigError(
            "mamba_chunk_scan_combined: the reference on the CPU has neither cu_seqlens nor return_varlen_states"
        )
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ConfigError("mamba_chunk_scan_combined: the reference on the CPU keeps no states of packed sequences")
    scan = functools.partial(
        _scan, a=A, state=initial_states, d=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
    )
    if return_final_states:
        return _uncompiled(scan, x, dt, B, C, z)
    return _by_sequence(lambda *tensors: _uncompiled(scan, *tensors)[0], (x, dt, B, C, z), seq_idx)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Compute a Mamba-2 layer from its input projection on: convolution, state space, gate, norm and output projection.

    Args:
        zxbcdt: gate, input, B, C and steps of each token, [batch, tokens, 2 heads x head width + 2 groups x state width + heads].
        conv1d_weight: of the convolution of input, B and C, [channels, taps].
        conv1d_bias: [channels].
        rmsnorm_weight: of the gated norm, [heads x head width]; None: the gate multiplies the outputs.
        outproj_weight: [hidden size, heads x head width]; None: no projection.
        headdim: head width; may be left out if ``D`` has it.
        ngroups: groups of heads.

    The other arguments are those of :func:`mamba_chunk_scan_combined`.
    """
    heads, width = (D.shape[0], headdim) if D.dim() == 1 else tuple(D.shape)
    if width is None:
        raise ConfigError("mamba_split_conv1d_scan_combined: headdim is missing, and D has one dimension")
    inner = heads * width
    channels = conv1d_weight.shape[0]
    if zxbcdt.shape[-1] != inner + channels + heads:
        raise ConfigError(
            f"mamba_split_conv1d_scan_combined: zxbcdt has {zxbcdt.shape[-1]} features, not {inner + channels + heads} for "
            f"{heads} heads of {width} and {channels} channels of the convolution"
        )
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ConfigError(
            "mamba_split_conv1d_scan_combined: the reference on the CPU keeps no states of packed sequences"
        )

    def layer(row: Tensor) -> Any:
        z, convolved, dt = row.split([inner, channels, heads], dim=-1)
        convolved = causal_conv1d_fn(convolved.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation)
        state = (channels - inner) // 2
        x, b, c = convolved.transpose(1, 2).split([inner, state, state], dim=-1)
        scanned = mamba_chunk_scan_combined(
            x.unflatten(-1, (heads, width)),
            dt,
            A,
            b.unflatten(-1, (ngroups, -1)),
            c.unflatten(-1, (ngroups, -1)),
            chunk_size,
            D=D,
            z=None if rmsnorm_weight is not None else z.unflatten(-1, (heads, width)),
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=True,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )
        outputs, states = scanned if return_final_states else (scanned, None)
        outputs = outputs.flatten(-2)
        if rmsnorm_weight is not None:
            group = inner // ngroups
            outputs = gated_rms_norm(outputs, z, rmsnorm_weight, rmsnorm_eps, group, norm_before_gate=norm_before_gate)
        if outproj_weight is not None:
            outputs = torch.nn.functional.linear(outputs.to(outproj_weight.dtype), outproj_weight, outproj_bias)
        return (outputs, states) if return_final_states else outputs

    return _by_sequence(layer, (zxbcdt,), seq_idx)


def exact_in_fp32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``kernel`` for a layer in 16 bits, and :func:`mamba_split_conv1d_scan_combined` in fp32.

    The kernels of mamba_ssm are Triton's, whose products of fp32 are in TF32.
    """

    @functools.wraps(kernel)
    def by_dtype(zxbcdt: Tensor, *args: Any, state_dtype: Any = None, **kwargs: Any) -> Any:
        if zxbcdt.dtype == torch.float32:
            return mamba_split_conv1d_scan_combined(zxbcdt, *args, **kwargs)
        # Megatron-Core checks for this argument of newer versions once, when it is imported.
        states = {} if state_dtype is None else {"state_dtype": state_dtype}
        return kernel(zxbcdt, *args, **kwargs, **states)

    return by_dtype


def _by_sequence(function: Callable[..., Any], tensors: tuple[Tensor | None, ...], seq_idx: Tensor | None) -> Any:
    """Call ``function`` with the whole batch, or with each packed sequence of its rows, whose outputs are joined."""
    if seq_idx is None:
        return function(*tensors)
    rows = []
    for row, numbers in enumerate(seq_idx):
        borders = [0, *((numbers.diff() != 0).nonzero().flatten() + 1).tolist(), len(numbers)]
        parts = [
            # Contiguous: elementwise functions round memory with gaps differently, and nothing may depend on the neighbours.
            function(*(None if x is None else x[row : row + 1, start:end].contiguous() for x in tensors))
            for start, end in itertools.pairwise(borders)
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def _scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor | None,
    *,
    a: Tensor,
    state: Tensor | None,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Compute a batch of sequences of one length; returns outputs, and states [batch, heads, head width, state width]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    step = dt.to(wide)
    if dt_bias is not None:
        step = step + dt_bias.to(wide)
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    if dt_limit != NO_LIMIT:
        step = step.clamp(*dt_limit)
    inputs = x.to(wide)
    batch, tokens, heads, width = x.shape
    share = heads // b.shape[2]
    # [batch, heads or groups, tokens, ...]
    weighted = (inputs * step.unsqueeze(-1)).transpose(1, 2)
    decay = (step * a.to(wide)).transpose(1, 2)
    b, c = (values.to(wide).transpose(1, 2) for values in (b, c))
    state = inputs.new_zeros(batch, heads, width, b.shape[-1]) if state is None else state.to(wide)
    outputs = [inputs.new_zeros(batch, heads, 0, width)]
    for start in range(0, tokens, CHUNK):
        part = slice(start, start + CHUNK)
        # All exponents below are sums of decays over consecutive tokens, at most 0: no factor exceeds 1.
        total = decay[:, :, part].cumsum(dim=-1)  # from the chunk's start, inclusive
        size = total.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        # exp() of the other half would overflow, and its gradient would be 0 * inf.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~later, -torch.inf).exp()
        keys, queries = b[:, :, part], c[:, :, part]
        scores = (queries @ keys.transpose(-1, -2)).repeat_interleave(share, dim=1) * between
        keys, queries = (values.repeat_interleave(share, dim=1) for values in (keys, queries))
        earlier = (queries @ state.transpose(-1, -2)) * total.exp().unsqueeze(-1)
        outputs.append(scores @ weighted[:, :, part] + earlier)
        remaining = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = total[..., -1:, None].exp() * state + (weighted[:, :, part] * remaining).transpose(-1, -2) @ keys
    result = torch.cat(outputs, dim=2).transpose(1, 2)
    if d is not None:
        result = result + inputs * (d.to(wide).unsqueeze(-1) if d.dim() == 1 else d.to(wide))
    if z is not None:
        result = result * torch.nn.functional.silu(z.to(wide))
    return result.to(x.dtype).contiguous(), state  # as the kernel's: models view it


@_disable_dynamo
def _uncompiled(scan: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
    # Not torch.compiler.disable, which imports the compiler: every bootstrap would, and it sets variables of the environment.
    return scan(*tensors)
