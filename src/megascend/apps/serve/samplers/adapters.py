"""Sampling requests of clients, and the saved adapters loaded for them, a few at a time, beside those in training."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascend.apps.sampling.request import SampleRequest
from megascend.apps.serve.api.bodies import SampleBody
from megascend.apps.serve.checkpoints import CheckpointPath
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.samplers.messages import SampleAnswer, prompt_of, sample_request_of
from megascend.apps.serve.scheduler.commands import Command, Create, Remove, Respond
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.service import Service
from megascend.apps.serve.tenancy import sampling_line
from megascend.errors import ConfigError, DataError, MegascendError

BASE = "base"
"""Prefix of a tenant's command queue for the model without an adapter."""
WAITS_S = 10.0
"""Time that a tenant counts as waiting after it was refused and told to retry."""


@dataclass
class _LoadedAdapter:
    """A loaded adapter.

    Attributes:
        tenant: tenant that loaded it, to whose limit it counts.
        pending: unfinished requests that sample from it.
    """

    adapter: str
    tenant: str
    pending: int = 0


class Samplers:
    """Least-recently-used cache of saved adapters loaded for sampling.

    Args:
        service: the service.
        max_adapters: maximum number of adapters. An idle one is evicted, least recently used first: one of the tenant's own if
            the tenant is at its limit, else one of a tenant that has at least as many.
        submit: takes commands.
    """

    def __init__(self, service: Service, max_adapters: int, submit: Callable[[Command], None]) -> None:
        self._service, self._max_adapters, self._submit_command = service, max_adapters, submit
        self._loaded: OrderedDict[tuple[str, float], _LoadedAdapter] = OrderedDict()
        self._waiting: dict[str, float] = {}  # time of the last refusal, of tenants without any adapter
        self._count = 0

    def prepare(self, tenant: str, body: Mapping[str, Any]) -> SampleRequest | MegascendError:
        """Read a request, of the base model, or return its error. For a thread: it takes time for every token and image.

        Raises:
            RequestRefusedError: 404 or 410, unknown session.
        """
        options, base = SampleBody.read(body), self._service.base
        if options.sampling_session_id is not None:
            self._service.tenancy.sampler(options.sampling_session_id, tenant)
        try:
            prompt = prompt_of(options.prompt, base.image_processor)
            return sample_request_of(options, None, base.max_length, prompt)
        except (ConfigError, DataError, RequestRefusedError) as error:
            return error

    def sample(
        self, tenant: str, body: Mapping[str, Any], prepared: SampleRequest | MegascendError | None = None
    ) -> Future:
        """Accept a request to sample from a sampling session's model, or from the checkpoint that it names.

        Args:
            prepared: as of :meth:`prepare`.

        Raises:
            RequestRefusedError: 404 or 410, unknown session or checkpoint; 429, too much is pending.
        """
        options = SampleBody.read(body)
        name, session, path, number = options.sampling_session_id, None, options.model_path, options.seq_id
        if name is not None:
            session, path = self._service.tenancy.sampler(name, tenant)
        if name is not None and number is not None:  # sent again by a client that lost the response
            future = self._service.futures.get(f"{name}:request:{number}", tenant)
            if future is not None:
                return future
        label = f"{name}:request:{number}" if name and number is not None else self._service.new_label("sample")
        owner = f"{tenant}:samples" if session is None else sampling_line(session)
        if self._service.futures.pending(owner) >= 4 * self._service.settings.limits.pending:
            raise RequestRefusedError("too many of your samples are pending", 429)
        self._service.check_answers(tenant)
        if prepared is None:
            prepared = self.prepare(tenant, body)
        if not isinstance(prepared, MegascendError):
            length = len(prepared.prompt)
            longest = min(prepared.params.max_tokens, self._service.base.max_length - length)
            self._service.check_tokens(tenant, length + prepared.num_samples * max(longest, 0))
        future = self._enqueue(tenant, label, owner, path, options, prepared)
        # A future that has ended is one that failed above, without responses.
        if options.record_stability_info and session is not None and future.ended is None:
            assert isinstance(prepared, SampleRequest)
            self._service.sequences.watch(future, session, np.array(prepared.prompt, np.int64))
        return future

    def _enqueue(
        self,
        tenant: str,
        label: str,
        owner: str,
        path: str | None,
        options: SampleBody,
        prepared: SampleRequest | MegascendError,
    ) -> Future:
        service = self._service
        loaded: _LoadedAdapter | None = None
        try:
            if path is not None:
                loaded = self._load(tenant, path)
            if isinstance(prepared, MegascendError):
                raise prepared
            request = replace(prepared, adapter=None if loaded is None else loaded.adapter)
        # Mistakes in the request fail its future; only a refusal (RequestRefusedError) is an HTTP status.
        except (ConfigError, DataError) as error:
            future = service.futures.make(label, tenant, owner, "sample")
            service.break_future(future.number, error)
            return future
        if loaded is not None:
            loaded.pending += 1

        def then(succeeded: bool) -> None:
            if loaded is not None:
                loaded.pending -= 1

        def answer(result: Any) -> SampleAnswer:
            if result.error is not None:
                raise ConfigError(result.error)
            return SampleAnswer(result, options.prompt_logprobs_last_n, options.target_prompt_logprobs)

        tokens = len(request.prompt) + request.num_samples * request.params.max_tokens
        future = service.futures.make(label, tenant, owner, "sample", answer_of=answer, then=then, tokens=tokens)
        future.parts = request.num_samples
        line = f"{BASE}:{tenant}" if loaded is None else loaded.adapter
        self._submit_command(Respond(future.number, line, request, tenant))
        return future

    def _load(self, tenant: str, text_of_path: str) -> _LoadedAdapter:
        """Return a saved adapter, loading it if necessary."""
        record, directory = self._service.checkpoints.find(tenant, CheckpointPath.parse(text_of_path), public=True)
        key = (str(record.path), record.saved)  # with its time, as a checkpoint may be overwritten under its name
        loaded = self._loaded.get(key)
        self._yield_to_waiting(key, tenant if loaded is None else loaded.tenant)
        if loaded is None:
            self._make_room(tenant)
            self._count += 1
            loaded = self._loaded[key] = _LoadedAdapter(f"p{self._count}", tenant)

            # The requests behind a failed load fail with it; the next request tries again.
            def then(succeeded: bool) -> None:
                if not succeeded:
                    self._loaded.pop(key, None)

            future = self._service.make_internal("load_sampler", tenant, then)
            self._submit_command(Create(future.number, loaded.adapter, None, str(directory), False))
        self._loaded.move_to_end(key)
        return loaded  # possibly not loaded yet: requests are queued behind the load, under its adapter's name

    def _yield_to_waiting(self, key: tuple[str, float], owner: str) -> None:
        """Refuse (429) an adapter beyond its owner's share while another tenant waits, so that it becomes evictable.

        An adapter is beyond the share if its owner has used that many others more recently.

        Args:
            owner: tenant whose limit the adapter counts to.
        """
        now, holders = self._service.clock(), {loaded.tenant for loaded in self._loaded.values()}
        self._waiting = {
            tenant: since for tenant, since in self._waiting.items() if tenant not in holders and now - since < WAITS_S
        }
        if not self._waiting.keys() - {owner}:
            return
        share = max(1, self._max_adapters // len(holders | self._waiting.keys()))
        owned = [entry for entry, loaded in self._loaded.items() if loaded.tenant == owner]
        if len(owned) >= share and key not in owned[-share:]:
            raise RequestRefusedError(
                f"another tenant waits for a saved model to be loaded; your share is {share}", 429
            )

    def _make_room(self, tenant: str) -> None:
        """Evict the least recently used idle adapter if a limit is reached; refuse (429) if none is idle."""
        count, limit = (
            Counter(loaded.tenant for loaded in self._loaded.values()),
            self._service.settings.limits.samplers,
        )
        at_limit = count[tenant] >= limit
        if not at_limit and len(self._loaded) < self._max_adapters:
            return
        # Only from tenants that have at least as many: one with few would otherwise lose them to one that samples from many.
        evictable = {tenant} if at_limit else {other for other in count if count[other] >= max(count[tenant], 1)}
        idle = (key for key, loaded in self._loaded.items() if loaded.pending == 0 and loaded.tenant in evictable)
        key = next(idle, None)
        if key is None:
            if not count[tenant]:
                self._waiting[tenant] = self._service.clock()
            occupied = f"{limit} saved models of yours" if at_limit else f"{self._max_adapters} saved models"
            raise RequestRefusedError(
                f"{occupied} are being sampled from (limits.samplers, max_samplers); try again later", 429
            )
        evicted = self._loaded.pop(key)
        future = self._service.make_internal("unload_sampler")
        self._submit_command(Remove(future.number, evicted.adapter))
