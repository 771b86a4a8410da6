"""Units and meanings of metrics. The tables of docs/metrics.md are made from these declarations."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints


class Metric(NamedTuple):
    """Unit and meaning of a metric: ``grad_norm: Annotated[float, Metric("", "global norm before clipping")]``."""

    unit: str
    meaning: str


def declared_metrics(record: type[Any]) -> dict[str, Metric]:
    """Return the metrics that the fields of a record class declare, by name; those of base classes come first."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: annotation
        for name, hint in hints.items()
        for annotation in getattr(hint, "__metadata__", ())
        if isinstance(annotation, Metric)
    }
