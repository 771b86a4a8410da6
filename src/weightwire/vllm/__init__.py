"""vLLM integration: updates that are received while vLLM generates, and become active completely or not at all.

vLLM calls :func:`register` through the entry point ``vllm.general_plugins`` in each of its processes. The server is started by
``python -m weightwire.vllm``, which takes vLLM's options and adds those that connect the parts:

- :mod:`weightwire.vllm.contract`: all differences between versions of vLLM;
- :mod:`weightwire.vllm.model`: loads weights into a model, and restores the old ones;
- :mod:`weightwire.vllm.needs`: what a model's loaders copy, and the slices of tensors that a worker loads;
- :mod:`weightwire.vllm.in_place`: records these copies, so that commits make them without loaders;
- :mod:`weightwire.vllm.exchange`: exchanges the weights in use with those of an update, and undoes it;
- :mod:`weightwire.vllm.updates`, :mod:`weightwire.vllm.worker`: an update in one worker, and its calls from the server;
- :mod:`weightwire.vllm.engine`: the same as a weight transfer engine, for clients of vLLM's own HTTP routes;
- :mod:`weightwire.vllm.control`: owner, pauses and updates of the engine, in the server;
- :mod:`weightwire.vllm.generation`: sampling of token ids with their weight versions;
- :mod:`weightwire.vllm.guard`: the routes and their authentication.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

BACKEND = "weightwire"
"""Value for ``--weight-transfer-config '{"backend": NAME}'``."""


def register() -> None:
    """Register the weight transfer engine with vLLM in this process. May be called again."""
    from weightwire.vllm import contract

    contract.register_engine(BACKEND, "weightwire.vllm.engine", "StagedWeightTransferEngine")
