"""What a backend sends: tensors in the order in which they come, known before they do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire.manifest import AdapterInfo, TensorSpec
from weightwire.sender import spec_of

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.backend import Backend


@dataclass
class Source:
    """One stream of weights. On ranks other than 0 it has no tensors, but all ranks iterate over it.

    Attributes:
        specs: of its tensors, in order; empty on other ranks than 0.
        adapter: it is an adapter's factors alone.
        stream: nobody has begun it.
    """

    specs: tuple[TensorSpec, ...]
    adapter: AdapterInfo | None
    stream: Generator[tuple[str, Tensor], None, None]


class Sources:
    """Streams of one backend.

    An export tells the names of its tensors only by making them, in an order that does not change. So before the first one of
    a model there is another one without bytes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._specs: tuple[TensorSpec, ...] | None = None

    def model(self, adapter: str | None) -> Source:
        """The model, with ``adapter`` merged into it. Collective."""
        if self._specs is None:
            with contextlib.closing(_generator(self._backend.named_weights(receivers="main", device="meta"))) as first:
                self._specs = tuple(spec_of(name, tensor) for name, tensor in first)
        return Source(self._specs, None, _generator(self._backend.named_weights(adapter, receivers="main")))

    def adapter(self, name: str) -> Source:
        """The factors of an adapter. Collective."""
        found = self._backend.adapter_as_peft(name)
        if found is None:
            return Source((), AdapterInfo(name), _of({}))
        config, tensors = found
        specs = tuple(spec_of(*item) for item in tensors.items())
        return Source(specs, AdapterInfo(name, config), _of(tensors))


def _generator(weights: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """What engines return is a generator, which can be closed."""
    assert isinstance(weights, Generator)
    return weights


def _of(tensors: Mapping[str, Tensor]) -> Generator[tuple[str, Tensor], None, None]:
    yield from tensors.items()
