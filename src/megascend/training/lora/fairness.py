"""Scheduling of many adapters' requests on one model. Pure: requests in, one unit of work out.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with tokens as the service. Every adapter has a start tag:
the tokens it was served, or the virtual time if that is later, so that idling earns nothing. The smallest tag leads the
next batch, and the virtual time is the leader's tag. Other requests that fit join while they are at most one full batch
ahead of the leader. This gives the bounds, where L is an adapter's largest request and B is max_batch_tokens:

- Adapters that always have work, from the start, differ by at most B + L tokens, L of the one that is ahead.
- A request counts as at least ``Ledger.least`` tokens: a unit of work has a fixed cost, and requests that share no batch
  with others (another loss, forwards) would otherwise delay them by a unit for every token.
- A request at the head of its line leads after at most one batch for every other adapter, if its own adapter is not
  ahead of the virtual time. If it is ahead by d tokens, each other adapter is served at most d + B + L before it.
- Optimizer steps cost no tokens. They run before any batch, all that are due at once, but never twice in a row while
  a batch waits, so they cannot delay it by more than one unit.

It uses no clocks, hashes or sets, so all ranks decide the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

RequestKind = Literal["forward_backward", "optimizer_step", "forward", "call"]
R = TypeVar("R", bound="Request")


@dataclass(frozen=True)
class Request:
    """Scheduling information of one request.

    Attributes:
        number: order of submission over all adapters; the earlier one wins a tie.
        tokens: input tokens, at least 1 unless it is an optimizer step.
        loss: only requests with equal losses share a batch; None unless it is a forward_backward.
    """

    adapter: str
    kind: RequestKind
    number: int
    tokens: int
    loss: Any


@dataclass(frozen=True)
class Ledger:
    """Record of the service so far.

    Attributes:
        now: virtual time in tokens; it never falls.
        served: for adapters ahead of ``now``, the tag at which their next request starts.
        stepped: True if the last unit was optimizer steps.
        least: smallest number of tokens that a request is charged for.
    """

    now: int = 0
    served: Mapping[str, int] = field(default_factory=dict)
    stepped: bool = False
    least: int = 0

    def start(self, adapter: str) -> int:
        """Return the start tag of this adapter's next request."""
        return max(self.now, self.served.get(adapter, 0))

    def charged(self, unit: Sequence[Request]) -> Ledger:
        """Return the ledger after ``unit`` has run, whether it succeeded or not."""
        if unit[0].kind == "optimizer_step":
            return replace(self, stepped=True)
        now = min(self.start(request.adapter) for request in unit)
        served = {**self.served, **{r.adapter: self.start(r.adapter) + max(r.tokens, self.least) for r in unit}}
        # start() takes the later of tag and ``now``, so lower tags say nothing.
        return Ledger(now, {adapter: tag for adapter, tag in served.items() if tag > now}, least=self.least)


def next_unit(heads: Sequence[R], ledger: Ledger, max_batch_tokens: int) -> list[R]:
    """Choose the requests to run together now: optimizer steps, forward_backwards with one loss, or forwards.

    Args:
        heads: the first waiting request of every adapter, in any order; no calls. An adapter's requests run in the order of
            submission, one per unit.
        ledger: record of past service; charge it with the result.
        max_batch_tokens: most tokens of one batch. A larger request is run separately.

    Returns:
        At least one request if there are any; the leader of a batch first.
    """
    steps = [request for request in heads if request.kind == "optimizer_step"]
    work = [request for request in heads if request.kind != "optimizer_step"]
    if steps and not (work and ledger.stepped):
        return sorted(steps, key=lambda request: request.number)
    work.sort(key=lambda request: (ledger.start(request.adapter), request.number))
    unit: list[R] = []
    for request in work:
        if not unit or _may_join(request, unit, ledger, max_batch_tokens):
            unit.append(request)
    return unit


def _may_join(request: Request, unit: Sequence[Request], ledger: Ledger, max_batch_tokens: int) -> bool:
    leader = unit[0]
    return (
        (request.kind, request.loss) == (leader.kind, leader.loss)
        and sum(other.tokens for other in unit) + request.tokens <= max_batch_tokens
        and ledger.start(request.adapter) <= ledger.start(leader.adapter) + max_batch_tokens
    )
