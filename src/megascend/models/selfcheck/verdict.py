"""The verdict of a self-check, as stored on disk and reported to the user. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from megascend.errors import SelfCheckError
from megascend.models import architecture_named, proven
from megascend.models.selfcheck.slicing import rope_settings
from megascend.models.selfcheck.suspects import advice


@dataclass(frozen=True)
class DisagreeingSetting:
    """A setting with which the two sides differ, and the plain value with which they agree."""

    name: str
    value: str
    plain: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a self-check.

    Attributes:
        status: ``agrees``, ``differs``, ``not checked`` (with a ``reason``) or ``off``.
        largest: largest difference over the largest logit.
        layers: number of layers of the slice.
        lengths: tokens of its samples.
        mixed_only: every sample is right in a micro batch of one, and some are wrong in a micro batch with others.
        short_samples_agree: samples up to ``original_max_position_embeddings`` are right if their micro batch has no longer ones.
        disagreeing: settings that cause the difference.
        not_shown: kinds of layers that the slice leaves out, or empty.
        seconds, peak_bytes: cost of the check.
        cached: read from the cache.
    """

    status: Literal["agrees", "differs", "not checked", "off"]
    reason: str = ""
    largest: float | None = None
    layers: int = 0
    lengths: list[int] = field(default_factory=list)
    mixed_only: bool = False
    short_samples_agree: bool = False
    disagreeing: list[DisagreeingSetting] = field(default_factory=list)
    not_shown: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        """Build the cached verdict from the values of :meth:`to_dict`."""
        disagreeing = [DisagreeingSetting(**setting) for setting in values["disagreeing"]]
        return replace(cls(**{**values, "disagreeing": disagreeing}), cached=True)

    def summary(self) -> str:
        """Return one line for a log."""
        if self.status == "off":
            return "self-check: off"
        cost = "cached" if self.cached else f"{self.seconds:.1f} s, {self.peak_bytes / 2**20:.0f} MiB"
        if self.status == "not checked":
            return f"self-check: not possible: {self.reason}"
        result = f"largest difference {self.largest:.1e} of the largest logit"
        return f"self-check: {self.layers} layers against transformers: {result} ({cost})"


def objection(verdict: Verdict, config: Mapping[str, Any], versions: Mapping[str, str]) -> SelfCheckError:
    """Return the error for a model whose two sides differ; ``config``: with all defaults; ``versions``: of the packages."""
    condition = (
        "when short and long samples share a micro batch (each is right in a micro batch of one)"
        if verdict.mixed_only
        else f"on samples of {verdict.lengths[0]} to {verdict.lengths[-1]} tokens"
    )
    names = [setting.name for setting in verdict.disagreeing]
    if names:
        cause = f"They disagree about {', '.join(_setting_name(setting, config) for setting in verdict.disagreeing)}"
    else:
        cause = "No setting of config.json explains it"
    text = config.get("text_config", config)
    inner = [section.get("original_max_position_embeddings") for section in rope_settings(text)]
    original = text.get("original_max_position_embeddings") or next(filter(None, inner), None)
    sides = (
        f"transformers {versions['transformers']} and Megatron-Core {versions['megatron-core']} (through mcore-bridge "
        f"{versions['mcore-bridge']})"
    )
    return SelfCheckError(
        f"self-check: {sides} compute different numbers for this {config.get('model_type')} model: logits of a "
        f"{verdict.layers}-layer slice differ by {verdict.largest:.2g} of the largest logit {condition}. {cause}. "
        f"{advice(names, original, verdict.short_samples_agree)}; self_check: off skips this check and trains what "
        "Megatron-Core computes"
    )


def gaps(verdict: Verdict, model_type: str) -> list[str]:
    """Return a warning about parts of the model that a self-check did not compare, if any."""
    if verdict.status == "not checked":
        return [
            f"self-check: this {model_type} model was not compared with transformers: {verdict.reason}. Compare its "
            "log-probabilities yourself before training (backend.forward)"
        ]
    if verdict.not_shown:
        return [
            f"self-check: only {verdict.layers} layers of this {model_type} model were compared: {verdict.not_shown}"
        ]
    return []


def warnings_about(verdict: Verdict, config: Mapping[str, Any]) -> list[str]:
    """Return warnings for the user that do not stop the training."""
    model_type = str(config.get("model_type"))
    warnings = gaps(verdict, model_type)
    architecture = architecture_named(model_type)
    if not (architecture.proven or architecture.proven_with_images):
        passed = "; the self-check of its forward pass agrees with transformers" if verdict.status == "agrees" else ""
        names = ", ".join(sorted(architecture.model_type for architecture in proven()))
        warnings.append(
            f"{model_type} is not among the architectures that megascend's tests prove ({names}){passed}. Gradients, parallel "
            "layouts and exports of it are untested"
        )
    return warnings


def _setting_name(setting: DisagreeingSetting, config: Mapping[str, Any]) -> str:
    # The slice may have scaled the value; the message shows the one of the user's config.json.
    value = config.get("text_config", config).get(setting.name)
    text = repr(value) if isinstance(value, str | int | float) else setting.value
    return f"{setting.name}={text} (they agree with {setting.plain})"
