"""Expert parallelism: ranks hold different experts, and send each token's state to those that hold its experts.

A rank's experts are fused parameters again, of fewer experts, and are computed as all of them are elsewhere. Each layer waits
once for the device, for how many rows come from and go to each rank. Recomputation repeats all exchanges alike, since its routing
is the forward pass's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascend.engines.fsdp.grouped_experts import Experts, Moved, Spread, permutation
from megascend.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ExpertShare:
    """Which experts this rank holds: the ``index``-th of ``size`` equal parts of every layer's.

    Attributes:
        group: of the ranks that hold one part each, in their order.
    """

    group: ProcessGroup
    size: int
    index: int


class TokenExchange:
    """Rows of one layer and micro batch: each token once for each of its experts, on the ranks that hold those.

    Args:
        index: int64 [n, k], each token's experts, numbered over all ranks.
        experts: of one rank.

    Attributes:
        expert: int64 [m], of each row that has come here, by its number on this rank.
    """

    def __init__(self, index: Tensor, share: ExpertShare, experts: int) -> None:
        self._group, self._count = share.group, index.shape[1]
        self._order, self._place, ends = permutation(index, share.size * experts)
        counts = ends.diff(prepend=ends.new_zeros(1))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=share.group)
        per_rank = torch.stack([counts, received]).view(2, share.size, experts).sum(2)
        self._sent, self._received = per_rank.tolist()  # the wait
        numbers = torch.arange(experts, device=index.device).repeat(share.size)
        self.expert = numbers.repeat_interleave(received, output_size=sum(self._received))

    def to_experts(self, values: Tensor) -> Tensor:
        """[n, ...], a row for each token, to [m, ...], the rows that this rank's experts compute."""
        rows: Any = Spread.apply(values, self._order, self._place, self._count)
        return _exchanged(rows, self._sent, self._received, self._group)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back: [m, ...] to [n, k, ...], what each of a token's experts has made of it."""
        back = _exchanged(rows, self._received, self._sent, self._group)
        by_token: Any = Moved.apply(back, self._place, self._order)
        return by_token.unflatten(0, (-1, self._count))


def computed_where_experts_are(
    module: Any,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    share: ExpertShare,
    compute: Experts,
    along: Tensor | None = None,
) -> Tensor:
    """See :data:`megascend.engines.fsdp.grouped_experts.Experts`: by ``compute``, on the ranks that hold the experts.

    Args:
        module: this rank's experts.
        index: int64 [n, k], numbered over all ranks.
        along: int64 [n], sent with the tokens; ``compute`` gets that of its rows as ``along``.
    """
    exchange = TokenExchange(index, share, module.num_experts)
    rows, expert = exchange.to_experts(hidden), exchange.expert
    sent = {} if along is None else {"along": exchange.to_experts(along[:, None])[:, 0]}
    idle = not len(rows)
    if idle:  # its parameters' gradients are reduced together with others' all the same
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
        sent = {name: values.new_zeros(1) for name, values in sent.items()}
    made = compute(module, rows, expert[:, None], rows.new_ones(len(rows), 1), **sent)
    made = exchange.to_tokens(made[:0] if idle else made)
    return (made * weights[..., None]).sum(1).to(hidden.dtype)


def keep_own_experts(model: nn.Module, share: ExpertShare, is_experts: Callable[[nn.Module], bool]) -> None:
    """Leave a model, which has no memory yet, with this rank's part of each layer's experts.

    Raises:
        ConfigError: they cannot be divided.
    """
    found: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    for name, module in found:
        total = module.num_experts
        parameters = list(module.named_parameters())
        if total % share.size or any("." in key or value.shape[0] != total for key, value in parameters):
            raise ConfigError(
                f"engine fsdp: parallel.expert={share.size} cannot divide {name}, {total} experts of "
                f"{type(module).__name__}; set parallel.expert to a divisor, or to 1"
            )
        for key, value in parameters:
            own = value.new_empty(total // share.size, *value.shape[1:])
            setattr(module, key, nn.Parameter(own, requires_grad=value.requires_grad))
        module.num_experts = total // share.size


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        back = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(back, grad, ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """``rows`` [sum of sent, ...], those for each rank after each other, to [sum of received, ...], from each rank."""
    return _AllToAll.apply(rows, sent, received, group)
