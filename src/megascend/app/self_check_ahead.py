"""The self-check of a run's model, begun while the process still imports Megatron and builds.

Its verdict is kept on the disk, where the backend looks for it, or waits until it is there. So this is a matter of time alone:
what is asked for ahead in vain is not used.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading

from megascend.bootstrap.engines import needs
from megascend.config import TrainerConfig
from megascend.errors import MegascendError
from megascend.huggingface.architectures import make_known_to_transformers
from megascend.huggingface.info import inspect_checkpoint
from megascend.selfcheck.check import examine


def begin(config: TrainerConfig, rank: int) -> threading.Thread | None:
    """Ask for the verdict on ``config.model``, on rank 0 and in the background.

    Returns:
        What works on it; it does not keep the process from ending. None: there is nothing to ask for, or a sliding window, of
        which only the model's Megatron configuration says whether it is in force; or the model cannot be read, which is told
        where it is needed.
    """
    if rank != 0 or not config.self_check or not needs(config.engine).megatron:
        return None
    from transformers import AutoConfig

    try:
        make_known_to_transformers(config.model)
        found = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
        full = json.loads(found.to_json_string(use_diff=False))
        raw = json.loads((config.model / "config.json").read_text())
        limits = [config.batching.max_length, inspect_checkpoint(config.model).shape.max_position]
    except Exception:  # noqa: BLE001  a configuration may be anything
        return None
    if getattr(found, "sliding_window", None) is not None:
        return None
    longest = min((limit for limit in limits if limit is not None), default=sys.maxsize)

    def work() -> None:
        with contextlib.suppress(MegascendError):  # likewise
            examine(raw, full, longest, window_in_force=False)

    thread = threading.Thread(target=work, name="megascend-self-check-ahead", daemon=True)
    thread.start()
    return thread
