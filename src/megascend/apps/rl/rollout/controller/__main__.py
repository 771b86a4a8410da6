"""``python -m megascend.apps.rl.rollout.controller ADDRESS...``: serve vLLM servers to trainers, until SIGTERM or SIGINT.

The job's key comes from ``WEIGHTWIRE_KEY`` or the file named by ``WEIGHTWIRE_KEY_FILE``; the servers use the same one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.errors import MegascendError
from megascend.runtime.io.lasting_output import LastingOutput
from weightwire.errors import WireError
from weightwire.keys import load_key

RELEASE_S = 10.0
"""Deadline for releasing all servers at the end; the claim on one that does not answer expires."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megascend.apps.rl.rollout.controller", description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="ADDRESS", help="of a vLLM server: http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--publish", metavar="FILE", help="file that the address is written to")
    parser.add_argument("--advertise", metavar="HOST", help="name by which other machines reach this one")
    parser.add_argument("--bearer", action="store_true", help="take bearer tokens as well, and AReaL's callbacks")
    parser.add_argument("--wait", type=float, default=900.0, metavar="S", help="for the servers to be ready")
    arguments = parser.parse_args()
    # The address is printed and errors are logged: a reader that goes away (a pipe, ssh) must not end the controller.
    LastingOutput().install()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return asyncio.run(serve(arguments))
    except ModuleNotFoundError as error:
        print(f"error: {error}: pip install 'megascend[serve]'", file=sys.stderr)
        return 1
    except (MegascendError, WireError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def serve(arguments: argparse.Namespace) -> int:
    from megascend.apps.rl.rollout.controller.server import ControllerServer

    key = load_key()
    # A restart under the same name takes the engines over, so another controller must have another name.
    name = Path(arguments.publish).resolve() if arguments.publish else arguments.port or os.getpid()
    owner = f"rollout controller {socket.gethostname()}:{name}"
    engines = [VllmEngine(address, key=key, owner=owner) for address in arguments.engines]
    waits = [engine.wait_until_ready(arguments.wait) for engine in engines]
    problems = [error for error in await asyncio.gather(*waits, return_exceptions=True) if error is not None]
    # Trainers continue with those that answer, and use the others when they are back.
    if len(problems) == len(engines):
        raise problems[0]
    for error in problems:
        logging.warning("serving without %s", error)
    server = ControllerServer(
        Controller(engines),
        key,
        host=arguments.host,
        port=arguments.port,
        publish=arguments.publish,
        advertise=arguments.advertise,
        bearer=arguments.bearer,
    )
    async with server:
        print(f"rollout controller at {server.address}", flush=True)
        number = await server.until_signal()
    # At once and with a deadline: one that fails or does not answer must not keep the others' claims, which others wait for.
    releases = {asyncio.ensure_future(engine.close()): engine for engine in engines}
    await asyncio.wait(releases, timeout=RELEASE_S)
    for release, engine in releases.items():
        problem = release.exception() if release.done() else f"no answer within {RELEASE_S:g} s"
        if problem is not None:
            logging.warning("%s was not released: %s", engine.name, problem)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
