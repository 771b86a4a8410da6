"""The self-check of a run's model, begun while the process still imports Megatron and builds.

Its verdict is kept on the disk, where the backend looks for it, or waits until it is there. So this is a matter of time alone:
what is asked for ahead in vain is not used. Where no run has asked for a verdict on these settings, the process that makes it
imports what it needs from the start of this one on (:mod:`megascend.selfcheck.standing_by`).
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

from megascend.bootstrap.engines import needs
from megascend.config import TrainerConfig
from megascend.errors import MegascendError
from megascend.selfcheck import standing_by

if TYPE_CHECKING:
    from megascend.selfcheck.process import Worker


class SelfCheckAhead:
    """On rank 0, what may be done of a run's self-check before the backend asks for its verdict. Used from one thread."""

    def __init__(self, config: TrainerConfig, rank: int) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._concerns = rank == 0 and bool(config.self_check) and needs(config.engine).megatron
        self.thread: threading.Thread | None = None

    def stand_by(self) -> None:
        """Start the worker, unless a run has asked for the verdict before."""
        if self._concerns:
            self._worker = standing_by.worker_for(self._config.model, self._config.batching.max_length)

    def begin(self) -> None:
        """Ask for the verdict, in the background; :attr:`thread` works on it and does not keep the process from ending.

        Where there is nothing to ask for, a worker that stood by is ended.
        """
        if not self._concerns:
            return
        question = self._question()
        if question is None:
            self.close()
            return
        from megascend.selfcheck.check import examine  # which imports torch

        worker, self._worker = self._worker, None

        def work() -> None:
            try:
                with contextlib.suppress(MegascendError):  # told where it is needed
                    examine(*question, window_in_force=False, worker=worker)
                standing_by.asked(self._config.model, self._config.batching.max_length)
            finally:
                if worker is not None:
                    worker.close()

        self.thread = threading.Thread(target=work, name="megascend-self-check-ahead", daemon=True)
        self.thread.start()

    def _question(self) -> tuple[dict[str, Any], dict[str, Any], int] | None:
        """The model's configuration, the same with all defaults, and tokens of the longest sample.

        None with a sliding window, of which only the model's Megatron configuration says whether it is in force; or if the model
        cannot be read, which is told where it is needed.
        """
        from transformers import AutoConfig

        from megascend.huggingface.architectures import make_known_to_transformers
        from megascend.huggingface.info import inspect_checkpoint

        config = self._config
        try:
            make_known_to_transformers(config.model)
            found = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
            full = json.loads(found.to_json_string(use_diff=False))
            raw = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
            limits = [config.batching.max_length, inspect_checkpoint(config.model).shape.max_position]
        except Exception:  # noqa: BLE001  a configuration may be anything
            return None
        if getattr(found, "sliding_window", None) is not None:
            return None
        return raw, full, min((limit for limit in limits if limit is not None), default=sys.maxsize)

    def close(self) -> None:
        """End a worker that has nothing to do."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
