"""Client of an SGLang server, which can only be the teacher of a run: it is asked for log-probabilities.

`megascend rl` neither samples from SGLang nor sends it weights: it cannot hold a second set of weights beside those in use, and
its workers do not join a trainer's group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megascend.apps.rl.rollout.http_client import EngineServer
from megascend.errors import EngineError
from weightwire.engine import TopLogprobs


class SglangTeacher:
    """Client of one SGLang server, over its HTTP interface.

    Args:
        address: ``http://HOST:PORT``.
        timeout_s: deadline of a request, including time in the server's queue.

    Raises, in any method:
        EngineError, EngineLostError, EngineTimeoutError: the server refused, cannot be reached, or did not answer in time.
    """

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        self._server, self._timeout_s = EngineServer("SGLang", address), timeout_s
        self.name = self._server.name

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return log p(token | preceding tokens) of all tokens but the first, at temperature 1."""
        return list((await self.top_logprobs(tokens, 0)).logprobs)

    async def top_logprobs(self, tokens: Sequence[int], count: int) -> TopLogprobs:
        """Return log p(token | preceding tokens) of all tokens but the first, and the ``count`` likeliest tokens at each."""
        request = {
            "input_ids": list(tokens),
            # Log-probabilities of a prompt are those at temperature 1.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": count,
        }
        answer = await self._server.ask("/generate", json.dumps(request).encode(), {}, self._timeout_s)
        if answer.status != 200:
            text = answer.body[:500].decode("utf-8", "replace")
            raise EngineError(f"{self.name}: /generate: status {answer.status}: {text}")
        try:
            meta = answer.json()["meta_info"]
            # (log-probability, id, text); the first token has no prediction.
            logprobs = tuple(row[0] for row in meta["input_token_logprobs"][1:])
            rows = [tuple(zip(*row, strict=True)) for row in meta["input_top_logprobs"][1:]] if count else []
            ids, values = (tuple(tuple(row[column]) for row in rows) for column in (1, 0))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(f"{self.name}: /generate: the answer cannot be read ({error!r})") from error
        if (
            None in logprobs
            or len(logprobs) != len(tokens) - 1
            or (count and [*map(len, ids)] != [count] * len(logprobs))
        ):
            raise EngineError(
                f"{self.name}: /generate returned log-probabilities of {len(logprobs)} tokens and {len(ids)} rows of likeliest "
                f"ones for {len(tokens)} tokens and top_logprobs_num: {count}"
            )
        if not count:
            ids = values = ((),) * len(logprobs)
        return TopLogprobs(logprobs, ids, values)

    async def revive(self) -> bool:
        """Return False: this object has not started the server."""
        return False

    async def close(self) -> None:
        """Do nothing: no connection is kept."""
