"""Expert parallelism: ranks hold different experts, and send each token's state to those that hold its experts.

A rank's experts are fused parameters again, of fewer experts, and are computed as all of them are elsewhere. Each layer waits
once for the device, for how many rows come from and go to each rank. A row's routing weight goes with it, to be applied where
rows are narrow (``grouped_experts``). Recomputation repeats all exchanges alike, since its routing is the forward pass's.
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
from megascend.kernels.token_rows import Moved

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

    def to_experts(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """[n, ...], a row for each token, and [n, k] to the rows that this rank's experts compute, and a weight of each.

        Returns:
            [m, ...] and [m].
        """
        rows: Any = SpreadRows.apply(values, self._order, self._place, self._count)
        weight_of_row: Any = Moved.apply(weights.flatten(), self._order, self._place)
        rows, weight_of_row = _exchanged(self._sent, self._received, self._group, rows, weight_of_row)
        return rows, weight_of_row

    def along(self, values: Tensor) -> Tensor:
        """int64 [n], a number for each token, to [m]."""
        (numbers,) = _exchanged(self._sent, self._received, self._group, values[self._order // self._count])
        return numbers

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back: [m, ...] to [n, k, ...], what each of a token's experts has made of it."""
        (back,) = _exchanged(self._received, self._sent, self._group, rows)
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
    """See :data:`megascend.engines.fsdp.experts.Experts`: by ``compute``, on the ranks that hold the experts.

    Args:
        module: this rank's experts.
        index: int64 [n, k], numbered over all ranks.
        along: int64 [n], sent with the tokens; ``compute`` gets that of its rows as ``along``.
    """
    exchange = TokenExchange(index, share, module.num_experts)
    rows, weight_of_row = exchange.to_experts(hidden, weights)
    expert, sent = exchange.expert, {} if along is None else {"along": exchange.along(along)}
    idle = not len(rows)
    if idle:  # its parameters' gradients are reduced together with others' all the same
        rows, weight_of_row = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), weight_of_row.new_zeros(1)
        expert, sent = expert.new_zeros(1), {name: values.new_zeros(1) for name, values in sent.items()}
    made = compute(module, rows, expert[:, None], weight_of_row[:, None], **sent)
    return exchange.to_tokens(made[:0] if idle else made).sum(1).to(hidden.dtype)


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
    """Several tensors as one function, so that ranks exchange them in one order, backward too."""

    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: ProcessGroup, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return tuple(_all_to_all(each, sent, received, group) for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (
            _all_to_all(grad, ctx.received, ctx.sent, ctx.group) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[3:], strict=True)
        )
        return None, None, None, *back


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _exchanged(sent: list[int], received: list[int], group: ProcessGroup, *rows: Tensor) -> tuple[Tensor, ...]:
    """``rows`` [sum of sent, ...], those for each rank after each other, to [sum of received, ...], from each rank."""
    exchanged: Any = _AllToAll.apply(sent, received, group, *rows)
    return exchanged
