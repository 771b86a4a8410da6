"""Expert parallelism: ranks hold different experts, and send each token's state to the ranks that hold its experts.

A rank's experts are fused parameters of fewer experts, and are computed as without expert parallelism. Each layer waits once for
the device, for the number of rows from and to each rank. A row's routing weight is sent with it, to be applied where rows are
narrow (``grouped_experts``). Recomputation repeats the same exchanges, since it reuses the forward pass's routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascend.engines.fsdp.experts import Experts, SpreadRows, permutation
from megascend.errors import ConfigError
from megascend.training.kernels.token_rows import Permutation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Counts = list[int] | None
"""Rows to or from each rank of a group; None: equal parts."""


@dataclass(frozen=True)
class ExpertShare:
    """Share of experts on this rank: the ``index``-th of ``size`` equal parts of every layer's.

    Attributes:
        group: group of the ranks that hold one part each, in order.
    """

    group: ProcessGroup
    size: int
    index: int


class TokenExchange:
    """Dispatch and combine of one layer and micro batch: each token is sent once to each of its experts.

    Args:
        index: int64 [n, k], each token's experts, numbered over all ranks.
        experts: number of experts per rank.

    Attributes:
        expert: int64 [m], the expert of each received row, by its index on this rank.
    """

    def __init__(self, index: Tensor, share: ExpertShare, experts: int) -> None:
        self._group, self._count = share.group, index.shape[1]
        self._order, self._inverse, ends = permutation(index, share.size * experts)
        # Counts first: the receive buffers of the rows need their sizes on the host.
        counts = ends.diff(prepend=ends.new_zeros(1))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=share.group)
        per_rank = torch.stack([counts, received]).view(2, share.size, experts).sum(2)
        self._send_counts, self._receive_counts = per_rank.tolist()  # waits for the device
        numbers = torch.arange(experts, device=index.device).repeat(share.size)
        # The size is on the host already; without it repeat_interleave would wait for the device again.
        self.expert = numbers.repeat_interleave(received, output_size=sum(self._receive_counts))

    def to_experts(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens [n, ...] and routing weights [n, k]; return this rank's rows [m, ...] and their weights [m]."""
        rows: Any = SpreadRows.apply(values, self._order, self._inverse, self._count)
        row_weights: Any = Permutation.apply(weights.flatten(), self._order, self._inverse)
        # In one autograd node with the weights, see _AllToAll.
        rows, row_weights = exchange(self._send_counts, self._receive_counts, self._group, rows, row_weights)
        return rows, row_weights

    def send_numbers(self, values: Tensor) -> Tensor:
        """Send a number for each token, int64 [n]; return those of this rank's rows [m]."""
        (numbers,) = exchange(self._send_counts, self._receive_counts, self._group, values[self._order // self._count])
        return numbers

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send the experts' results [m, ...] back; return the results of each token's experts [n, k, ...]."""
        (results,) = exchange(self._receive_counts, self._send_counts, self._group, rows)
        by_token: Any = Permutation.apply(results, self._inverse, self._order)
        return by_token.unflatten(0, (-1, self._count))


def compute_on_expert_ranks(
    module: Any,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    share: ExpertShare,
    compute: Experts,
    token_adapters: Tensor | None = None,
) -> Tensor:
    """Compute experts by ``compute`` on the ranks that hold them; see :data:`megascend.engines.fsdp.experts.Experts`.

    Args:
        module: this rank's experts.
        index: int64 [n, k], numbered over all ranks.
        token_adapters: int64 [n], sent with the tokens; ``compute`` gets those of its rows as ``row_adapters``.
    """
    exchange = TokenExchange(index, share, module.num_experts)
    rows, row_weights = exchange.to_experts(hidden, weights)
    options = {} if token_adapters is None else {"row_adapters": exchange.send_numbers(token_adapters)}
    expert = exchange.expert
    idle = not len(rows)
    if idle:
        # A row of zeros, so that autograd reaches the parameters: reducing their gradients is collective.
        rows, row_weights = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), row_weights.new_zeros(1)
        expert, options = expert.new_zeros(1), {name: values.new_zeros(1) for name, values in options.items()}
    outputs = compute(module, rows, expert[:, None], row_weights[:, None], **options)
    return exchange.to_tokens(outputs[:0] if idle else outputs).sum(1).to(hidden.dtype)


def keep_local_experts(model: nn.Module, shares: int, is_experts: Callable[[nn.Module], bool]) -> None:
    """Replace the experts of a model on ``meta`` by one of ``shares`` equal parts of them; on ``meta`` all parts are the same."""
    modules: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    for name, module in modules:
        total = module.num_experts
        parameters = list(module.named_parameters())
        if total % shares or any("." in key or value.shape[0] != total for key, value in parameters):
            raise ConfigError(
                f"engine fsdp: parallel.expert={shares} cannot divide {name}, {total} experts of "
                f"{type(module).__name__}; set parallel.expert to a divisor, or to 1"
            )
        for key, value in parameters:
            part = value.new_empty(total // shares, *value.shape[1:])
            setattr(module, key, nn.Parameter(part, requires_grad=value.requires_grad))
        module.num_experts = total // shares


class _AllToAll(torch.autograd.Function):
    """All-to-all of several tensors in one autograd node, so that ranks exchange them in the same order, backward too."""

    @staticmethod
    def forward(
        ctx: Any, send_counts: Counts, receive_counts: Counts, group: ProcessGroup, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.send_counts, ctx.receive_counts, ctx.group = send_counts, receive_counts, group
        return tuple(_all_to_all(tensor, send_counts, receive_counts, group) for tensor in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Which inputs need gradients follows from the model, not from the tokens: all ranks skip the same exchanges.
        input_grads = (
            _all_to_all(grad, ctx.receive_counts, ctx.send_counts, ctx.group) if differentiated else None
            for grad, differentiated in zip(grads, ctx.needs_input_grad[3:], strict=True)
        )
        return None, None, None, *input_grads


def _all_to_all(rows: Tensor, send_counts: Counts, receive_counts: Counts, group: ProcessGroup) -> Tensor:
    out = rows.new_empty(len(rows) if receive_counts is None else sum(receive_counts), *rows.shape[1:])
    # Collectives read memory in order: gradients may arrive as expanded or transposed views.
    dist.all_to_all_single(out, rows.contiguous(), receive_counts, send_counts, group=group)
    return out


def exchange(send_counts: Counts, receive_counts: Counts, group: ProcessGroup, *rows: Tensor) -> tuple[Tensor, ...]:
    """Exchange ``rows``, ordered by target rank, for rows ordered by source rank. Differentiable.

    Args:
        send_counts, receive_counts: rows to and from each rank; None: equal parts.
    """
    results: Any = _AllToAll.apply(send_counts, receive_counts, group, *rows)
    return results
