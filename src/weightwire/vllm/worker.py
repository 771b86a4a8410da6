"""Calls of the server to each worker: ``--worker-extension-cls weightwire.vllm.worker.WorkerExtension``.

A call blocks the worker's computation, so none of them waits. Each returns plain data, errors in the form of
:func:`weightwire.errors.to_json`: of exceptions only the first worker's text would reach the server.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightwire.errors import WireError, to_json
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import needs_to_json
from weightwire.vllm import contract

if TYPE_CHECKING:
    from weightwire.vllm.updates import WorkerUpdates

log = logging.getLogger(__name__)

AT_ONCE_S = 5.0
"""Deadline for an update that has arrived already, in seconds."""


def _answering(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def answer(self: Any, *arguments: Any) -> dict[str, Any]:
        try:
            # Nothing may be raised: see the module.
            return method(self, *arguments) or {}
        except WireError as error:
            return to_json(error)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            return to_json(WireError(f"{method.__name__}: {type(error).__name__}: {error}"))

    return answer


class WorkerExtension:
    """Mix-in that vLLM adds to its worker's base classes; the prefix ``weightwire_`` avoids clashes of names."""

    def weightwire_updates(self: Any) -> WorkerUpdates:
        """Return this worker's updates: those of its weight transfer engine, if that is ours."""
        from weightwire.vllm.updates import WorkerUpdates

        # One object for both ways in: vLLM's routes and ours must see the same update.
        engine = getattr(self, "weight_transfer_engine", None)
        updates = getattr(engine, "updates", None) or vars(self).get("_weightwire_updates")
        if updates is None:
            updates = WorkerUpdates(self.model_runner.get_model, self.vllm_config, self.rank)
            self._weightwire_updates = updates
        return updates

    @_answering
    def weightwire_location(self) -> dict[str, Any]:
        """Describe the staging memory."""
        return self.weightwire_updates().receiver.location().to_json()

    @_answering
    def weightwire_needs(self, tensors: list[Any]) -> dict[str, Any]:
        """Describe the slices of a model's tensors that this worker loads."""
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        return {"needs": needs_to_json(self.weightwire_updates().needs(specs))}

    @_answering
    def weightwire_begin(self, offer: dict[str, Any]) -> None:
        """Start to receive."""
        self.weightwire_updates().begin(Offer.from_json(offer))

    @_answering
    def weightwire_verify(self, seal: dict[str, Any]) -> dict[str, Any]:
        """Verify an update that has arrived; ``{"verified": False}`` if it has not."""
        updates = self.weightwire_updates()
        # A worker that waited here would stop computing, and the engine with it.
        if not updates.arrived():
            return {"verified": False}
        updates.verify(Seal.from_json(seal), AT_ONCE_S)
        return {"verified": True}

    @_answering
    def weightwire_commit(self, update: str) -> dict[str, Any]:
        """Activate verified weights.

        Returns:
            ``{"way": "exchange" or "reload", "seconds": duration, "reload_reason": why later updates are reloaded}``.
        """
        start, updates = time.perf_counter(), self.weightwire_updates()
        method = updates.commit(update)
        contract.after_base_change(self.model_runner)  # type: ignore[attr-defined]
        seconds = time.perf_counter() - start
        return {"way": method, "seconds": seconds, "reload_reason": updates.reload_reason}

    @_answering
    def weightwire_write_adapter(self, update: str) -> dict[str, Any]:
        """Write a verified adapter to disk; return ``{"path": directory}``."""
        return {"path": self.weightwire_updates().write_adapter(update)}

    @_answering
    def weightwire_revert(self, update: str, reason: str) -> None:
        """Restore the weights from before a commit, whether it succeeded here or not."""
        self.weightwire_updates().revert(update, reason)
        contract.after_base_change(self.model_runner)  # type: ignore[attr-defined]

    @_answering
    def weightwire_settle(self, update: str) -> None:
        """Release the old weights, after the commit has succeeded on all workers."""
        self.weightwire_updates().settle(update)

    @_answering
    def weightwire_drop(self, update: str) -> None:
        """Drop an update."""
        self.weightwire_updates().drop(update)

    @_answering
    def weightwire_release(self) -> None:
        """Free the memory that is kept for the next update."""
        self.weightwire_updates().release()

    @_answering
    def weightwire_forget(self, target: str) -> None:
        """Forget the active version, so that a new owner may begin with any."""
        self.weightwire_updates().receiver.forget(target)
