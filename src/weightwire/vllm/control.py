"""Control of the engine in the process that serves its routes: ownership, pauses that expire, updates over all workers.

Every operation ends without its caller: a pause has a lease, and a commit resumes in ``finally``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weightwire.engine import Completion, InferenceEngine, Lease, Sampling, TopLogprobs
from weightwire.errors import (
    CommitError,
    DeadlineError,
    NotServingError,
    OwnerError,
    UpdateError,
    VersionError,
    WireError,
    from_json,
)
from weightwire.fp8 import BlockFormat
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region, needs_from_json
from weightwire.transports.choice import Location
from weightwire.vllm import contract, generation
from weightwire.vllm.checkpoint import fp8_blocks
from weightwire.vllm.generation import LoadedAdapter

T = TypeVar("T")
log = logging.getLogger(__name__)

LONGEST_LEASE_S = 3600.0
RPC_S = 60.0
"""Deadline of a call to the workers that returns at once, in seconds."""
COMMIT_S = 600.0
WAKE_RETRY_S = 10.0
POLL_S = 0.02


class Control(InferenceEngine):
    """One vLLM engine in its server: owner, pauses and updates.

    Calls that change it are made within :meth:`owned`, by its owner and one after the other. Their errors are those of the
    contract (:mod:`weightwire.engine`).

    Args:
        engine: vLLM's engine client (``AsyncLLM``).
    """

    name = "vLLM"

    def __init__(self, engine: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._owner: Lease | None = None
        self._last_owner = ""
        self._claimant = ""
        """Name whose claim waits for the owner's running call."""
        self._update: Offer | None = None
        self._lease = Lease.begin("", 0.0, clock())
        """Of the open update; the workers' receivers have it, too."""
        self._settling: asyncio.Task[Any] | None = None
        self._ended: tuple[str, WireError | None] = ("", None)
        """Name of the last update that ended, and its error for repeated calls; None: it is active."""
        self._versions = {"model": 0}
        self._newest: dict[str, int] = {}
        """Versions that the current owner has committed: later ones must be newer."""
        self._paused_until: float | None = None
        self._asleep = False
        self._lapse: asyncio.Task[None] | None = None
        # Pause, update and claim change the same engine; each waits for the one before.
        self._changing = asyncio.Lock()
        self._locations: list[Location] | None = None
        self._quantised: Mapping[str, BlockFormat] | None = None
        self.adapters: dict[str, LoadedAdapter] = {}
        self._adapters_loaded = 0
        self._reload_reason = ""
        self.not_serving: str | None = None
        """Reason why the engine must not answer; None if it may."""

    def active_version(self, target: str = "model") -> int:
        """Return the active version; 0 before the first update."""
        return self._versions.get(target, 0)

    async def version(self, target: str = "model") -> int:
        return self.active_version(target)

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        """Return the active version of an adapter; None for None."""
        if name is None:
            return None
        if name not in self.adapters:
            raise WireError(f"unknown adapter {name!r:.80}; loaded: {', '.join(sorted(self.adapters)) or 'none'}")
        return self.adapters[name]

    async def _serving(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run ``work`` with vLLM's engine client, and return its result."""
        if self.not_serving is None:
            # Looked at again afterwards: a commit may have failed meanwhile, and this answer may be of mixed weights.
            result = await work(self._engine)
            if self.not_serving is None:
                return result
        raise NotServingError(self.not_serving)

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        loaded = self.adapter(adapter)
        return await self._serving(
            lambda engine: generation.generate(engine, prompt, sampling, n, loaded, self.active_version)
        )

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        loaded = self.adapter(adapter)
        return await self._serving(lambda engine: generation.logprobs(engine, tokens, loaded))

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        loaded = self.adapter(adapter)
        return await self._serving(lambda engine: generation.top_logprobs(engine, tokens, count, loaded))

    async def receivers(self) -> int:
        return len(await self.locations())

    async def locations(self) -> list[Location | None]:
        """Return the workers' staging memory; cached, since a call blocks the workers' computation."""
        if self._locations is None:
            self._locations = [Location.from_json(answer) for answer in await self._workers("location")]
        return [*self._locations]

    async def needs(self, tensors: Sequence[TensorSpec]) -> list[tuple[Region, ...]]:
        """Return the slices of a model's tensors that each worker loads. Their computation waits, for seconds at most."""
        await self._require_none_open("commit it or drop it before")
        rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in tensors]
        answers = await self._workers("needs", rows, timeout_s=COMMIT_S)
        return [needs_from_json(answer["needs"], tensors) for answer in answers]

    async def quantised(self) -> Mapping[str, BlockFormat]:
        """Return the weights of the engine's checkpoint that are in fp8 blocks, by name."""
        if self._quantised is None:
            config = self._engine.vllm_config.model_config
            self._quantised = await asyncio.to_thread(fp8_blocks, config.model, config.hf_config)
        return self._quantised

    async def info(self) -> dict[str, Any]:
        """Return the engine's state, without side effects."""
        locations = await self.locations()
        owner, update, now = self._current_owner(), self._update, self._clock()
        return {
            "versions": dict(self._versions),
            "device": str(self._engine.vllm_config.device_config.device_type),
            "locations": [location and location.to_json() for location in locations],
            "receivers": contract.worker_count(self._engine.vllm_config),
            "owner": None if owner is None else {"name": owner.owner, "lapses_in_s": owner.left_s(now)},
            "updating": None if update is None else {"update": update.update, "version": update.manifest.version},
            "paused": bool(await self._engine.is_paused()),
            "asleep": self._asleep,
            "not_serving": self.not_serving,
            "reload_reason": self._reload_reason,
        }

    # --- the owner ---

    async def claim(self, name: str, lease_s: float, take_over: bool = False) -> None:
        """Become the owner, or renew the claim. A new owner may begin with any version.

        Args:
            name: ``TRAINER#INSTANCE``: a restarted trainer takes over its own engine.
            lease_s: seconds after the owner's last call until another owner may claim.
            take_over: claim the engine even from another owner, whose update is dropped.
        """
        lease_s = _lease(lease_s)
        self._require_claimable(name, take_over)
        if name == self._last_owner:
            self._owner = Lease.begin(name, lease_s, self._clock())
            return
        # Before the lock: a call of the owner that waits, as verify does, ends and does not delay the claim.
        self._claimant = name
        try:
            async with self._changing:
                self._require_claimable(name, take_over)  # another claim may have had the lock before
                if name != self._last_owner:
                    await self._take_over(name)
                self._owner = Lease.begin(name, lease_s, self._clock())
        finally:
            if self._claimant == name:
                self._claimant = ""

    def _require_claimable(self, name: str, take_over: bool) -> None:
        owner = self._current_owner()
        if owner is not None and _trainer(owner.owner) != _trainer(name) and not take_over:
            raise OwnerError(
                f"the engine is owned by {owner.owner}, which may be silent for another {owner.left_s(self._clock()):.0f} s; "
                f"{name} can claim it then, or take it over"
            )

    async def _take_over(self, name: str) -> None:
        """Undo what the last owner has left. If it fails, the next claim of the same name begins again."""
        await self._settled()
        await self._drop(f"{name} has taken the engine over")
        if self._asleep:
            await self.resume()  # the owner that needed the memory is gone
        # The new owner counts its versions from anywhere, so the workers forget the last ones.
        for target in self._versions:
            await self._workers("forget", target)
        self._newest, self._last_owner = {}, name
        log.info("%s owns the engine now", name)

    @contextlib.asynccontextmanager
    async def owned(self, name: str) -> AsyncIterator[Control]:
        """Return the engine for one call that changes it, of its owner, after the call before it."""
        async with self._changing:
            self._require(name)
            yield self

    def _require(self, name: str) -> None:
        """Check that ``name`` is the owner, and renew its lease."""
        owner = self._current_owner()
        if owner is None or owner.owner != name:
            state = "nobody has claimed it, or the claim has lapsed" if owner is None else f"its owner is {owner.owner}"
            raise OwnerError(f"{name} does not own the engine: {state}")
        if self._claimant not in ("", name):
            raise OwnerError(f"{name} is losing the engine: {self._claimant} has claimed it")
        owner.renew(self._clock())

    def release(self, name: str) -> None:
        """Release the engine; a no-op if ``name`` does not own it."""
        if self._owner is not None and self._owner.owner == name:
            self._owner = None

    def _current_owner(self) -> Lease | None:
        if self._owner is not None and not self._owner.left_s(self._clock()):
            log.warning(
                "the owner %s was silent for %.0f s: its claim has lapsed", self._owner.owner, self._owner.lease_s
            )
            self._owner = None
        return self._owner

    # --- the update ---

    async def begin_update(self, offer: Offer) -> None:
        """Start to receive an update on a thread of each worker. Repeating the same offer is a no-op."""
        self._require(offer.owner)
        # The same offer again: its answer was lost.
        if self._update is not None and self._update.update == offer.update:
            return
        await self._require_none_open("commit it or drop it before the next one")
        if self._asleep:
            raise UpdateError("the engine is asleep, and has no memory for an update: resume it first")
        self._require_newer(offer)
        await self._settled()
        # Before the workers begin: if one of them refuses, the others' parts are dropped.
        self._update, self._lease = offer, Lease.begin(offer.owner, offer.lease_s, self._clock())
        async with self._dropping():
            await self._workers("begin", offer.to_json())

    @contextlib.asynccontextmanager
    async def _dropping(self) -> AsyncIterator[None]:
        """Drop the open update after an error within the context; a no-op once it is active."""
        try:
            yield
        except BaseException as error:
            await self._drop(str(error))
            raise

    def _require_newer(self, offer: Offer) -> None:
        target, version = offer.manifest.target, offer.manifest.version
        newest = self._newest.get(target)
        if newest is not None and version <= newest:
            raise VersionError(f"version {version} of {target} is offered, and version {newest} is already active")

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until all workers have received and verified the update. An update that fails is dropped."""
        offer, deadline = self._require_update(seal.update), self._clock() + min(timeout_s, LONGEST_LEASE_S)
        async with self._dropping():
            # Polls, since a waiting call would block the workers' computation.
            while not all(answer["verified"] for answer in await self._workers("verify", seal.to_json())):
                self._require(offer.owner)  # another owner may be taking over
                if self._clock() > deadline:
                    raise DeadlineError(f"{seal.update} has not arrived at all workers within {timeout_s:g} s")
                await asyncio.sleep(POLL_S)
            self._require_update(seal.update)  # which renews its lease

    async def commit(self, update: str) -> dict[str, float]:
        """Activate verified weights in all workers, between two steps of the engine. A no-op after success.

        Returns:
            Seconds of the pause (``paused``), and of the slowest worker by the way of its commit (``exchange`` or ``reload``);
            empty for an adapter and for a repeated call.
        """
        # The answer to the first commit was lost.
        if self._ended == (update, None):
            return {}
        offer = self._require_update(update)
        async with self._dropping():
            if offer.manifest.adapter is None:
                return await self._commit_model(offer)
            await self._commit_adapter(offer)
            self._record(offer)
            self._settle(offer)
            return {}

    async def _commit_model(self, offer: Offer) -> dict[str, float]:
        version, before = offer.manifest.version, self._versions["model"]
        # What need not stand within the pause stands before or after it: generation waits for every message in it.
        await contract.clear_inputs(self._engine)
        begin = time.perf_counter()
        await contract.pause(self._engine)
        try:
            try:
                # Both at once: the first new token needs the new number, and none is sampled before both have succeeded. Both
                # to their end: what is still running could not be undone.
                results = await asyncio.gather(
                    self._workers("commit", offer.update, timeout_s=COMMIT_S),
                    contract.stamp(self._engine, version),
                    return_exceptions=True,
                )
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
            except BaseException as error:  # a cancellation, too: the workers may have committed
                await asyncio.shield(self._revert(offer, error, before))
                raise
            self._record(offer)
            self.not_serving = None
        finally:
            if self._paused_until is None:
                await self._engine.resume_generation()
        paused = time.perf_counter() - begin
        self._settle(offer)
        answers: Any = results[0]
        self._reload_reason = next(filter(None, (answer["reload_reason"] for answer in answers)), "")
        slowest = max(answers, key=lambda answer: answer["seconds"])
        return {"paused": paused, slowest["way"]: slowest["seconds"]}

    def _record(self, offer: Offer) -> None:
        """Record that an update is active on all workers."""
        self._update, self._ended = None, (offer.update, None)
        target, version = offer.manifest.target, offer.manifest.version
        self._versions[target] = self._newest[target] = version

    def _settle(self, offer: Offer) -> None:
        """Start to make the workers release the old weights; the caller's answer does not wait for a step of the engine."""
        self._settling = asyncio.get_running_loop().create_task(self._workers("settle", offer.update))

    async def _settled(self) -> None:
        """Wait until the workers have released the old weights of the last update."""
        settling, self._settling = self._settling, None
        if settling is not None:
            try:
                await settling
            except Exception as error:  # noqa: BLE001  the version is active all the same; the next offer settles it again
                log.warning("the workers did not release the weights of the last update: %s", error)

    async def _revert(self, offer: Offer, cause: BaseException, version: int) -> None:
        """Restore the old weights on all workers, including those whose commit succeeded, and their version."""
        try:
            await self._workers("revert", offer.update, str(cause), timeout_s=COMMIT_S)
            await contract.stamp(self._engine, version)
        except Exception as error:
            self.not_serving = f"a commit failed ({cause}), and the weights from before could not be restored ({error})"
            log.critical("the engine stops serving: %s", self.not_serving)
            await self._engine.pause_generation(mode="abort", clear_cache=True)
            raise NotServingError(self.not_serving) from error

    async def _commit_adapter(self, offer: Offer) -> None:
        """Activate an adapter for new requests; running ones end with the version that they began with."""
        assert offer.manifest.adapter is not None
        paths = await self._workers("write_adapter", offer.update, timeout_s=COMMIT_S)
        try:
            await self._activate_adapter(offer.manifest.adapter.name, offer.manifest.version, str(paths[0]["path"]))
        except BaseException as error:  # a cancellation, too: the workers would refuse the version as active
            await asyncio.shield(self._workers("revert", offer.update, str(error)))
            raise

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """Load or replace an adapter from a directory that the engine can read."""
        if not name or not name.isprintable() or len(name) > 128:
            raise WireError(f"{name!r:.80} is not the name of an adapter")
        if not (Path(directory) / "adapter_config.json").is_file():
            raise WireError(f"no adapter at {directory!r:.200}: no adapter_config.json that the engine can read")
        target = f"adapter {name}"
        number = self.active_version(target) + 1 if version is None else version
        await self._activate_adapter(name, number, directory)
        self._versions[target] = self._newest[target] = self.adapters[name].version

    async def _activate_adapter(self, name: str, version: int, path: str) -> None:
        self._adapters_loaded += 1
        # vLLM caches adapters by number: a number that is used again would yield the old weights.
        adapter = LoadedAdapter(name, version, self._adapters_loaded, path)
        try:
            await self._engine.add_lora(adapter.request())
        except Exception as error:
            raise CommitError(f"adapter {name}, version {version}: {error}; the old version stays active") from error
        self.adapters[name] = adapter

    async def drop(self, update: str) -> None:
        """Drop an update; a no-op unless it is open."""
        if self._update is not None and self._update.update == update:
            await self._drop(f"{self._update.owner} dropped it")

    async def _drop(self, reason: str) -> None:
        if self._update is not None:
            offer, self._update = self._update, None
            self._ended = offer.update, UpdateError(f"{offer} was dropped: {reason}")
            await self._workers("drop", offer.update)

    async def _require_none_open(self, remedy: str) -> None:
        """Raise UpdateError if an update is open that its owner still continues."""
        # Others are dropped; the workers have done so by themselves.
        if self._update is not None and not self._lease.left_s(self._clock()):
            await self._drop(f"nobody continued it for {self._update.lease_s:g} s")
        if self._update is not None:
            raise UpdateError(f"{self._update} is under way: {remedy}")

    def _require_update(self, update: str) -> Offer:
        if self._update is not None and self._update.update == update:
            self._lease.renew(self._clock())
            return self._update
        name, problem = self._ended
        if name == update and problem is not None:
            raise problem
        raise UpdateError(f"{update:.120} is not under way: {self._update or 'none'} is")

    async def _workers(self, method: str, *arguments: Any, timeout_s: float = RPC_S) -> list[dict[str, Any]]:
        """Call a method of all workers' updates; each returns a mapping, which is an error if it has the field ``error``."""
        # Errors come as data: of a worker's exception vLLM passes on only a text, and only the first worker's.
        answers = await self._engine.collective_rpc("weightwire", timeout=timeout_s, args=(method, *arguments))
        for number, answer in enumerate(answers):
            if "error" in answer:
                raise from_json(answer, f"worker {number}")
        return answers

    # --- pauses ---

    async def pause(self, lease_s: float) -> None:
        """Stop sampling, for ``lease_s`` seconds at most; another call renews the pause."""
        self._paused_until = self._clock() + _lease(lease_s)
        if not self._asleep:
            await contract.clear_inputs(self._engine)
            await contract.pause(self._engine)
        if self._lapse is not None:
            self._lapse.cancel()  # it may sleep until the end of a longer pause
        self._lapse = asyncio.get_running_loop().create_task(self._resume_when_lapsed())

    async def sleep(self, lease_s: float) -> None:
        """Pause, and free the device memory of weights, KV cache and staging, for ``lease_s`` seconds at most."""
        await self._require_none_open("the engine cannot sleep")
        if not getattr(self._engine.vllm_config.model_config, "enable_sleep_mode", False):
            raise WireError("this vLLM cannot free its memory: start it with --enable-sleep-mode")
        await self._settled()
        await self.pause(lease_s)
        if not self._asleep:
            # Before the call: if it fails halfway, the engine has to be woken up all the same.
            self._asleep = True
            await self._workers("release")
            await contract.sleep(self._engine)

    async def resume(self) -> None:
        """End a pause or a sleep; a no-op if the engine is neither paused nor asleep."""
        if self._paused_until is not None:
            if self._asleep:
                # It may fail while another process holds the memory: the pause then stays, and its end is tried again.
                await self._engine.wake_up()
                self._asleep = False
            self._paused_until = None
            await self._engine.resume_generation()

    async def _resume_when_lapsed(self) -> None:
        while self._paused_until is not None:
            left = self._paused_until - self._clock()
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._changing:
                # It may have been renewed or ended while this waited for the lock.
                if self._paused_until is not None and self._paused_until <= self._clock():
                    log.warning("a pause was not renewed in time: resuming")
                    try:
                        await self.resume()
                    except Exception:
                        log.exception("the engine does not wake up; trying again in %g s", WAKE_RETRY_S)
                        self._paused_until = self._clock() + WAKE_RETRY_S


def _trainer(owner: str) -> str:
    return owner.rpartition("#")[0] or owner


def _lease(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_LEASE_S:
        raise WireError(f"a lease of {seconds!r:.20} s; it must be more than 0 and at most {LONGEST_LEASE_S:g} s")
    return float(seconds)
