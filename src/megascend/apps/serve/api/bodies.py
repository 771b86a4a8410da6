"""Pydantic models of small JSON requests. Unknown fields are ignored, as the protocol grows.

Null counts as left out, except where a number belongs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megascend.apps.serve.errors import RequestRefusedError
from megascend.config import Adam
from megascend.errors import ConfigError, MegascendError

LONGEST_S = 100 * 365 * 24 * 3600
"""Longest finite lifetime of a checkpoint."""
B = TypeVar("B", bound="Body")


def as_float(value: Any) -> Any:
    """Convert an int to float, infinite if out of range: JSON integers have any number of digits."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_size(metadata: dict[str, Any]) -> dict[str, str]:
    if len(metadata) > 64 or sum(len(str(name)) + len(str(value)) for name, value in metadata.items()) > 2**16:
        raise ValueError("must be an object of at most 64 entries and 64 KiB")
    return {name: str(value) for name, value in metadata.items()}


def _check_64_bits(value: float) -> float:
    if not abs(value) < 2**63:
        raise ValueError("must be below 2**63")
    return value


Bounded = Annotated[int | float, AfterValidator(_check_64_bits)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
NonNegative = Annotated[int, Field(ge=0, lt=2**62)]
Lifetime = Annotated[int, Field(ge=0, le=LONGEST_S)]
Real = Annotated[float, BeforeValidator(as_float)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_size)]


class Body(BaseModel):
    """Base class: values must have the declared type and are not converted."""

    # Strict: pydantic would otherwise take "1" or 1.0 for a number, and true for one as well.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if value is not None or name in cls._numbers()}
        return values

    @classmethod
    @cache
    def _numbers(cls) -> frozenset[str]:
        """Return the fields that are numbers in any case: JSON has no NaN and no infinity, and clients send null for them."""
        numbers = (float, int, int | float)
        return frozenset(name for name, entry in cls.model_fields.items() if entry.annotation in numbers)

    @classmethod
    def read(cls: type[B], values: Any, part: str = "", error: type[MegascendError] = RequestRefusedError) -> B:
        """Validate a body, or a part of one.

        Args:
            part: name of the part, for the message.
            error: class of the error to raise.

        Raises:
            RequestRefusedError: 422, a value is missing, of another type, or out of range; or ``error`` instead.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as invalid:
            # Names and values are cut: they are the client's, and the message goes to logs and to the status page.
            first = invalid.errors(include_url=False)[0]
            location = ".".join(str(key)[:60] for key in (*([part] if part else []), *first["loc"])) or "the body"
            missing = first["type"] == "missing"
            message = f"{location}: {first['msg']}" + ("" if missing else f", got {str(first['input'])[:60]!r}")
            raise (RequestRefusedError(message, 422) if error is RequestRefusedError else error(message)) from None


class WithMetadata(Body):
    """Base class of requests with user metadata."""

    user_metadata: Metadata | None = None


class LoraSettings(Body):
    """LoRA settings of ``create_model``.

    Attributes:
        seed: seed of the initial values; None: random.
        train_attn, train_mlp, train_unembed: layers to train.
    """

    rank: NonNegative
    seed: NonNegative | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class CreateModel(WithMetadata):
    """``create_model``."""

    model_seq_id: NonNegative
    base_model: Text
    lora_config: LoraSettings | None = None
    optimizer_config: Any = None

    @property
    def lora(self) -> LoraSettings:
        """The LoRA settings."""
        if self.lora_config is None:
            raise ConfigError("this server trains LoRA adapters; create_model needs a lora_config")
        optimizer = {"type": "adamw"} if self.optimizer_config in (None, {}) else self.optimizer_config
        if not isinstance(optimizer, Mapping) or optimizer.get("type") != "adamw":
            raise ConfigError("optimizer_config: this server has adamw only")
        return self.lora_config


class TrainInput(Body):
    """Samples and loss of ``forward_backward`` and ``forward``, whose errors belong to the request's future."""

    data: list[Any]
    loss_fn: Any = None
    loss_fn_config: Any = None


class TrainBody(Body):
    """``forward_backward`` and ``forward`` in JSON."""

    model_id: str
    seq_id: Any = None
    forward_backward_input: TrainInput | None = None
    forward_input: TrainInput | None = None


class AdamParams(Body):
    """Settings of an optimizer step, with the defaults of the Tinker client."""

    type: Any = "adamw"
    learning_rate: Real = 1e-4
    beta1: Real = 0.9
    beta2: Real = 0.95
    eps: Real = 1e-12
    weight_decay: Real = 0.0
    grad_clip_norm: Real = 0.0


def parse_adam(settings: Mapping[str, Any]) -> Adam:
    """Return the settings of an optimizer step."""
    params = AdamParams.read(settings, "adam_params", ConfigError)
    if params.type not in ("adamw", "adam"):
        raise ConfigError(f"optimizer {str(params.type)[:60]!r} is not supported; this server has adamw")
    return Adam(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=max(params.grad_clip_norm, 0.0),  # NaN stays, and is refused
    )


class SaveWeights(WithMetadata):
    """``save_weights`` and ``save_weights_for_sampler``, without model and request number."""

    path: Text | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    kind: Any = "snapshot"
    sampling_session_seq_id: NonNegative | None = None


class LoadWeights(WithMetadata):
    """``load_weights``, without its target."""

    path: Text
    optimizer: bool = False


class LoadNewModel(LoadWeights):
    """``load_weights`` into a new model of a session."""

    model_seq_id: NonNegative


class KeepFor(Body):
    """Lifetime of a checkpoint from now on; None: unlimited."""

    ttl_seconds: Lifetime | None = None


class WeightsInfo(Body):
    """``weights_info``."""

    tinker_path: Text


class CreateSampler(Body):
    """``create_sampling_session``, without the session."""

    sampling_session_seq_id: NonNegative
    model_path: Text | None = None


class SamplerTarget(Body):
    """One client of a sampler."""

    sampling_session_id: Text
    cloned_sampler_id: NonNegative = 0


class RetrieveFutures(Body):
    """``retrieve_futures``."""

    target: SamplerTarget
    prev_cursor: NonNegative = 0
    timeout: Bounded | None = None
    retrieved_request_ids: Any = None


class CancelFuture(Body):
    """``cancel_future``."""

    request_id: Text


class SampleBody(Body):
    """``asample``. Fields that may be large, or whose errors belong to the request's future, are not checked here."""

    prompt: Any = None
    sampling_params: Any = None
    target_prompt_logprobs: Any = None

    sampling_session_id: Text | None = None
    model_path: Text | None = None
    seq_id: NonNegative | None = None
    num_samples: NonNegative = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: NonNegative | None = None
    topk_prompt_logprobs: NonNegative = 0
    topk_sample_logprobs: NonNegative = 0
    prompt_alt_tokens_k: NonNegative = 0
    record_stability_info: bool = False


class MaxTokens(Body):
    """Maximum response length; None: up to the model's maximum."""

    max_tokens: NonNegative | None = None


def as_integer(value: Any) -> Any:
    """Convert a float that is a whole number to int, as some JSON libraries write integers."""
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError("must be a whole number")
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(as_integer), Field(gt=-(2**63), lt=2**63)]


class SamplingSettings(Body):
    """The other fields of ``sampling_params``."""

    temperature: Bounded = 1.0
    top_p: Bounded = 1.0
    top_k: Integer = -1
    seed: Integer | None = None
    stop: Any = None
