"""What a self-check found, as it is kept on the disk and told to the user. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from megascend.errors import SelfCheckError
from megascend.selfcheck.slicing import rope_settings
from megascend.selfcheck.suspects import advice

PROVEN = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures (``model_type``) whose training is compared with Hugging Face's in the tests, in every layout."""


@dataclass(frozen=True)
class Convicted:
    """A setting on which the two sides disagree, and what they agree with."""

    name: str
    value: str
    plain: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a self-check.

    Attributes:
        status: ``agrees``, ``differs``, ``not checked`` (with a ``reason``) or ``off``.
        largest: largest difference over the largest logit.
        layers: of the slice.
        lengths: tokens of its samples.
        mixed_only: every sample by itself is right, and wrong in a micro batch with others.
        short_ones_agree: samples up to ``original_max_position_embeddings`` are right if no longer ones are beside them.
        convicted: settings that make the difference.
        not_shown: what the slice leaves out of the model, or empty.
        seconds, peak_bytes: what it cost when it was made.
        cached: it was made earlier.
    """

    status: Literal["agrees", "differs", "not checked", "off"]
    reason: str = ""
    largest: float | None = None
    layers: int = 0
    lengths: list[int] = field(default_factory=list)
    mixed_only: bool = False
    short_ones_agree: bool = False
    convicted: list[Convicted] = field(default_factory=list)
    not_shown: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        """What :meth:`to_dict` gave, read from the disk."""
        convicted = [Convicted(**each) for each in values["convicted"]]
        return replace(cls(**{**values, "convicted": convicted}), cached=True)

    def summary(self) -> str:
        """One line for a log."""
        if self.status == "off":
            return "self-check: off"
        cost = "cached" if self.cached else f"{self.seconds:.1f} s, {self.peak_bytes / 2**20:.0f} MiB"
        if self.status == "not checked":
            return f"self-check: not possible: {self.reason}"
        found = f"largest difference {self.largest:.1e} of the largest logit"
        return f"self-check: {self.layers} layers against transformers: {found} ({cost})"


def objection(verdict: Verdict, config: Mapping[str, Any], versions: Mapping[str, str]) -> SelfCheckError:
    """Return the error for a model on which the sides, differ, by ``versions`` of packages; ``config``: with all defaults."""
    when = (
        "when short and long samples share a micro batch (each by itself is right)"
        if verdict.mixed_only
        else f"on samples of {verdict.lengths[0]} to {verdict.lengths[-1]} tokens"
    )
    names = [each.name for each in verdict.convicted]
    if names:
        about = ", ".join(_named(each, config) for each in verdict.convicted)
        cause = f"They disagree about {about}"
    else:
        cause = "No setting of config.json was found that explains it"
    inner = [each.get("original_max_position_embeddings") for each in rope_settings(config)]
    original = config.get("original_max_position_embeddings") or next(filter(None, inner), None)
    sides = (
        f"transformers {versions['transformers']} and Megatron-Core {versions['megatron-core']} (through mcore-bridge "
        f"{versions['mcore-bridge']})"
    )
    return SelfCheckError(
        f"self-check: {sides} compute different numbers for this {config.get('model_type')} model: logits of a "
        f"{verdict.layers}-layer slice differ by {verdict.largest:.2g} of the largest logit {when}. {cause}. "
        f"{advice(names, original, verdict.short_ones_agree)}; self_check: off skips this check and trains what "
        "Megatron-Core computes"
    )


def gaps(verdict: Verdict, model_type: str) -> list[str]:
    """Return a warning of what a self-check has not compared, if anything."""
    if verdict.status == "not checked":
        return [
            f"self-check: nothing about this {model_type} model was compared with transformers: {verdict.reason}. Compare its "
            "log-probabilities yourself before training (backend.forward)"
        ]
    if verdict.not_shown:
        return [f"self-check: it saw {verdict.layers} layers of this {model_type} model only: {verdict.not_shown}"]
    return []


def warnings_about(verdict: Verdict, config: Mapping[str, Any]) -> list[str]:
    """What a user should know although training goes on."""
    model_type = str(config.get("model_type"))
    told = gaps(verdict, model_type)
    if model_type not in PROVEN:
        passed = "; the self-check of its forward pass agrees with transformers" if verdict.status == "agrees" else ""
        told.append(
            f"{model_type} is not among the architectures that megascend's tests prove ({', '.join(PROVEN)}){passed}. Gradients, "
            "parallel layouts and exports of it are untested"
        )
    return told


def _named(each: Convicted, config: Mapping[str, Any]) -> str:
    value = config.get(each.name)
    shown = repr(value) if isinstance(value, str | int | float) else each.value
    return f"{each.name}={shown} (they agree with {each.plain})"
