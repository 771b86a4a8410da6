"""Weights from a trainer to inference engines: what both sides need, and nothing else.

A package of its own beside megascend: it imports torch and the standard library, so that it can be installed where Megatron
is not. From below to above:

- :mod:`weightwire.errors`; :mod:`weightwire.manifest` and :mod:`weightwire.plan`: what is sent, in which buckets. Pure;
- :mod:`weightwire.digest`: what buckets are compared by;
- :mod:`weightwire.group`: the sender and its receivers meet through a store of their own, and name who is missing;
- :mod:`weightwire.transports`: how bytes travel, one file each, in a registry;
- :mod:`weightwire.sender`, :mod:`weightwire.receiver`: one update, on either side;
- :mod:`weightwire.engine`: the contract of an inference engine; :mod:`weightwire.remote_engine`: the same as JSON, on both
  sides; :mod:`weightwire.engine_calls`: calls of several engines;
- :mod:`weightwire.asgi`: requests that are known by their head, for the servers on either side.

Importing this package imports no torch.
"""

from __future__ import annotations

__version__ = "0.3.0.dev0"
PROTOCOL = 1
"""What both sides must agree on: the fields of an offer, the manifest and the seal, and who sends what when."""
