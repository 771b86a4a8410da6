"""Metrics of the service, for Prometheus and the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from megascend.apps.serve.scheduler.futures import Future

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
UNITS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
RECENT_BATCHES = 120
RECENT_PROBLEMS = 20


@dataclass(frozen=True)
class Problem:
    """A failure reported to a tenant.

    Attributes:
        time: service clock, seconds.
        kind: kind of the request.
        model: model name, "" if none.
        category: "user" or "server".
    """

    time: float
    kind: str
    model: str
    category: str
    message: str


class Figures:
    """Counters since the start. Metrics carry no tenant names: /metrics needs no key.

    Attributes:
        registry: registry of all metrics.
        batches: (models, tokens) of recent batches, oldest first.
        problems: recent failures by tenant, oldest first.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # these would double the series, all with the time of the start
        self.registry = CollectorRegistry()

        def histogram(name: str, documentation: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"megascend_{name}", documentation, labels, buckets=tuple(buckets), registry=self.registry)

        self._ended = Counter(
            "megascend_requests", "Requests that have ended.", ("kind", "outcome"), registry=self.registry
        )
        self._refused = Counter(
            "megascend_refused", "Requests refused, by HTTP status.", ("status",), registry=self.registry
        )
        self._tokens = Counter("megascend_tokens", "Tokens trained on.", registry=self.registry)
        self._latency = histogram("request_seconds", "From a request to its outcome.", BUCKETS_S, "kind")
        self._models_in_batch = histogram(
            "models_in_batch", "Models that shared the batch of a forward_backward.", BATCH_SIZES
        )
        self._wait_units = histogram(
            "units_waited", "Units of work before that of a forward_backward, from when it could run.", UNITS
        )
        self._wait_seconds = histogram(
            "wait_seconds", "From when a forward_backward could run to the unit that it ran in.", BUCKETS_S
        )
        self.batches: deque[tuple[int, int]] = deque(maxlen=RECENT_BATCHES)
        self.problems: dict[str, deque[Problem]] = {}

    def count(self, future: Future, models_in_batch: int, now: float) -> None:
        """Count a finished future."""
        outcome = "ok" if future.failure is None else future.failure.category
        self._ended.labels(future.kind, outcome).inc()
        self._latency.labels(future.kind).observe(now - future.created)
        if future.failure is not None:
            self.note(future.tenant, Problem(now, future.kind, future.model or "", outcome, future.failure.message))
        elif future.kind == "forward_backward":
            self._tokens.inc(future.tokens)
            self._models_in_batch.observe(models_in_batch)

    def count_wait(self, future: Future, units: int | None, seconds: float) -> None:
        """Count how long a finished future waited for its turn."""
        if units is not None and future.kind == "forward_backward":
            self._wait_units.observe(units)
            self._wait_seconds.observe(seconds)

    def count_batch(self, futures: Iterable[Future]) -> None:
        """Record the size of a batch.

        Args:
            futures: all futures that ended with the batch; its members are the successful forward_backwards among them.
        """
        trained = [future for future in futures if future.kind == "forward_backward" and future.failure is None]
        if trained:
            self.batches.append((len({future.model for future in trained}), sum(future.tokens for future in trained)))

    def note(self, tenant: str, problem: Problem) -> None:
        """Add a failure to its tenant's list, which drops the oldest."""
        self.problems.setdefault(tenant, deque(maxlen=RECENT_PROBLEMS)).append(problem)

    def refuse(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    @property
    def tokens(self) -> int:
        """Tokens processed by successful forward_backwards."""
        return int(_values(self._tokens)[()])

    @property
    def refused(self) -> dict[str, int]:
        """Refused requests by HTTP status."""
        return {status: int(count) for (status,), count in _values(self._refused).items()}

    @property
    def ended(self) -> dict[tuple[str, ...], int]:
        """Ended requests by (kind, "ok", "user" or "server")."""
        return {key: int(count) for key, count in _values(self._ended).items()}

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format, version 0.0.4."""
        return generate_latest(self.registry)


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """Return a counter's values by label values."""
    # Through collect(): prometheus_client has no public way to read one value.
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name.endswith("_total")}
