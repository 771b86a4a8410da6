"""Run the self-checks of many small models in one process, so that tests which build backends find the verdicts cached."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from megascend.errors import DistributedTestError
from megascend.models.selfcheck import check, process
from megascend.models.selfcheck.process import Trial
from megascend.models.selfcheck.slicing import Slice, slice_model
from megascend.runtime.io import shared
from megascend.testing.tiny_models import tiny_config


def slice_of(config: dict[str, Any], longest: int = 512) -> Slice:
    """Return the slice that a backend of a model with this ``config.json`` would be checked with."""
    from transformers import AutoConfig

    # A copy: transformers modifies its arguments, for example rope_scaling.
    full = json.loads(AutoConfig.for_model(**copy.deepcopy(config)).to_json_string(use_diff=False))
    return slice_model(config, full, longest, window_active=False)


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` that transformers writes for a model of this configuration: with the architecture's defaults."""
    from transformers import AutoConfig

    return json.loads(AutoConfig.for_model(**copy.deepcopy(config)).to_json_string())


def warm(configs: Sequence[dict[str, Any]]) -> None:
    """Make the verdicts on models of these configurations, as transformers writes them, that are not kept yet."""
    slices = {check.verdict_path(part): part for part in map(slice_of, map(as_written, configs))}
    with shared.locked(check.cache_folder()):
        missing = {path: part for path, part in slices.items() if not path.exists()}
        if not missing:
            return
        report = process.run([Trial(part.config, part.lengths) for part in missing.values()])
        for (path, part), finding in zip(missing.items(), report.findings, strict=True):
            verdict = finding.verdict(part, part.layers)
            if verdict.status != "agrees":
                raise DistributedTestError(f"the self-check of {part.config}: {verdict}")
            check.store(path, verdict)


def warm_tiny_models() -> None:
    """Make the verdicts on :func:`tiny_config` of llama, qwen2, qwen3 and qwen3_moe, with and without tied embeddings.

    Tests have deadlines, which might pass where a rank had to wait for its own.
    """
    warm(
        [
            tiny_config(arch, tie_word_embeddings=tied)
            for arch in ("llama", "qwen2", "qwen3", "qwen3_moe")
            for tied in (False, True)
        ]
    )
