"""Calls of the server to each worker: ``--worker-extension-cls weightwire.vllm.worker.WorkerExtension``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from weightwire.errors import WireError, to_json
from weightwire.vllm import contract

if TYPE_CHECKING:
    from weightwire.vllm.updates import WorkerUpdates

log = logging.getLogger(__name__)


class WorkerExtension:
    """Mix-in that vLLM adds to its worker's base classes; the prefix ``weightwire`` avoids clashes of names."""

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

    def weightwire(self: Any, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of this worker's updates with plain data. It blocks the worker's computation, so none of them waits.

        Returns:
            The result, or an error in the form of :func:`weightwire.errors.to_json`: nothing is raised, since of exceptions only
            the first worker's text would reach the server.
        """
        try:
            answer = getattr(self.weightwire_updates(), method)(*arguments) or {}
            if method in ("commit", "revert"):
                contract.after_base_change(self.model_runner)
            return answer
        except WireError as error:
            return to_json(error)
        except Exception as error:
            log.exception("%s failed", method)
            return to_json(WireError(f"{method}: {type(error).__name__}: {error}"))
