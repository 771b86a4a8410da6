"""Weight transfer from a trainer to inference engines: the code that both sides need.

A package separate from megascend: it imports only torch and the standard library, so that it can be installed without Megatron.
From the bottom up:

- :mod:`weightwire.errors`; :mod:`weightwire.manifest`: the tensors and their buckets. Pure;
- :mod:`weightwire.digest`: checksums of buckets;
- :mod:`weightwire.group`: membership of the sender and its receivers, through a store;
- :mod:`weightwire.transports`: the media that move bytes, one file each, in a registry;
- :mod:`weightwire.sender` (from rank 0), :mod:`weightwire.sharded` (from every rank): the trainer's side of one update;
- :mod:`weightwire.staging`, :mod:`weightwire.reception`, :mod:`weightwire.receiver`: the engine's side: memory, transfer, states;
- :mod:`weightwire.engine`: the contract of an inference engine; :mod:`weightwire.remote_engine`: the same as JSON, on both
  sides; :mod:`weightwire.engine_calls`: concurrent calls of engines;
- :mod:`weightwire.asgi`: requests authenticated by their head, for the servers on either side.

Importing this package imports no torch.
"""

from __future__ import annotations

__version__ = "0.3.0"
PROTOCOL = 1
"""Version of the wire protocol: the fields of offer, manifest and seal, and the order of messages."""
