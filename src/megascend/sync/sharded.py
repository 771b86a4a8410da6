"""Sharded pushes: every rank of the trainer sends the slices that it holds, every worker receives its own.

Rank 0 plans (:mod:`weightwire.plan`), from the slices of all ranks and the needs of all workers, and talks to the engines; all
ranks join the group of the update. A plan is made once, and again when engines, or the model's tensors, have changed, an engine
was restarted, or a push has failed. Where no plan is possible, or none is worth it, the reason is reported, and rank 0 sends
whole tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from megascend.errors import ConfigError, MegascendError, WeightSyncError
from megascend.reference.reductions import out_of_range
from megascend.runtime.distributed.objects import broadcast_object, collect_objects
from megascend.sync.delivery import Delivery
from megascend.sync.push import PlanRecord, Push, PushResult, WholeTensors
from megascend.training.checkpoint.hf_slices import held_weights
from weightwire.errors import PlanError
from weightwire.fp8 import SCALES, BlockFormat, quantise, require_finite
from weightwire.manifest import DTYPE_BYTES, TensorSpec
from weightwire.offer import Seal
from weightwire.plan import Region, Share, by_name, complete, plan
from weightwire.sender import Buffers
from weightwire.sharded import HeldSlice, History, ShardSender, digests_by_worker
from weightwire.transports.choice import Location

if TYPE_CHECKING:
    from megascend.backend import Backend
    from weightwire.engine import InferenceEngine

log = logging.getLogger(__name__)

Mode = Literal["full", "delta", "auto"]
"""``full``: complete weights; ``delta``: the changes since the last push; ``auto``: changes while they are worth it."""
RETRY = 20
"""Pushes after which a refused plan is tried again: an engine may only have been busy."""
WORTH = 0.7
"""``auto`` returns to complete pushes for a while when the changes are a larger share of the weights."""


class ShardedSync:
    """Plan by which every rank sends its slices: one rank's part. All methods but those that say so are collective.

    Args:
        sharded: True: pushes of the model need a plan; None: use one where several ranks or workers share the transfer, or for
            differences; False: use none.
        mode: see :data:`Mode`.
        full_every: a complete push follows after so many pushes of differences.
        chunk_bytes: largest message.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        sharded: bool | None,
        mode: Mode,
        full_every: int,
        chunk_bytes: int,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"WeightSync: mode {mode!r}; expected {', '.join(get_args(Mode))}")
        if full_every < 1:
            raise ConfigError(f"WeightSync: full_every {full_every} is not a number of pushes from 1 on")
        if sharded is False and mode == "delta":
            raise ConfigError(
                "WeightSync: mode delta with sharded=False: differences are sent by a plan; leave sharded out"
            )
        self._backend, self._groups = backend, backend.groups
        self._sharded, self._mode, self._full_every, self._chunk_bytes = sharded, mode, full_every, chunk_bytes
        self._history = History() if mode != "full" else None
        self._buffers = Buffers()
        self._differences = self._rest = 0  # pushes of differences in a row; complete pushes still to come in mode auto
        self._specs: tuple[TensorSpec, ...] = ()
        self._formats: Mapping[str, BlockFormat] = {}
        self._dtypes: Mapping[str, str] = {}  # of the weights in fp8 blocks, as they are exported
        # Of the engine's weight state.
        self._views: tuple[Any, list[tuple[str, tuple[int, ...], torch.Tensor]]] = ({}, [])
        self._share: Share | None = None
        self._planned: PlanRecord | None = None
        self._refusal: tuple[tuple[str, ...], str] | None = None
        self._refused_pushes = 0
        self._logged = ""

    # --- the plan ---

    def prepare(self, push: Push, whole: WholeTensors, exported: tuple[TensorSpec, ...], *, merged: bool) -> str:
        """Make a plan unless there is one; return the reason why the push is not sharded, empty if it is. The same on all ranks.

        Args:
            whole: plan by which rank 0 would send everything.
            exported: specs of the tensors that the backend exports; ignored on ranks other than 0.
            merged: with an adapter merged into the model.

        Raises:
            WeightSyncError: the push is not sharded although the settings need it.
        """
        if whole.adapter is not None:
            return "an adapter alone is sent by rank 0"  # which no setting concerns
        reason = "a merged adapter is sent by rank 0" if merged else "sharded is off" if self._sharded is False else ""
        reason = reason or self._prepare(push, whole, exported)
        if not reason or not (self._sharded or self._mode == "delta"):
            return reason
        self._refusal = None  # nothing is sent without a plan: the next push tries again
        setting, advice = "mode delta", "mode auto sends complete weights then"
        if self._mode != "delta":
            setting, advice = "sharded=True", "leave sharded (sync.sharded) out to let rank 0 send everything then"
        raise WeightSyncError(f"version {push.version} was not sent: {setting} is not possible: {reason}; {advice}")

    def _prepare(self, push: Push, whole: WholeTensors, exported: tuple[TensorSpec, ...]) -> str:
        """Make a plan unless there is one; return the reason why none is possible, or an empty text."""
        names, specs, formats = push.result.engines, whole.specs, whole.formats

        def state() -> tuple[bool, str]:
            # A refusal holds for some pushes: asking every engine each time would delay all of them.
            if self._refusal is not None and self._refusal[0] == names and self._refused_pushes < RETRY:
                self._refused_pushes += 1
                return True, self._refusal[1]
            same_tensors = self._specs == specs and self._formats == formats
            return self._planned is not None and tuple(self._planned.engines) == names and same_tensors, ""

        valid, reason = push.ranks.on_rank_0(state, "the state of the transfer plan")
        if valid:
            return reason
        self.forget()
        dtypes = {spec.name: spec.dtype for spec in exported if spec.name in formats}
        self._specs, self._formats, self._dtypes = broadcast_object(
            (specs, dict(formats), dtypes), "world", self._groups, purpose="the tensors to send"
        )
        # A rank that cannot describe its slices still takes part in the exchange below, and reports why.
        slices, problem = self._describe()
        pieces = [source.piece for source in slices]
        rows = [(piece.tensor, piece.offsets, piece.sizes) for piece in pieces]
        location = Location.of(self._groups.device)
        collected = collect_objects((rows, location, problem), "world", self._groups, "the slices of all ranks")

        def make() -> tuple[str, list[Share]]:
            assert collected is not None
            problems = [text for _, _, text in collected if text]
            if problems:
                return problems[0], []
            pieces = [[Region(*row) for row in rank_rows] for rank_rows, _, _ in collected]
            try:
                places = [memory for _, memory, _ in collected]
                self._planned = self._plan(push.engines, pieces, places, push.delivery)
            except (PlanError, ConfigError) as error:
                return str(error), []
            return "", self._planned.shares

        reason, shares = push.ranks.on_rank_0(make, "the plan of the transfer")
        if reason:
            self._refusal, self._refused_pushes = (names, reason), 0
            # A warning only if the user has asked for what does not work.
            self._log_once(logging.WARNING if self._mode == "auto" else logging.INFO, f"by rank 0: {reason}")
            return reason
        self._share = shares[self._groups.rank]
        ranks, workers = self._groups.world_size, len(shares) - self._groups.world_size
        text = f"by every rank (sharded): {ranks} ranks, {workers} workers"
        if self._mode == "auto" and self._planned is not None and not self._planned.keep:
            text += f"; complete, as {why_complete(self._planned.transport, self._specs)}"
        self._log_once(logging.INFO, text)
        return ""

    def _log_once(self, level: int, text: str) -> None:
        """Log on rank 0 who sends weights, and why, unless it is the same as before."""
        if text != self._logged and self._groups.rank == 0:
            log.log(level, "weights are sent %s", text)
        self._logged = text

    def _plan(
        self, engines: Sequence[InferenceEngine], slices: list[list[Region]], places: list[Location], delivery: Delivery
    ) -> PlanRecord:
        counts, transport = self._connection(engines, places, delivery)
        needs = delivery.ask_needs(engines, self._specs)
        all_pieces = complete(self._specs)
        silent = [name for name, answer in needs.items() if answer is None]
        keep = self._sends_changes(transport)
        if silent and not keep:
            raise PlanError(f"{', '.join(silent)} do not describe what their workers load")
        workers: list[Sequence[Region]] = []
        kinds: dict[int, Sequence[Region]] = {}
        for name, count in counts.items():
            answer = needs[name]
            if answer is not None and len(answer) != count:
                raise PlanError(f"{name} has {count} workers, and describes {len(answer)}")
            for pieces in [all_pieces] * count if answer is None else answer:
                # Equal needs become one object: the planner then looks at each kind of worker once.
                workers.append(kinds.setdefault(hash(tuple(pieces)), pieces))
        # Over CUDA IPC no worker forwards: those of two engines may not see each other's GPUs.
        result = plan(
            self._specs,
            slices,
            workers,
            chunk_bytes=self._chunk_bytes,
            relay=False if transport == "cuda_ipc" else None,
        )
        return PlanRecord(counts, result.shares(), transport, keep)

    def _connection(
        self, engines: Sequence[InferenceEngine], places: list[Location], delivery: Delivery
    ) -> tuple[dict[str, int], str]:
        """Return the number of workers by engine, and the transport between all ranks and workers."""
        counts, members = delivery.members(engines)
        hosts = {location.host for location in places}
        if len(hosts) > 1 and delivery.is_loopback:
            raise PlanError(
                f"the ranks are on {len(hosts)} hosts, and rank 0 listens on {delivery.listener.host} (host, sync.host): set an "
                "address that all of them reach"
            )
        transport = delivery.check_pairs(members, places)
        devices = sorted({location.device for location in places} - {"cpu"})
        if self._sharded is None and self._mode != "delta" and devices and transport == "shared_memory":
            raise PlanError("not all members see each other's GPUs: the weights would pass through the host's memory")
        if self._sharded is None and not self._sends_changes(transport):
            self._require_worth(counts, len(places), devices, transport)
        return counts, transport

    def _require_worth(self, counts: Mapping[str, int], ranks: int, devices: Sequence[str], transport: str) -> None:
        """Raise PlanError unless complete weights are better sent by every rank, as far as that has been measured."""
        if ranks == 1 and max(counts.values()) == 1:
            raise PlanError("a single rank has nothing to share out to engines of one worker")
        if not devices:
            return
        advice = "set sharded=True (sync.sharded)"
        if transport != "cuda_ipc":
            # Until more than two devices have shown that it ends: over CUDA IPC, ranks once waited for each other.
            raise PlanError(
                f"sharded updates of weights on {', '.join(devices)} over {transport} are no default yet: {advice}"
            )
        if len(counts) > 1:
            raise PlanError(f"sharded updates from GPUs to several engines are no default yet: {advice}")
        if self._formats:
            raise PlanError(
                f"every rank would quantise all its slices at once, and rank 0 quantises tensor by tensor: {advice}"
            )

    def _sends_changes(self, transport: str) -> bool:
        return self._mode == "delta" or (self._mode == "auto" and not why_complete(transport, self._specs))

    def _describe(self) -> tuple[list[HeldSlice], str]:
        """Return this rank's slices of the model, or the reason why they cannot be described. Collective."""
        try:
            # First: it is collective the first time, and the rest may fail on one rank.
            self._backend.engine.hf_slices()
            return self._slices(with_values=False), ""
        except MegascendError as error:
            return [], f"the trainer's slices cannot be described: {error}"
        except Exception as error:
            # The other ranks wait for this one, which can send whole tensors all the same.
            log.exception("rank %d cannot describe its slices of the model", self._groups.rank)
            return [], f"the trainer's slices cannot be described: {type(error).__name__}: {error}"

    def _slices(self, *, with_values: bool = True) -> list[HeldSlice]:
        """Return this rank's slices as they are now. Not collective once the engine knows its Hugging Face slices.

        Args:
            with_values: quantise weights in fp8 blocks; otherwise their slices have no memory.
        """
        engine = self._backend.engine
        if engine.trainable.frozen:
            raise WeightSyncError("the model is frozen, and has no training state")
        state = engine.weights()
        numbers = by_name(self._specs)
        copies: dict[str, list[str]] = {}
        for copy, original in getattr(engine.info, "copies", {}).items():
            copies.setdefault(original, []).append(copy)
        slices = []
        if self._views[0] is not state:
            self._views = state, list(held_weights(state, engine.hf_slices()))
        quantised: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
        for weight, offsets, values in self._views[1]:
            for name in (weight, *copies.get(weight, ())):
                if (number := numbers.get(name)) is None:
                    continue
                if name not in self._formats:
                    slices.append(HeldSlice(Region(number, offsets, tuple(values.shape)), values))
                elif values.numel():
                    quantised.setdefault(name, []).append((offsets, values if with_values else values.to("meta")))
        for name, parts in quantised.items():
            blocks, shape = self._formats[name], self._specs[numbers[name]].shape
            # Heads of k and v alternate in Megatron's fused weight: blocks of 128 rows cover two that are 64 wide.
            if any(blocks.box(offsets, tuple(values.shape), shape) is None for offsets, values in parts):
                parts = joined(parts)
            for offsets, values in parts:
                slices += self._quantised(name, offsets, values, numbers)
        return slices

    def _quantised(
        self, name: str, offsets: tuple[int, ...], weight: torch.Tensor, numbers: Mapping[str, int]
    ) -> list[HeldSlice]:
        """Return the slices of values and scales for a slice of a weight that is sent in fp8 blocks."""
        blocks, sizes, shape = self._formats[name], tuple(weight.shape), self._specs[numbers[name]].shape
        box = blocks.box(offsets, sizes, shape)
        if box is None:
            raise WeightSyncError(
                f"rank {self._groups.rank} holds a slice of {name} {list(shape)} that cuts its fp8 blocks of {blocks.rows} x "
                f"{blocks.columns}: offsets {list(offsets)}, sizes {list(sizes)}"
            )
        dtype = getattr(torch, self._dtypes[name])
        if weight.dtype != dtype and not weight.is_meta and (text := out_of_range(name, weight, dtype)):
            raise WeightSyncError(text)
        # Rounded to the dtype of the export first: the numbers are those that the engine would make of it.
        values, scales = quantise(weight.to(dtype), blocks)
        return [
            HeldSlice(Region(numbers[name], offsets, sizes), values),
            HeldSlice(Region(numbers[name + SCALES], *box), scales),
        ]

    # --- a push ---

    def offer(self, push: Push) -> None:
        """Offer the update to the engines, and join its group on every rank."""
        offer, device = push.ranks.on_rank_0(
            lambda: push.offer(self._specs, plan=self._planned, base=self._base()), "the offer to the engines"
        )

        def connect() -> None:
            assert self._share is not None
            # Each rank has a device of its own.
            local = self._groups.device if device.type == self._groups.device.type else device
            push.sender = ShardSender(
                offer, self._groups.rank, self._share, history=self._history, device=local, buffers=self._buffers
            )

        failure = f"version {push.version} was not begun"
        push.ranks.on_every_rank(connect, "joining the group of the update", failure)

    def _base(self) -> int | None:
        """Return the version from which to send differences; on rank 0, whose decision all ranks follow."""
        if self._history is None or self._planned is None or not self._planned.keep:
            return None
        if self._differences >= self._full_every or self._rest > 0:
            return None
        return self._history.base(self._planned.identity)

    def send(self, push: Push) -> Seal | None:
        """Send this rank's slices; return the seal on rank 0, and note the amounts there."""
        sender = push.sender
        assert isinstance(sender, ShardSender)
        digests = push.ranks.on_every_rank(
            lambda: sender.send(self._checked_slices()), "the outcome of the transfer", "the model was not sent"
        )
        # Only now: other members may still read the last messages from this process. Rank 0 leaves last.
        if self._groups.rank != 0:
            sender.close()
        row = digests, sender.traffic.delivered, sender.traffic.content
        collected = collect_objects(row, "world", self._groups, "digests of the chunks")
        if collected is None or self._planned is None:
            return None
        sender.close()
        shares, senders, result = self._planned.shares, len(collected), push.result
        by_member = digests_by_worker(shares, senders, [values for values, _, _ in collected])
        result.nbytes = max(share.nbytes for share in shares[senders:])
        result.buckets = sum(len(share.chunks) for share in shares[:senders])
        result.payload = sum(delivered for _, delivered, _ in collected)
        result.share = result.payload / max(1, sum(content for _, _, content in collected))
        return Seal(push.name, push.version, sender.manifest.identity, (), by_member)

    def _checked_slices(self) -> Iterator[HeldSlice]:
        """Yield this rank's slices. Raise if an engine could not compute with one: inf would be seen only in its samples."""
        finite = []
        for source in self._slices():
            spec = self._specs[source.piece.tensor]
            if spec.name.endswith(SCALES) and (weight := spec.name.removesuffix(SCALES)) in self._formats:
                finite.append((weight, source.values.isfinite().all()))
            dtype = getattr(torch, spec.dtype)
            if source.values.dtype != dtype and (text := out_of_range(spec.name, source.values, dtype)):
                raise WeightSyncError(text)
            yield source
        require_finite(finite)

    def succeeded(self, result: PushResult) -> None:
        """Note a push that all engines have committed. Local."""
        if self._planned is not None:
            self._planned.provisioned = set(self._planned.engines)
        if self._history is None or self._share is None:
            return
        self._history.note(self._share.plan, result.version)
        # Differences that were hardly smaller than the weights pause for a while: computing them costs time, too.
        if result.base is None:
            self._differences, self._rest = 0, max(0, self._rest - 1)
        else:
            self._differences += 1
            if self._mode == "auto" and result.share > WORTH:
                self._rest = self._full_every

    def forget(self) -> None:
        """Forget the plan and what was sent, after a failure: engines may have been restarted. Local."""
        self._planned = self._share = self._refusal = None
        self._differences = 0
        if self._history is not None:
            self._history.forget()

    def close(self) -> None:
        """Release the buffers, the copy of what was sent, and the views of the model, which keep its memory. Local."""
        self.forget()
        self._buffers = Buffers()
        self._views = ({}, [])


def joined(parts: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Join slices of a weight that are adjacent along a dimension.

    Args:
        parts: (offsets, values) of each slice.
    """
    # Without repetitions: a slice that is listed twice would not be joined.
    slices = list({(offsets, values.shape): (offsets, values) for offsets, values in parts}.values())
    for dim in range(len(slices[0][0])):
        rows: dict[tuple[Any, ...], list[tuple[tuple[int, ...], torch.Tensor]]] = {}
        for offsets, values in sorted(slices, key=lambda part: part[0][dim]):
            line = offsets[:dim] + offsets[dim + 1 :], values.shape[:dim] + values.shape[dim + 1 :]
            rows.setdefault(line, []).append((offsets, values))
        slices = []
        for row in rows.values():
            groups = [[row[0]]]
            for part in row[1:]:
                offsets, values = groups[-1][-1]
                if offsets[dim] + values.shape[dim] == part[0][dim]:
                    groups[-1].append(part)
                else:
                    groups.append([part])
            slices += [
                (group[0][0], torch.cat([values for _, values in group], dim) if len(group) > 1 else group[0][1])
                for group in groups
            ]
    return slices


def why_complete(transport: str, specs: Sequence[TensorSpec]) -> str:
    """Return the reason why mode ``auto`` sends complete weights, decided without a trial; empty if it sends changes."""
    if transport == "cuda_ipc":
        return "complete weights take less time between the GPUs of a host than the search for changes"
    if 2 * sum(spec.nbytes for spec in specs if DTYPE_BYTES[spec.dtype] == 2) <= sum(spec.nbytes for spec in specs):
        return "most bytes are not those of 16-bit numbers"
    return ""
