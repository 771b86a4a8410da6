"""Figures of the service, and their text for Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megascend.serve.scheduler.futures import Future

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
UNITS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
RECENT_BATCHES = 120
RECENT_PROBLEMS = 20


@dataclass(frozen=True)
class Problem:
    """A failure that a tenant was told of.

    Attributes:
        time: of the service's clock, in seconds.
        kind: of the request.
        model: "" if it was for none.
        category: "user" or "server".
    """

    time: float
    kind: str
    model: str
    category: str
    message: str


@dataclass
class Histogram:
    """Counts of values up to bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Count a value."""
        if not self.counts:
            self.counts = [0] * len(self.bounds)
        self.counts = [c + (value <= bound) for c, bound in zip(self.counts, self.bounds, strict=True)]
        self.total += value
        self.count += 1

    def lines(self, name: str, labels: str = "") -> Iterable[str]:
        """In Prometheus' text format."""
        inside = f"{labels}," if labels else ""
        for bound, count in zip(self.bounds, self.counts or [0] * len(self.bounds), strict=True):
            yield f'{name}_bucket{{{inside}le="{bound:g}"}} {count}'
        yield f'{name}_bucket{{{inside}le="+Inf"}} {self.count}'
        around = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{around} {self.total:g}"
        yield f"{name}_count{around} {self.count}"


@dataclass
class Figures:
    """What has happened since the start.

    Attributes:
        done: ended requests by (kind, "ok", "user" or "server").
        tokens: read in requests that succeeded.
        latency: seconds from a request to its outcome, by kind.
        together: models in the batch of each forward_backward, optimizer steps left out.
        waited: units of work that ran while a forward_backward was the first of its model, before its own.
        waited_s: seconds of that time.
        refused: requests by HTTP status, those that were not answered with 200.
        batches: (models, tokens) of the last batches, oldest first.
        problems: the last failures of each tenant, oldest first.
    """

    done: dict[tuple[str, str], int] = field(default_factory=dict)
    tokens: int = 0
    latency: dict[str, Histogram] = field(default_factory=dict)
    together: Histogram = field(default_factory=lambda: Histogram(tuple(map(float, BATCH_SIZES))))
    waited: Histogram = field(default_factory=lambda: Histogram(tuple(map(float, UNITS))))
    waited_s: Histogram = field(default_factory=lambda: Histogram(BUCKETS_S))
    refused: dict[int, int] = field(default_factory=dict)
    batches: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    problems: dict[str, deque[Problem]] = field(default_factory=dict)

    def count(self, future: Future, together: int, now: float) -> None:
        """Count a future that has ended."""
        how = "ok" if future.failure is None else future.failure.category
        self.done[future.kind, how] = self.done.get((future.kind, how), 0) + 1
        self.latency.setdefault(future.kind, Histogram(BUCKETS_S)).add(now - future.made)
        if future.failure is not None:
            self.note(future.tenant, Problem(now, future.kind, future.model or "", how, future.failure.message))
        elif future.kind == "forward_backward":
            self.tokens += future.tokens
            self.together.add(together)

    def count_wait(self, future: Future, units: int | None, seconds: float) -> None:
        """Count how long a future that has ended had waited for its turn."""
        if units is not None and future.kind == "forward_backward":
            self.waited.add(units)
            self.waited_s.add(seconds)

    def count_batch(self, futures: Iterable[Future]) -> None:
        """Note how full a batch was.

        Args:
            futures: all that ended with it; those of gradients that succeeded were in it.
        """
        inside = [each for each in futures if each.kind == "forward_backward" and each.failure is None]
        if inside:
            self.batches.append((len({each.model for each in inside}), sum(each.tokens for each in inside)))

    def note(self, tenant: str, problem: Problem) -> None:
        """Keep a failure for its tenant to see; the oldest makes room."""
        self.problems.setdefault(tenant, deque(maxlen=RECENT_PROBLEMS)).append(problem)

    def refuse(self, status: int) -> None:
        """Count a request that was not taken."""
        self.refused[status] = self.refused.get(status, 0) + 1

    def prometheus(self, gauges: Mapping[str, tuple[str, float]], pending: Mapping[str, int]) -> str:
        """All figures in Prometheus' text format, version 0.0.4. No tenant's name is among them.

        Args:
            gauges: by name, what it is and its value now.
            pending: futures that have not ended, by kind.
        """
        lines = []
        for name, (what, value) in gauges.items():
            lines += [
                f"# HELP megascend_{name} {what}",
                f"# TYPE megascend_{name} gauge",
                f"megascend_{name} {value:g}",
            ]
        lines += ["# HELP megascend_pending Requests that have not ended.", "# TYPE megascend_pending gauge"]
        lines += [f'megascend_pending{{kind="{kind}"}} {count}' for kind, count in sorted(pending.items())]
        lines += [
            "# HELP megascend_requests_total Requests that have ended.",
            "# TYPE megascend_requests_total counter",
        ]
        for (kind, how), count in sorted(self.done.items()):
            lines.append(f'megascend_requests_total{{kind="{kind}",outcome="{how}"}} {count}')
        lines += [
            "# HELP megascend_refused_total Requests refused, by HTTP status.",
            "# TYPE megascend_refused_total counter",
        ]
        lines += [f'megascend_refused_total{{status="{status}"}} {n}' for status, n in sorted(self.refused.items())]
        lines += ["# HELP megascend_tokens_total Tokens trained on.", "# TYPE megascend_tokens_total counter"]
        lines += [f"megascend_tokens_total {self.tokens}"]
        lines += [
            "# HELP megascend_request_seconds From a request to its outcome.",
            "# TYPE megascend_request_seconds histogram",
        ]
        for kind, histogram in sorted(self.latency.items()):
            lines += histogram.lines("megascend_request_seconds", f'kind="{kind}"')
        for name, what, found in (
            ("models_in_batch", "Models that shared the batch of a forward_backward.", self.together),
            ("units_waited", "Units of work before that of a forward_backward, from when it could run.", self.waited),
            ("wait_seconds", "From when a forward_backward could run to the unit that it ran in.", self.waited_s),
        ):
            lines += [f"# HELP megascend_{name} {what}", f"# TYPE megascend_{name} histogram"]
            lines += found.lines(f"megascend_{name}")
        return "\n".join(lines) + "\n"
