"""A controller in a separate process: ``python controller_program.py PUBLISH ENGINE_PORT``.

Its engine is in the test's process: a call is sent as one line and answered by one. The key is in the environment.
"""

from __future__ import annotations

import asyncio
import sys

from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.controller.server import ControllerServer
from weightwire.engine import InferenceEngine
from weightwire.keys import load_key
from weightwire.offer import Offer, Seal


class EngineElsewhere(InferenceEngine):
    """Engine double that reports each call as a line to the test's process."""

    name = "one"

    def __init__(self, port: int) -> None:
        self._port = port

    async def _ask(self, *words: object) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(" ".join(map(str, words)).encode() + b"\n")
            return (await reader.readline()).decode().strip()
        finally:
            writer.close()

    async def receivers(self) -> int:
        return 1

    async def begin_update(self, offer: Offer) -> None:
        await self._ask("begin", offer.update)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await self._ask("verify", seal.update)

    async def commit(self, update: str) -> None:
        await self._ask("commit", update)

    async def drop(self, update: str) -> None:
        await self._ask("drop", update)

    async def pause(self, lease_s: float) -> None:
        await self._ask("pause", f"{lease_s:g}")

    async def resume(self) -> None:
        await self._ask("resume")


async def main() -> int:
    controller = Controller([EngineElsewhere(int(sys.argv[2]))])
    async with ControllerServer(controller, load_key(), publish=sys.argv[1]) as server:
        return 128 + await server.until_signal()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
