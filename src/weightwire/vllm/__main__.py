"""``python -m weightwire.vllm --model DIR [vLLM's options]``: start vLLM's server with weightwire.

Listens on 127.0.0.1 by default (``--host``). The job's key comes from ``WEIGHTWIRE_KEY`` or the file named by
``WEIGHTWIRE_KEY_FILE`` (``weightwire.keys.write_key`` creates one); the server does not start without it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence

from weightwire.keys import load_key
from weightwire.vllm import BACKEND, contract

GUARD = "weightwire.vllm.guard.Guard"
WORKER = "weightwire.vllm.worker.WorkerExtension"
MAX_LOGPROBS = 256
"""Most tokens of a position for which a request may ask, a teacher's for example; vLLM's own default is 20."""
SERVER = "vllm.entrypoints.openai.api_server"


def arguments(user_arguments: Sequence[str], version: tuple[int, int], device: str) -> list[str]:
    """Return vLLM's command line: the user's arguments and those that connect weightwire.

    Args:
        version: version of vLLM.
        device: type of device that it runs on.
    """
    # vLLM accepts both --a-b and --a_b, and --a=b.
    options = {option.split("=", 1)[0].replace("_", "-") for option in user_arguments}
    for name in ("--weight-transfer-config", "--worker-extension-cls"):
        if name in options:
            raise SystemExit(f"{name} is set by weightwire; leave it out")
    if "--api-server-count" in options:
        raise SystemExit("owner and pauses are kept in one process: leave --api-server-count out")
    added = ["--middleware", GUARD, "--worker-extension-cls", WORKER]
    if contract.stages(version):
        added += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    # vLLM listens on all interfaces by default.
    if not options & {"--host", "--uds"}:
        added += ["--host", "127.0.0.1"]
    if "--logprobs-mode" not in options:
        added += ["--logprobs-mode", "processed_logprobs"]  # of the distribution from which tokens are sampled
    if "--max-logprobs" not in options:
        added += ["--max-logprobs", str(MAX_LOGPROBS)]
    if device == "cpu" and not options & {"--enable-chunked-prefill", "--no-enable-chunked-prefill"}:
        # vLLM sets back the generator of a prompt with a seed that a step computes in part, which ends the engine: torch's
        # generators for the CPU have no offset.
        added.append("--no-enable-chunked-prefill")
    return [*user_arguments, *added]


def main() -> None:
    """Start the server in this process."""
    load_key()  # fail before the model is loaded
    contract.prepare(os.environ)
    sys.argv = [SERVER, *arguments(sys.argv[1:], contract.vllm_version(), contract.device_type())]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
