"""Small requests as clients send them in JSON. Unknown fields are ignored, as the protocol grows; null is as if left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megascend.config import Adam
from megascend.errors import ConfigError, MegascendError
from megascend.serve.errors import RequestRefusedError

LONGEST_S = 100 * 365 * 24 * 3600
"""The longest time that a checkpoint can be asked to be kept for, other than for ever."""
B = TypeVar("B", bound="Body")


def as_float(value: Any) -> Any:
    """Return a whole number as a float, infinite if no float can hold it: JSON does not bound its digits."""
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


Text = Annotated[str, Field(min_length=1, max_length=4096)]
Whole = Annotated[int, Field(ge=0, lt=2**62)]
Lifetime = Annotated[int, Field(ge=0, le=LONGEST_S)]
Real = Annotated[float, BeforeValidator(as_float)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_size)]


class Body(BaseModel):
    """Base of all: values are of the very kind that is expected, and not converted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @classmethod
    def read(cls: type[B], values: Any, what: str = "", error: type[MegascendError] = RequestRefusedError) -> B:
        """Check a body, or a part of one.

        Args:
            what: name of the part.

        Raises:
            RequestRefusedError: 422; a value is missing, of another kind, or out of range.
            error: in its place.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            place = ".".join(str(each)[:60] for each in (*([what] if what else []), *first["loc"])) or "the body"
            missing = first["type"] == "missing"
            message = f"{place}: {first['msg']}" + ("" if missing else f", got {str(first['input'])[:60]!r}")
            raise (RequestRefusedError(message, 422) if error is RequestRefusedError else error(message)) from None


class WithMetadata(Body):
    """What a client may attach metadata to."""

    user_metadata: Metadata | None = None


class LoraSettings(Body):
    """The adapter that a client asks for.

    Attributes:
        seed: of its first values; None: any.
        train_attn, train_mlp, train_unembed: which layers are trained.
    """

    rank: Whole
    seed: Whole | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class CreateModel(WithMetadata):
    """``create_model``."""

    model_seq_id: Whole
    base_model: Text
    lora_config: LoraSettings | None = None
    optimizer_config: Any = None

    @property
    def lora(self) -> LoraSettings:
        """The adapter.

        Raises:
            ConfigError: an optimizer other than AdamW, or full fine-tuning, is asked for.
        """
        if self.lora_config is None:
            raise ConfigError("this server trains LoRA adapters; create_model needs a lora_config")
        optimizer = self.optimizer_config or {"type": "adamw"}
        if not isinstance(optimizer, Mapping) or optimizer.get("type") != "adamw":
            raise ConfigError("optimizer_config: this server has adamw only")
        return self.lora_config


class AdamParams(Body):
    """The settings of a step, with what clients mean by one that they leave out."""

    type: Any = "adamw"
    learning_rate: Real = 1e-4
    beta1: Real = 0.9
    beta2: Real = 0.95
    eps: Real = 1e-12
    weight_decay: Real = 0.0
    grad_clip_norm: Real = 0.0


def adam_of(settings: Mapping[str, Any]) -> Adam:
    """Return the settings of a step.

    Raises:
        ConfigError: one is not possible.
    """
    params = AdamParams.read(settings, "adam_params", ConfigError)
    if params.type not in ("adamw", "adam"):
        raise ConfigError(f"optimizer {str(params.type)[:60]!r} is not supported; this server has adamw")
    return Adam(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=max(params.grad_clip_norm, 0.0),
    )


class SaveWeights(WithMetadata):
    """``save_weights`` and ``save_weights_for_sampler``, but for the model and the request's number."""

    path: Text | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    kind: Any = "snapshot"
    sampling_session_seq_id: Whole | None = None


class LoadWeights(WithMetadata):
    """``load_weights``, but for what it is loaded into."""

    path: Text
    optimizer: bool = False


class LoadNewModel(LoadWeights):
    """``load_weights`` as a new model of a session."""

    model_seq_id: Whole


class KeepFor(Body):
    """How long a checkpoint is kept from now on; None: for ever."""

    ttl_seconds: Lifetime | None = None


class WeightsInfo(Body):
    """``weights_info``."""

    tinker_path: Text


class CreateSampler(Body):
    """``create_sampling_session``, but for the session."""

    sampling_session_seq_id: Whole
    model_path: Text | None = None


class SamplerTarget(Body):
    """One client of a sampler."""

    sampling_session_id: Text
    cloned_sampler_id: Whole = 0


class RetrieveFutures(Body):
    """``retrieve_futures``."""

    target: SamplerTarget
    prev_cursor: Whole = 0
    timeout: Any = None
    retrieved_request_ids: Any = None


class CancelFuture(Body):
    """``cancel_future``."""

    request_id: Text


class Sample(Body):
    """``asample``. What may be large, or is an error of the request's future, is not checked here."""

    prompt: Any = None
    sampling_params: Any = None
    target_prompt_logprobs: Any = None

    sampling_session_id: Text | None = None
    model_path: Text | None = None
    seq_id: Whole | None = None
    num_samples: Whole = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Whole | None = None
    topk_prompt_logprobs: Whole = 0
    topk_sample_logprobs: Whole = 0
    prompt_alt_tokens_k: Whole = 0
    record_stability_info: bool = False


class MaxTokens(Body):
    """How long a response may be; None: as long as the model takes."""

    max_tokens: Whole | None = None


def _in_64_bits(value: float) -> float:
    if not abs(value) < 2**63:
        raise ValueError("must be below 2**63")
    return value


Bounded = Annotated[int | float, AfterValidator(_in_64_bits)]


class SamplingSettings(Body):
    """The rest of ``sampling_params``."""

    temperature: Bounded = 1.0
    top_p: Bounded = 1.0
    top_k: Bounded = -1
    seed: Bounded | None = None
    stop: Any = None
