"""Whether vLLM servers have the model that is trained here, found out before they are asked for responses."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, EngineLostError, MegascendError
from megascend.sampling.request import SampleRequest, SamplingParams
from megascend.serve.samplers.vllm_pool import BASE, Servers
from megascend.serve.samplers.vllm_server import RefusedError, VllmServer

KEY_VARIABLE = "MEGASCEND_VLLM_API_KEY"
SAME_MODEL = 0.05
"""Largest mean difference of log-probabilities that passes for the same model: bf16 on either side stays below 0.02."""
SAME_MODEL_RELATIVE = 0.01
"""Beside that, of their mean."""
log = logging.getLogger("megascend.serve")


@dataclass(frozen=True)
class Probe:
    """A prompt, and what the model that is trained says of it.

    Attributes:
        prompt: token ids.
        expected: log-probabilities of all but the first.
    """

    prompt: tuple[int, ...]
    expected: tuple[float, ...]

    async def difference(self, server: VllmServer, model: str) -> float:
        """Mean difference of a server's log-probabilities, or NaN."""
        request = SampleRequest(self.prompt, SamplingParams(1), prompt_logprobs=True)
        found = (await server.sample(request, model)).prompt_logprobs or ()
        apart = [abs(float(one or 0) - other) for one, other in zip(found[1:], self.expected, strict=True)]
        return sum(apart) / len(apart)

    def passes(self, difference: float) -> bool:
        """Whether that is the same model."""
        return difference <= SAME_MODEL + SAME_MODEL_RELATIVE * sum(map(abs, self.expected)) / len(self.expected)


def vllm_servers(settings: ServeConfig, backend: Any) -> Servers | None:
    """The vLLM servers of the settings, once they listen and are found to have this model; None if there are none. Collective.

    Raises:
        ConfigError, EngineError: on every rank: one has another model, does not load adapters from storage, or cannot be asked.
    """
    if not settings.vllm:
        return None
    import torch

    from megascend.batch.sample import Sample
    from megascend.distributed.objects import raise_on_all_ranks

    base = (settings.storage / ".base-adapter").absolute()
    backend.add_adapter(BASE, Lora(rank=1, seed=0))
    backend.save_adapter(BASE, str(base), optimizer=False)
    backend.remove_adapter(BASE)
    tokens = torch.randint(0, backend.vocab_size, (33,), generator=torch.Generator().manual_seed(0))
    logprobs = backend.forward(backend.shard([Sample.causal(tokens)]), reference=True).logprobs
    try:
        servers = [VllmServer(address, os.environ.get(KEY_VARIABLE)) for address in settings.vllm]
    except ConfigError as error:
        raise ConfigError(f"vllm: {error}") from error
    found, problem = Servers(servers, f"megascend-{uuid.uuid4().hex[:12]}", str(base)), None
    if backend.rank == 0:
        probe = Probe(tuple(tokens.tolist()), tuple(logprobs[0].tolist()))
        try:
            asyncio.run(check(found, probe, backend.max_length, settings.timeout_s / 2))
        except MegascendError as error:
            problem = error
    raise_on_all_ranks(problem, backend.groups, "whether the vLLM servers have this model")
    return found


async def check(found: Servers, probe: Probe, max_length: int, wait_s: float = 0.0) -> None:
    """Find out whether every server has the model that is trained here, and reads adapters from storage.

    Args:
        max_length: of a sample, here; a server that takes less is told of in the log.
        wait_s: how long to wait for a server that does not listen yet.

    Raises:
        ConfigError: a server has another model.
        EngineError: it cannot be asked, or does not load adapters.
    """
    for server in found.servers:
        bases = [each for each in await _models(server, wait_s) if each.get("parent") is None]
        if len(bases) != 1:
            names = ", ".join(each["id"] for each in bases)
            raise ConfigError(f"{server.name} serves {len(bases)} models ({names}), not one")
        model = str(bases[0]["id"])
        longest = bases[0].get("max_model_len")
        if isinstance(longest, int) and longest < max_length:
            log.warning(
                "%s takes %d tokens, prompt and response together; this server trains on up to %d",
                server.name,
                longest,
                max_length,
            )
        await server.load_adapter(found.name(BASE), found.base)
        try:
            difference = await probe.difference(server, found.name(BASE))
        except RefusedError as error:
            raise ConfigError(f"{error}: is it the model that this server trains?") from error
        if not probe.passes(difference):
            raise ConfigError(
                f"{server.name} does not have the model that is trained here: log-probabilities of {len(probe.expected)} tokens "
                f"differ by {difference:.3g} on average"
            )
        log.info("%s samples: %s; log-probabilities differ by %.2g on average", server.name, model, difference)


async def _models(server: VllmServer, wait_s: float) -> list[dict[str, Any]]:
    """What it serves, once it listens."""
    loop = asyncio.get_running_loop()
    deadline, told = loop.time() + wait_s, False
    while True:
        try:
            return await server.models()
        except EngineLostError:
            if loop.time() >= deadline:
                raise
        if not told:
            log.warning("%s does not listen yet; waiting for up to %.0f s", server.name, wait_s)
            told = True
        await asyncio.sleep(1.0)
