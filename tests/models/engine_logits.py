"""Compute logits of batches on an engine without Megatron, in a process where Megatron is not imported. A script:

python engine_logits.py ENGINE CHECKPOINT BATCHES RESULT

BATCHES: JSON list of lists of token ids; RESULT: for each batch the sums of its samples' logits, exact as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megascend
from megascend.testing.parity import causal_samples


def main(engine: str, checkpoint: str, batches: str, result: str) -> None:
    packed = engine == "fsdp"
    with megascend.make_backend(
        engine,
        model=Path(checkpoint),
        precision="fp32",
        platform="cpu",
        batching=megascend.Batching(packing=packed, micro_batch_tokens=4096),
    ) as backend:
        logits = [backend.forward(causal_samples(batch), logits=True).logits for batch in json.loads(batches)]
    sums = [[values.double().sum(0).tolist() for values in batch] for batch in logits]
    Path(result).write_text(json.dumps(sums), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
