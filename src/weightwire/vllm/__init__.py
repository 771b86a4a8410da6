"""weightwire inside vLLM: updates that are received while it generates, and are in force whole or not at all.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` in each of its processes. The server is started by
``python -m weightwire.vllm``, which takes vLLM's own options and adds those that connect the parts:

- :mod:`weightwire.vllm.contract`: what differs between versions of vLLM, all of it;
- :mod:`weightwire.vllm.model`: loads weights into a model, and goes back to those from before;
- :mod:`weightwire.vllm.updates`, :mod:`weightwire.vllm.worker`: an update in one worker, and how the server reaches it;
- :mod:`weightwire.vllm.engine`: the same as a weight transfer engine, for those who drive vLLM's own HTTP routes;
- :mod:`weightwire.vllm.control`: owner, pause and update of the whole engine, in the server;
- :mod:`weightwire.vllm.generation`: responses of token ids that tell their versions;
- :mod:`weightwire.vllm.guard`: the routes, and who may call them.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

BACKEND = "weightwire"
"""The name for ``--weight-transfer-config '{"backend": NAME}'``."""


def register() -> None:
    """Make the weight transfer engine known to vLLM, in this process. May be called again.

    Raises:
        WireError: this version of vLLM is not supported; the message says which ones are.
    """
    from weightwire.vllm import contract

    contract.register_engine(BACKEND, "weightwire.vllm.engine", "StagedWeightTransferEngine")
