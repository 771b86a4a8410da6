"""weightwire as a vLLM weight transfer engine, for clients of vLLM's own HTTP routes (``VLLM_SERVER_DEV_MODE=1``).

``/init_weight_transfer_engine {}``, ``/start_weight_update``, ``/update_weights {"phase": "receive", "offer": ...}``,
``/update_weights {"phase": "verify", "seal": ..., "timeout_s": ...}``, ``/pause?mode=keep``, ``/finish_weight_update``,
``/resume``. The model is not modified before ``/finish_weight_update``. Our own routes (:mod:`weightwire.vllm.guard`) add an
owner, a pause that expires, and atomicity over all workers; here a commit that fails on one of several workers stays active on
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightwire.errors import UpdateError
from weightwire.vllm.updates import WorkerUpdates


@dataclass
class InitInfo:
    """Empty: each update contains the address of its group."""


@dataclass
class UpdateInfo:
    """One call of ``update_weights``.

    Attributes:
        phase: ``receive``, which returns at once, or ``verify``, which waits.
        offer: argument of ``receive``: :meth:`weightwire.offer.Offer.to_json`.
        seal: argument of ``verify``: :meth:`weightwire.offer.Seal.to_json`.
        timeout_s: deadline of ``verify``; the engine generates nothing while it waits.
    """

    phase: str
    offer: dict[str, Any] | None = None
    seal: dict[str, Any] | None = None
    timeout_s: float = 60.0


class StagedWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[type-var]
    """Weight transfer engine that receives into staging memory, verifies, and loads in ``finish_weight_update``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.updates = WorkerUpdates(lambda: self.model, vllm_config, vllm_config.parallel_config.rank)
        self._update: str | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Drop an unfinished update."""
        self._drop()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one phase (:class:`UpdateInfo`). An error ends vLLM's session: start again with ``start_weight_update``."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Run one phase of an update."""
        if update_info.phase == "receive":
            self._update = self.updates.begin(update_info.offer)["update"]
        elif update_info.phase == "verify":
            try:
                self.updates.verify(update_info.seal, update_info.timeout_s)
            # vLLM ends its session on an error and calls nothing more: staging memory would stay allocated.
            except BaseException:
                self._drop()
                raise
        else:
            raise UpdateError(f"update_weights: phase {update_info.phase!r:.40}; expected receive or verify")

    def finish_weight_update(self) -> None:
        """Activate the verified update.

        Raises:
            CommitError: it failed; the old weights are active. vLLM's session stays open; a failing ``update_weights`` closes it.
        """
        if self._update is None:
            raise UpdateError("finish_weight_update: nothing was received")
        update, self._update = self._update, None
        self.updates.commit(update)
        # At once: vLLM's routes have no step after which all workers are known to have succeeded.
        self.updates.settle(update)

    def shutdown(self) -> None:
        """Drop the open update, if any."""
        self._update = None
        self.updates.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: abstract in vLLM 0.26 and 0.27, which build no engine without it."""
        raise UpdateError("trainer_send_weights: weights are sent by weightwire.sender.Sender")

    def _drop(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            self.updates.drop(update)
