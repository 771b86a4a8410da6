"""Sampling on behalf of clients: saved adapters are loaded for it, a few at a time, beside those in training."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megascend.errors import ConfigError, DataError, MegascendError
from megascend.serve.api.bodies import Sample
from megascend.serve.api.wire import tokens_of_json
from megascend.serve.checkpoints import CheckpointPath, Record
from megascend.serve.errors import RequestRefusedError
from megascend.serve.samplers.messages import SampleAnswer, sample_request_of, targets_of
from megascend.serve.scheduler.commands import Command, Create, Remove, Respond
from megascend.serve.scheduler.futures import Future
from megascend.serve.service import Service
from megascend.serve.tenancy import samples_of

BASE = "base"
"""Begins the name of a tenant's line of commands for the model without an adapter."""


WAITS_S = 10.0
"""How long a tenant counts as waiting after it was told to come again."""


@dataclass
class _Loaded:
    """A saved adapter that is loaded.

    Attributes:
        tenant: that had it loaded, and for whom it counts.
    """

    adapter: str
    tenant: str
    pending: int = 0


class Samplers:
    """Which saved adapters are loaded for sampling.

    Args:
        service: whose clients ask.
        most: adapters at a time. One that is not sampled from makes room, that used longest ago first: one of the tenant's own if
            it has as many as it may, else one of a tenant that has no fewer.
        put: takes commands.
    """

    def __init__(self, service: Service, most: int, put: Callable[[Command], None]) -> None:
        self._service, self._most, self._put = service, most, put
        self._loaded: OrderedDict[tuple[str, float], _Loaded] = OrderedDict()
        self._waiting: dict[str, float] = {}  # when tenants without any adapter were told to come again
        self._count = 0

    def sample(self, tenant: str, body: Mapping[str, Any]) -> Future:
        """Take a request to sample from a sampling session's model, or from the one that it names itself.

        Raises:
            RequestRefusedError: 404 or 410, there is no such session or checkpoint; 429, too much is pending.
        """
        asked = Sample.read(body)
        name, session, path, number = asked.sampling_session_id, None, asked.model_path, asked.seq_id
        if name is not None:
            session, path = self._service.tenancy.sampler(name, tenant)
        if name is not None and number is not None:
            future = self._service.futures.get(f"{name}:request:{number}", tenant)
            if future is not None:
                return future
        label = f"{name}:request:{number}" if name and number is not None else self._service.new_label("sample")
        owner = f"{tenant}:samples" if session is None else samples_of(session)
        if self._service.futures.pending(owner) >= 4 * self._service.settings.limits.pending:
            raise RequestRefusedError("too many of your samples are pending", 429)
        self._service.check_answers(tenant)
        future = self._submit(tenant, label, owner, path, asked)
        if asked.record_stability_info and session is not None and future.ended is None:
            self._service.sequences.watch(future, session, tokens_of_json(asked.prompt))
        return future

    def _submit(self, tenant: str, label: str, owner: str, path: str | None, asked: Sample) -> Future:
        service = self._service
        loaded: _Loaded | None = None
        try:
            if path is not None:
                loaded = self._load(tenant, path)
            adapter = None if loaded is None else loaded.adapter
            request = sample_request_of(asked, adapter, service.base.max_length)
        except (ConfigError, DataError) as error:
            return self._failed(tenant, label, owner, error)
        if loaded is not None:
            loaded.pending += 1

        def then(succeeded: bool) -> None:
            if loaded is not None:
                loaded.pending -= 1

        def answer(result: Any) -> SampleAnswer:
            if result.error is not None:
                raise ConfigError(result.error)
            return SampleAnswer(result, asked.prompt_logprobs_last_n, targets_of(asked.target_prompt_logprobs))

        tokens = len(request.prompt) + request.num_samples * request.params.max_tokens
        future = service.futures.make(label, tenant, owner, "sample", answer_of=answer, then=then, tokens=tokens)
        future.parts = request.num_samples
        line = f"{BASE}:{tenant}" if loaded is None else loaded.adapter
        self._put(Respond(future.number, line, request, tenant))
        return future

    def _failed(self, tenant: str, label: str, owner: str, error: MegascendError) -> Future:
        future = self._service.futures.make(label, tenant, owner, "sample")
        self._service.break_future(future.number, error)
        return future

    def _load(self, tenant: str, text_of_path: str) -> _Loaded:
        """Return a saved adapter, loaded now if it is not yet."""
        record, directory = self._service.checkpoints.find(tenant, CheckpointPath.parse(text_of_path), public=True)
        key = (str(record.path), record.saved)
        loaded = self._loaded.get(key)
        self._leave_room(key, tenant if loaded is None else loaded.tenant)
        if loaded is None:
            self._make_room(tenant)
            self._count += 1
            loaded = self._loaded[key] = _Loaded(f"p{self._count}", tenant)
            self._ask_to_load(tenant, key, loaded, record, str(directory))
        self._loaded.move_to_end(key)
        return loaded

    def _leave_room(self, key: tuple[str, float], owner: str) -> None:
        """Keep an adapter from being used that another tenant waits for, so that it comes to make room.

        Args:
            owner: of the adapter.

        Raises:
            RequestRefusedError: 429; its owner uses as many as are its share, later than this one.
        """
        now, holders = self._service.clock(), {loaded.tenant for loaded in self._loaded.values()}
        self._waiting = {
            tenant: since for tenant, since in self._waiting.items() if tenant not in holders and now - since < WAITS_S
        }
        if not self._waiting.keys() - {owner}:
            return
        share = max(1, self._most // len(holders | self._waiting.keys()))
        owned = [each for each, loaded in self._loaded.items() if loaded.tenant == owner]
        if len(owned) >= share and key not in owned[-share:]:
            raise RequestRefusedError(f"another tenant waits for room for a saved model; {share} are your share", 429)

    def _ask_to_load(
        self, tenant: str, key: tuple[str, float], loaded: _Loaded, record: Record, directory: str
    ) -> None:
        def then(succeeded: bool) -> None:
            if not succeeded:
                self._loaded.pop(key, None)

        label = self._service.new_label("load_sampler")
        future = self._service.futures.make(label, tenant, None, "load_sampler", then=then, internal=True)
        self._put(Create(future.number, loaded.adapter, None, directory, False))

    def _make_room(self, tenant: str) -> None:
        """Remove the adapter that was used longest ago, if there are as many as may be.

        Raises:
            RequestRefusedError: 429; all that could make room are being sampled from.
        """
        count, each = Counter(loaded.tenant for loaded in self._loaded.values()), self._service.settings.limits.samplers
        if count[tenant] < each and len(self._loaded) < self._most:
            return
        may_go = (
            {tenant} if count[tenant] >= each else {other for other in count if count[other] >= max(count[tenant], 1)}
        )
        idle = (key for key, loaded in self._loaded.items() if loaded.pending == 0 and loaded.tenant in may_go)
        key = next(idle, None)
        if key is None:
            if not count[tenant]:
                self._waiting[tenant] = self._service.clock()
            whose = f"{each} saved models of yours" if count[tenant] >= each else f"{self._most} saved models"
            raise RequestRefusedError(f"{whose} are being sampled from; one more has to wait", 429)
        gone = self._loaded.pop(key)
        label = self._service.new_label("unload_sampler")
        future = self._service.futures.make(label, "", None, "unload_sampler", internal=True)
        self._put(Remove(future.number, gone.adapter))
