"""The self-check of engines that run transformers' own models: compare a slice in the engine with plain transformers.

Such an engine and plain transformers can run in the same process, so the slice is built here, on the CPU and in fp32: each
sample in a forward pass of plain transformers, and all samples in one micro batch, laid out as in the run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.errors import ConfigError, MegascendError
from megascend.models import architecture_named
from megascend.models.checkpoint_files.scalar_head import ScalarHead
from megascend.models.selfcheck.process import Trial, TrialResult
from megascend.models.selfcheck.slicing import WINDOWS, Slice, slice_model
from megascend.models.selfcheck.trial_inputs import (
    ImageTokens,
    choose_samples,
    description,
    difference,
    randomise,
    reach_limits,
    text_vocabulary,
)
from megascend.models.selfcheck.verdict import Verdict

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
"""Names of the setting for the number of layers, by architecture."""

KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "layers_num_experts")
"""Attributes of configurations that are lists with an entry for each layer."""


class Subject(ABC):
    """Adapter of an engine that builds and runs a small transformers model for the self-check.

    Attributes:
        engine: name of the engine.
        packing: samples of a micro batch share a row.
        remedy: advice for samples that are right one by one and wrong in one micro batch.
        scalar_head: replaces a causal language model's output layer, or None.
    """

    engine: str
    packing: bool
    remedy: str = "use another engine"

    def __init__(self, scalar_head: ScalarHead | None = None) -> None:
        self.scalar_head = scalar_head

    @abstractmethod
    def plain(self, config: Any) -> Any:
        """Return the plain transformers model of a configuration, in fp32, whose ``logits`` are [n, vocabulary]."""

    def on_the_cpu(self, plain: Any) -> contextlib.AbstractContextManager[None]:
        """Let models of the class of ``plain`` run on the CPU within the context."""
        return contextlib.nullcontext()

    @abstractmethod
    def build(self, config: Any) -> Any:
        """Return a model of a configuration, in fp32 on the CPU, prepared by the engine."""

    @abstractmethod
    def logits(self, model: Any, samples: Sequence[Tensor], images: ImageTokens | None = None) -> list[Tensor]:
        """Return [n, vocabulary] of every sample, int64 [n], from one micro batch; ``images``: of a model that takes them."""


def slice_transformers_model(raw: Mapping[str, Any], config: Any, longest: int) -> Slice:
    """Return the slice of a model (``raw``: its ``config.json``); accept nested configurations and other names of sizes."""
    text = config.get_text_config()
    if architecture_named(config.model_type).images is not None and text is not config:
        full = json.loads(config.to_json_string(use_diff=False))
        return slice_model(raw, full, longest, window_active=_has_window(full["text_config"], longest))
    if text is not config:
        name = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
        raw = {**((raw.get(name) if name else None) or {}), "model_type": text.model_type}
    full = json.loads(text.to_json_string(use_diff=False))
    # attribute_map: common name -> the architecture's name, for example num_hidden_layers -> n_layer
    aliases = {common: specific for common, specific in (text.attribute_map or {}).items() if specific in full}
    full |= {common: full[specific] for common, specific in aliases.items()}
    total = full.get("num_hidden_layers")
    for name in KINDS_OF_LAYERS:  # many are properties computed from periods and offsets, so to_json_string lacks them
        kinds = getattr(text, name, None)
        if isinstance(kinds, list) and len(kinds) == total:
            full[name] = kinds
    raw = dict(raw) | {common: raw[specific] for common, specific in aliases.items() if specific in raw}
    part = slice_model(raw, full, longest, window_active=_has_window(full, longest))
    settings = {aliases.get(name, name): value for name, value in part.config.items() if name not in aliases.values()}
    return Slice(settings | {"model_type": text.model_type}, part.lengths, part.not_shown)


def _has_window(full: Mapping[str, Any], longest: int) -> bool:
    """Check whether samples may be longer than a window of attention."""
    return any(isinstance(full.get(name), int) and full[name] < longest for name in WINDOWS)


def check_first_pass(model_dir: Path, config: Any, longest: int, subject: Subject, *, runs_forward: bool) -> None:
    """Raise ConfigError if the engine cannot build a slice of the model; one that cannot be sliced passes.

    Args:
        model_dir, config: the model's directory, and its configuration in transformers' class.
        runs_forward: also raise if the engine cannot run it, as the self-check does.
    """
    from transformers import AutoConfig

    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    try:
        part = slice_transformers_model(raw, config, longest)
        # Copies: configuration classes keep and modify the nested dicts that they are given.
        small = AutoConfig.for_model(**copy.deepcopy(part.config))
        with torch.random.fork_rng(devices=[]):
            plain = subject.plain(copy.deepcopy(small))
    except Exception:  # noqa: BLE001  an architecture's code may raise any exception; the self-check reports it
        return
    # Building draws weights: the run's own random numbers must not depend on whether the check ran.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _engine_errors(subject, plain), subject.on_the_cpu(plain):
        model = subject.build(copy.deepcopy(small)).eval()
        if runs_forward:
            images = ImageTokens.of(part.config, seed=1)
            subject.logits(model, _first_samples(part.config, part.lengths, images), images)


def _first_samples(config: Mapping[str, Any], lengths: Sequence[int], images: ImageTokens | None) -> list[Tensor]:
    """Return samples of consecutive tokens, for a pass whose results do not matter."""
    samples = [torch.arange(length) % text_vocabulary(config) for length in sorted(lengths)]
    return samples if images is None else [images.insert(ids) for ids in samples]


def compare(part: Slice, subject: Subject) -> Verdict:
    """Compare the engine with transformers on a slice."""
    start = time.perf_counter()
    layers = next((part.text_config[name] for name in LAYER_COUNTS if name in part.text_config), 0)
    verdict = run(Trial(part.config, part.lengths), subject).verdict(part, layers)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(verdict, seconds=time.perf_counter() - start, peak_bytes=peak_bytes)


def run(trial: Trial, subject: Subject) -> TrialResult:
    """Build the model of a trial in plain transformers and in the engine and compare; preserve torch's CPU RNG state."""
    from transformers import AutoConfig

    with torch.random.fork_rng(devices=[]), torch.no_grad(), contextlib.ExitStack() as stack:
        try:
            # Copies: configuration classes and models keep and modify the nested dicts that they are given.
            config = AutoConfig.for_model(**copy.deepcopy(trial.config))
            plain = subject.plain(copy.deepcopy(config)).eval()
            randomise(plain, trial.seed)
        except Exception as error:  # noqa: BLE001  an architecture's code may raise any exception; the verdict reports it
            return TrialResult(transformers_problem=description(error))
        stack.enter_context(subject.on_the_cpu(plain))
        images = ImageTokens.of(trial.config, trial.seed)
        with _engine_errors(subject, plain):
            model = subject.build(copy.deepcopy(config)).eval()
            # A first pass, before samples are drawn: a model that the engine cannot call fails here with a ConfigError.
            subject.logits(model, _first_samples(trial.config, trial.lengths, images), images)
        results, unreached = [], ""
        while True:
            try:
                vocabulary = text_vocabulary(trial.config) if images else config.get_text_config().vocab_size
                chosen = choose_samples(plain, vocabulary, sorted(trial.lengths), trial.seed, images)
            except Exception as error:  # noqa: BLE001  as above
                return TrialResult(transformers_problem=description(error))
            results.append(replace(_compare(plain, model, chosen, subject, images), unreached=unreached))
            # A second time at the model's limits, if it has some.
            reached = reach_limits(plain, chosen, images) if len(results) == 1 else None
            if reached is None:
                return TrialResult.worst(results)
            unreached = reached


def _compare(
    plain: Any, model: Any, chosen: Mapping[str, Any], subject: Subject, images: ImageTokens | None
) -> TrialResult:
    """Compare the engine's ``model`` with ``plain``, whose weights it takes, on samples."""
    samples = [ids[:-1] for ids in chosen["samples"]]
    with _engine_errors(subject, plain):
        model.load_state_dict(plain.state_dict())
        # Both ways: a mistake of packing or of masks shows only where samples share a micro batch, and has its own remedy.
        separate = [subject.logits(model, [ids], images)[0] for ids in samples]
        batched = subject.logits(model, samples, images)
    expected = [(logits, ids[1:]) for logits, ids in zip(chosen["logits"], chosen["samples"], strict=True)]
    largest = max(float(logits.abs().max()) for logits, _ in expected)
    return TrialResult(
        lengths=[len(ids) for ids in samples],
        separate=_differences(separate, expected, largest),
        batched=_differences(batched, expected, largest),
        largest_logit=largest,
        margin=chosen["margin"],
        rounding=chosen["rounding"],
    )


@contextlib.contextmanager
def _engine_errors(subject: Subject, plain: Any) -> Iterator[None]:
    """Convert any exception of the engine's computation in the block to a ConfigError."""
    try:
        yield
    except MegascendError:
        raise
    except Exception as error:
        raise ConfigError(
            f"engine {subject.engine}: {type(plain).__name__} ({plain.config.model_type}) cannot be called as this engine "
            f"calls it ({description(error)}); use another engine"
        ) from error


def _differences(outputs: Sequence[Tensor], expected: Sequence[tuple[Tensor, Tensor]], largest: float) -> list[float]:
    """Return the largest difference of every sample, over the largest logit."""
    differences = []
    for logits, (reference, targets) in zip(outputs, expected, strict=True):
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        differences.append(difference((logits, logprobs), (reference, targets)) / largest)
    return differences


def objection(verdict: Verdict, model_type: str, subject: Subject, versions: Mapping[str, str]) -> str:
    """Return the error message for a model whose engine and transformers results differ."""
    assert verdict.largest is not None
    location = (
        "samples that share a micro batch (each is right in a micro batch of one)" if verdict.mixed_only else "samples"
    )
    remedy = subject.remedy if verdict.mixed_only else "use another engine"
    return (
        f"self-check: engine {subject.engine} and transformers {versions['transformers']} compute different numbers for this "
        f"{model_type} model: logits of a {verdict.layers}-layer slice differ by {verdict.largest:.2g} of the largest logit on "
        f"{location}; {remedy} (self_check: off skips this check and trains what engine {subject.engine} computes)"
    )
