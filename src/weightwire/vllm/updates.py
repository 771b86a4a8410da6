"""Updates in one vLLM worker: received into staging memory, activated between two steps of the engine.

The server calls the methods of :class:`WorkerUpdates` with plain data (:mod:`weightwire.vllm.worker`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from weightwire.background import BackgroundThread
from weightwire.errors import NotServingError, UpdateError, WireError
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region, Share, needs_to_json
from weightwire.receiver import Receiver
from weightwire.reception import COMMITTED, RECEIVING
from weightwire.vllm import contract
from weightwire.vllm.checkpoint import ExpectedTensors
from weightwire.vllm.exchange import Exchange
from weightwire.vllm.in_place import NotInPlaceError, Recording, record_copies
from weightwire.vllm.model import Snapshot, Structure, check_reloadable, load
from weightwire.vllm.needs import worker_needs

log = logging.getLogger(__name__)

AT_ONCE_S = 5.0
"""Deadline for an update that has arrived already, in seconds."""
KEPT_ADAPTERS = 8
"""Versions of each adapter whose files are kept: running requests of an older version may load them again."""


class WorkerUpdates:
    """Updates of one worker: receiving, loading into its model, undoing.

    Args:
        model: returns the worker's model.
        vllm_config: the worker's.
        rank: rank of the worker in its engine.
    """

    def __init__(self, model: Callable[[], torch.nn.Module], vllm_config: Any, rank: int) -> None:
        self._model, self._vllm_config = model, vllm_config
        self._number = contract.worker_number(vllm_config, rank)
        config = vllm_config.model_config
        # Staging on the device needs room for a second model; the host is the way out.
        device = os.environ.get(contract.STAGING) or next(model().parameters()).device
        name = f"worker {self._number} of {config.model}"
        check = ExpectedTensors(config.model, config.hf_config).check
        self.receiver = Receiver(name, device=device, check=check, needs=self._regions)
        self._needs: tuple[Sequence[TensorSpec], tuple[Region, ...]] | None = None
        self._offer: Offer | None = None
        self._copy: _Copy | None = None
        self._spare: Snapshot | None = None
        self._recording: Recording | None = None
        self._refused: tuple[Sequence[TensorSpec], Share | None] | None = None
        """Tensors and share of the last update whose copies could not be recorded."""
        self.reload_reason = "" if os.environ.get(contract.IN_PLACE, "1") != "0" else f"{contract.IN_PLACE} is 0"
        """Reason why the next update is not copied into the parameters in use; empty if unknown, or if it is."""
        self._adapters: dict[str, list[Path]] = {}

    def location(self) -> dict[str, Any]:
        return self.receiver.location().to_json()

    def forget(self, target: str) -> None:
        """Forget the active version, so that a new owner may begin with any."""
        self.receiver.forget(target)

    def begin(self, fields: Any) -> dict[str, str]:
        """Start to receive an offered ``update`` on a thread, and return its name.

        Unless it will be exchanged with the active weights, a second thread copies these, for undoing the commit.
        """
        offer = Offer.from_json(fields)
        if offer.manifest.adapter is None:
            check_reloadable(self._model(), self._vllm_config)
        # The memory of a dropped update is freed; views of it would keep it beside that of this one.
        if self._recording is not None and not self.receiver.keeps_memory:
            self._recording.unbind()
        # Before the copy is started: an offer that is refused must not cost the engine a copy of its weights.
        self.receiver.open(offer, self._number)
        self._offer = offer
        if offer.manifest.adapter is not None:
            return {"update": offer.update}
        if (exchange := self._exchange(offer)) is not None:
            with contextlib.suppress(UpdateError):  # it may have failed already: verify() reports why
                exchange.bind(self.receiver.staging(offer.update))  # here, not in the commit's pause
        elif self._copy is None:
            self._copy, self._spare = _Copy(self._model(), self._spare), None
        return {"update": offer.update}

    def _exchange(self, offer: Offer) -> Exchange | None:
        """Return the exchange by which an open update can be committed; None if it has to be reloaded."""
        recording = self._recording
        if recording is None or not recording.fits(offer.manifest, self._model()):
            return None
        try:
            exchange = recording.exchange(self.receiver.layout(offer.update), keep=_becomes_base(offer))
        except NotInPlaceError as error:
            self._refuse(error)
            return None
        self.reload_reason = ""
        return exchange

    def needs(self, tensors: list[Any]) -> dict[str, Any]:
        """Describe the slices of a model's tensors that this worker loads. No update may be open: its copy reads the model."""
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        return {"needs": needs_to_json(self._regions(specs))}

    def _regions(self, tensors: Sequence[TensorSpec]) -> tuple[Region, ...]:
        if self._needs is None or self._needs[0] != tensors:
            self._needs = tensors, worker_needs(self._model(), self._vllm_config, tensors)
        return self._needs[1]

    def verify(self, seal: Any, timeout_s: float | None = None) -> dict[str, bool]:
        """Compare the received update with the seal; drop it if they differ.

        Args:
            timeout_s: seconds to wait for the update; None: return ``{"verified": False}`` if it has not arrived.
        """
        if timeout_s is None and not self._arrived():
            return {"verified": False}
        try:
            self.receiver.verify(Seal.from_json(seal), AT_ONCE_S if timeout_s is None else timeout_s)
        except WireError:
            self._copy = None
            raise
        return {"verified": True}

    def _arrived(self) -> bool:
        update = self.receiver.status()["update"]
        receiving = update is not None and update["state"] == RECEIVING
        # The copy has to be complete as well: the commit needs it, and would block the worker's computation.
        return not receiving and (self._copy is None or not self._copy.is_alive())

    def commit(self, update: str) -> dict[str, Any]:
        """Activate a verified update. The worker must not compute meanwhile.

        Returns:
            ``way``: ``exchange`` if the weights were copied into the parameters in use, ``reload`` if vLLM's reload has loaded
            them; ``seconds`` it took; ``reload_reason``: why later updates are reloaded.

        Raises:
            CommitError: it failed; the old weights are active.
            NotServingError: it failed, and the old weights could not be restored.
        """
        start = time.perf_counter()
        way = self._commit(update)
        return {"way": way, "seconds": time.perf_counter() - start, "reload_reason": self.reload_reason}

    def _commit(self, update: str) -> str:
        if self._offer is None:
            raise UpdateError(f"{update:.120} was not begun")
        if (exchange := self._exchange(self._offer)) is not None:
            staging = self.receiver.staging(update)
            self.receiver.commit(
                update, lambda tensors: exchange.run(staging), exchange.undo, lambda: exchange.refill(staging)
            )
            return "exchange"
        # The model's memory is another one than at the beginning of the update.
        if self._copy is None:
            self._copy, self._spare = _Copy(self._model(), self._spare), None
        self._copy.join()
        # The references right before the load are those to return to.
        offer, structure, snapshot = self._offer, Structure(self._model()), self._copy.snapshot

        def reload(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(self._vllm_config):
                load(self._model(), self._vllm_config.model_config, tensors)
            if snapshot is not None:
                self._record(offer, snapshot)

        def restore() -> None:
            structure.restore()
            cast(Snapshot, snapshot).restore()

        self.receiver.commit(update, reload, None if snapshot is None else restore)
        return "reload"

    def _record(self, offer: Offer, before: Snapshot) -> None:
        """Record after a reload what its loaders copied, so that the next updates can be exchanged in place."""
        manifest, layout = offer.manifest, self.receiver.layout(offer.update)
        # Recording may take as long as a reload, and would be refused again.
        if os.environ.get(contract.IN_PLACE) == "0" or self._refused == (manifest.tensors, layout.share):
            return
        if self._recording is not None and self._recording.fits(manifest, self._model()):
            return
        self._recording = None
        try:
            staging = self.receiver.staging(offer.update)
            recording = record_copies(
                self._model(), self._vllm_config, manifest.tensors, layout, staging, before.changed_elsewhere
            )
            self._recording, self.reload_reason = recording, ""
            recording.exchange(layout, keep=_becomes_base(offer))
        except NotInPlaceError as error:
            self._refused = manifest.tensors, layout.share
            self._refuse(error)

    def _refuse(self, reason: NotInPlaceError) -> None:
        if self.reload_reason != str(reason):
            self.reload_reason = str(reason)
            log.warning("%s: such updates are loaded by vLLM's reload: %s", self.receiver.name, reason)

    def write_adapter(self, update: str) -> dict[str, str]:
        """Write a verified adapter in peft's format to a directory, whose ``path`` is the same for all workers."""
        if self._offer is None or self._offer.manifest.adapter is None:
            raise UpdateError(f"{update} is not an update of an adapter")
        adapter = self._offer.manifest.adapter
        # A name that follows from the update's: all workers have to agree on it without a message.
        directory = _adapters_directory() / hashlib.sha256(update.encode()).hexdigest()[:32]

        def write(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            from safetensors.torch import save_file

            # Renamed when complete: vLLM must not find half an adapter. In the same folder, as a rename works within
            # one file system.
            part = Path(tempfile.mkdtemp(prefix="part-", dir=directory.parent))
            try:
                contents = {name: tensor.cpu().contiguous() for name, tensor in tensors}
                save_file(contents, part / "adapter_model.safetensors")
                (part / "adapter_config.json").write_text(json.dumps(dict(adapter.config)), encoding="utf-8")
                try:
                    part.rename(directory)
                except OSError:
                    if not directory.is_dir():  # another worker of this machine was faster
                        raise
            finally:
                shutil.rmtree(part, ignore_errors=True)

        # Nothing to undo: an adapter's files do nothing until vLLM loads them.
        self.receiver.commit(update, write, lambda: None)
        directories = self._adapters.setdefault(adapter.name, [])
        directories.append(directory)
        while len(directories) > KEPT_ADAPTERS:
            shutil.rmtree(directories.pop(0), ignore_errors=True)
        return {"path": str(directory)}

    def revert(self, update: str, reason: str) -> None:
        """Undo a commit that succeeded here but failed on another worker. A no-op if it failed here."""
        status = self.receiver.status()["update"]
        if status is not None and status["update"] == update and status["state"] == COMMITTED:
            self.receiver.revert(update, reason)
        # Its own commit has failed beyond repair; the engine has to learn of that from every worker.
        elif not self.receiver.serving:
            raise NotServingError(f"{self.receiver.name}: {status['problem'] if status else 'not serving'}")
        self.receiver.drop(update, reason)
        self._copy = None

    def settle(self, update: str) -> None:
        """Release the old weights, after the commit has succeeded on all workers."""
        self.receiver.settle(update)
        if self._copy is not None:
            # Its memory serves the next update; updates that are exchanged need no copy.
            exchanged = self._recording is not None and not self.reload_reason
            self._spare = None if exchanged else self._copy.snapshot
        self._copy = None

    def drop(self, update: str) -> None:
        """Drop an update; a no-op if it is active."""
        self.receiver.drop(update)
        self._copy = None

    def release(self) -> None:
        """Free the memory that is kept for the next update: the engine's device is needed by others."""
        self.receiver.release()
        if self._recording is not None:
            self._recording.unbind()
        device = next(self._model().parameters()).device
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()

    def close(self) -> None:
        """Drop the open update, and remove the adapters' files."""
        self.receiver.close()
        self._copy = None
        for directory in itertools.chain(*self._adapters.values()):
            shutil.rmtree(directory, ignore_errors=True)


def _becomes_base(offer: Offer) -> bool:
    """Check whether an update's memory will be the base of differences."""
    return offer.sharded is not None and offer.sharded.keep


class _Copy(BackgroundThread):
    """Thread that copies the active weights while the model computes with them.

    Attributes:
        snapshot: set when the thread has ended; None if memory was insufficient.
    """

    def __init__(self, model: torch.nn.Module, memory: Snapshot | None) -> None:
        super().__init__(self._copy, model, memory, name="weightwire-snapshot", on_error=self._report)
        self.snapshot: Snapshot | None = None
        self.start()

    def _copy(self, model: torch.nn.Module, memory: Snapshot | None) -> None:
        self.snapshot = Snapshot(model, memory=memory)

    def _report(self, error: BaseException) -> None:
        log.error(
            "cannot copy the active weights: if the commit of this update fails, the engine stops serving",
            exc_info=error,
        )


def _adapters_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"weightwire-{os.getuid()}"
    # In a directory that everyone may write to, another user could have prepared this name, or a link to a directory of ours.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UpdateError(f"{directory} is a link, another user's, or open to others: set TMPDIR to a folder of yours")
    return directory
