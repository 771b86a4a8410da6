"""``python -m weightwire.vllm --model DIR [vLLM's options]``: vLLM's server, with weightwire's parts connected.

Listens on 127.0.0.1 unless ``--host`` says otherwise. The job's key comes from ``WEIGHTWIRE_KEY`` or the file that
``WEIGHTWIRE_KEY_FILE`` names (``weightwire.keys.write_key`` makes one); without it the server does not start.
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
SERVER = "vllm.entrypoints.openai.api_server"


def arguments(given: Sequence[str], found: tuple[int, int]) -> list[str]:
    """vLLM's options: what was given, and what connects our parts.

    Args:
        found: version of vLLM.

    Raises:
        SystemExit: an option of ours was given, or one that cannot work.
    """
    options = {option.split("=", 1)[0].replace("_", "-") for option in given}
    for name in ("--weight-transfer-config", "--worker-extension-cls"):
        if name in options:
            raise SystemExit(f"{name} is set by weightwire; leave it out")
    if "--api-server-count" in options:
        raise SystemExit("owner and pauses are kept in one process: leave --api-server-count out")
    added = ["--middleware", GUARD, "--worker-extension-cls", WORKER]
    if contract.stages(found):
        added += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    if not options & {"--host", "--uds"}:
        added += ["--host", "127.0.0.1"]
    if "--logprobs-mode" not in options:
        added += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that tokens are sampled from
    return [*given, *added]


def main() -> None:
    """Start the server in this process."""
    load_key()  # before the model is loaded
    contract.prepare(os.environ)
    sys.argv = [SERVER, *arguments(sys.argv[1:], contract.vllm_version())]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
