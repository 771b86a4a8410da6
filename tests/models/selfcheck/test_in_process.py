"""The self-check of engines that run transformers' own models, with engines that make known mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megascend.config import Parallel
from megascend.engines.common.heads import plain_slice
from megascend.engines.fsdp import attention
from megascend.engines.fsdp.self_check import FsdpSubject
from megascend.errors import ConfigError, PlatformError
from megascend.models.checkpoint_files.scalar_head import ScalarHead
from megascend.models.selfcheck import check, in_process
from megascend.models.selfcheck.in_process import Subject
from megascend.models.selfcheck.process import BOUND
from megascend.models.selfcheck.trial_inputs import plain_options
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed, tiny_config

QWEN = tiny_config("qwen3", num_hidden_layers=2)
SIZES = {
    name: value
    for name, value in tiny_config("llama").items()
    if name not in ("architectures", "model_type", "rope_theta", "hidden_act")
} | {
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


class SingleSubject(FsdpSubject):
    """The subject of engine single."""

    name = "single"

    def __init__(self, scalar_head: ScalarHead | None) -> None:
        super().__init__(scalar_head, packing=False, context=1, npu=False, sharded=False)
        self.engine = self.name


class Padded(Subject):
    """A correct engine, which pads on the right."""

    engine = "padded"
    packing = False

    def __init__(self) -> None:
        super().__init__()
        self.built = 0

    def plain(self, config: Any) -> Any:
        return plain_slice(config, None)

    def build(self, config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        self.built += 1
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def logits(self, model: Any, samples: Sequence[Tensor], images: Any = None) -> list[Tensor]:
        rows = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        return [row[: len(ids)] for row, ids in zip(model(rows).logits, samples, strict=True)]


class Borderless(Padded):
    """An engine whose packed samples attend to each other."""

    engine = "borderless"
    packing = True
    remedy = "set batching.packing: false"

    def logits(self, model: Any, samples: Sequence[Tensor], images: Any = None) -> list[Tensor]:
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
        mask = torch.full((positions.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        logits = model(torch.cat(list(samples))[None], position_ids=positions, attention_mask=mask).logits[0]
        return list(logits.split([len(ids) for ids in samples]))


class Raising(Padded):
    """An engine that calls the model with an unknown argument."""

    engine = "raising"

    def logits(self, model: Any, samples: Sequence[Tensor], images: Any = None) -> list[Tensor]:
        return model(samples[0][None], words="of nobody")["missing"]


def config_of(settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


def examine(subject: Subject, settings: dict[str, Any] = QWEN, longest: int = 512) -> Any:
    return check._examine_in_process(settings, config_of(dict(settings)), longest, subject)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path))


def test_agreement_is_cached() -> None:
    subject = Padded()
    random = torch.random.get_rng_state()
    first, second = examine(subject), examine(subject)
    assert (first.status, first.cached, subject.built) == ("agrees", False, 1)
    assert first.largest <= BOUND
    assert first.lengths == [3, 8, 13, 40, 48]
    assert (second.status, second.cached) == ("agrees", True)
    assert torch.equal(random, torch.random.get_rng_state()), "a run's random numbers do not depend on a cache"


def test_leaking_packed_samples_differ_and_setting_is_named() -> None:
    verdict = examine(Borderless())
    assert (verdict.status, verdict.mixed_only) == ("differs", True)
    message = in_process.objection(verdict, "qwen3", Borderless(), {"transformers": "5"})
    assert "engine borderless and transformers 5 compute different numbers for this qwen3 model" in message
    assert "each is right in a micro batch of one); set batching.packing: false" in message


CRITIC = ScalarHead("token", bias=True, dropout=0.1)
REWARD = ScalarHead("sequence", bias=False)


@pytest.mark.parametrize("head", [CRITIC, REWARD], ids=["critic", "reward model"])
def test_scalar_heads_are_compared_through_their_base_model(head: ScalarHead) -> None:
    subjects: list[Subject] = [SingleSubject(head), FsdpSubject(head, packing=True, context=1, npu=False)]
    for subject in subjects:
        verdict = examine(subject)
        assert (verdict.status, verdict.layers) == ("agrees", 2)
    borderless = FsdpSubject(head, packing=True, context=1, npu=False)
    see_all = lambda model, samples, images: list(  # noqa: E731
        model(torch.cat(list(samples))[None], use_cache=False, **plain_rows()).logits[0].split([*map(len, samples)])
    )
    borderless.logits = see_all  # type: ignore[method-assign]
    borderless.engine = "borderless"
    assert examine(borderless).status == "differs"


def plain_rows() -> dict[str, Any]:
    """Return the option that makes engine fsdp's attention treat a row as one sample."""
    return {attention.KEYWORD: attention.sample_lengths(None, None, torch.device("cpu"), torch.float32)}


def test_model_that_the_engine_cannot_call_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"engine raising: Qwen3ForCausalLM \(qwen3\) cannot be called") as caught:
        examine(Raising())
    assert "use another engine" in str(caught.value)


def test_slice_supports_aliased_names_and_nested_configs() -> None:
    sizes = {
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "relu",
    }
    raw = {"model_type": "gpt2"} | sizes
    part = in_process.slice_transformers_model(raw, config_of(raw), 10**6)
    assert (part.config["n_layer"], part.config["n_head"], part.config["n_embd"]) == (2, 4, 256)
    assert part.config["activation_function"] == "relu"
    assert "hidden_size" not in part.config
    text = {"model_type": "gemma3_text", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 12}
    nested = json.loads(json.dumps({"model_type": "gemma3", "text_config": text}))
    part = in_process.slice_transformers_model(nested, config_of(nested), 10**6)
    assert (part.config["model_type"], part.config["num_hidden_layers"]) == ("gemma3_text", 6)


def with_settings(subject: type[Subject], **settings: Any) -> Subject:
    """Return an engine that computes with other values of these settings than the configuration has."""

    class Wrong(subject):
        engine = name = "wrong"  # a part of the verdict's key

        def build(self, config: Any) -> Any:
            for name, value in settings.items():
                setattr(config.get_text_config(), name, value)
            return super().build(config)

    return Wrong(None)


LIMITS = {
    "swiglu_limit": ("gpt_oss", 12.0, 7.0),
    "clip_qkv": ("olmoe", 8.0, None),
    "clip_qkv, a little": ("olmoe", 8.0, 9.0),
    "sliding_window": ("gpt_oss", 16, 17),
    "sliding_window, of mistral": ("mistral", 16, 15),
    "attn_logit_softcapping": ("gemma2", 50.0, 40.0),
    "final_logit_softcapping": ("gemma2", 30.0, 20.0),
}
"""Architecture, the value in its configuration, and the one with which a wrong engine computes."""


@pytest.mark.parametrize("limit", LIMITS)
def test_engine_with_another_limit_differs(limit: str) -> None:
    (arch, value, wrong), name = LIMITS[limit], limit.split(",")[0]
    settings: dict[str, Any] = {"model_type": arch} | SIZES | {name: value}
    right = examine(SingleSubject(None), settings)
    assert (right.status, right.not_shown) == ("agrees", "")
    assert examine(with_settings(SingleSubject, **{name: wrong}), settings).largest > 100 * BOUND


@pytest.mark.parametrize("arch", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.nightly_cases("qwen3_vl", "qwen3_5")  # covered: qwen3_vl_moe, qwen3_5_moe
def test_models_with_vision_towers_are_compared_with_an_image(arch: str) -> None:
    settings = tiny_config(arch)
    for subject in (SingleSubject(None), FsdpSubject(None, packing=False, context=1, npu=False)):
        verdict = examine(subject, settings)
        assert (verdict.status, verdict.lengths) == ("agrees", [3, 8, 13, 40, 48])
    assert examine(WithoutImages(None), settings).largest > 100 * BOUND


class WithoutImages(SingleSubject):
    """An engine that computes an image's positions, and leaves its features out."""

    name = "without images"

    def image_arguments(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        return {"position_ids": super().image_arguments(*args, **options)["position_ids"]}


class ShortOfMemory(Padded):
    """An engine that runs out of memory at the first attempt."""

    engine = "short of memory"
    failed = False

    def plain(self, config: Any) -> Any:
        if not self.failed:
            self.failed = True
            raise MemoryError("for the moment")
        return super().plain(config)


def test_failed_check_is_repeated() -> None:
    subject = ShortOfMemory()
    first, second = examine(subject), examine(subject)
    assert (first.status, second.status) == ("not checked", "agrees")
    assert "MemoryError: for the moment" in first.reason


def test_unexpected_error_becomes_platform_error_on_every_rank(runtime: Runtime) -> None:
    def check_fails(world: int) -> tuple[str, str]:
        groups = initialize(plan(Parallel(), world), runtime.platform, 60)
        try:
            check._on_rank_0(lambda: 1 // 0, groups)  # type: ignore[arg-type,return-value]
        except PlatformError as error:
            return type(error).__name__, str(error)
        raise AssertionError("no error")

    for world in (1, 2):
        for name, text in run_distributed(check_fails, world, world, init=False):
            assert name == "PlatformError"
            assert "the self-check failed (ZeroDivisionError: " in text
            assert "set self_check: off to skip it" in text


@pytest.mark.parametrize(
    ("model_type", "settings", "layers"),
    [
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2}, 3),
        ("zamba", {"attn_layer_period": 3, "attn_layer_offset": 1}, 3),
        ("olmo_hybrid", {}, 4),
    ],
)
def test_slice_of_hybrid_includes_attention_layers(model_type: str, settings: dict[str, Any], layers: int) -> None:
    raw = {"model_type": model_type, "num_hidden_layers": 32} | settings
    part = in_process.slice_transformers_model(raw, config_of(dict(raw)), 10**6)
    assert part.config["num_hidden_layers"] == layers
    kinds = config_of(part.config).layer_types
    assert len(kinds) == layers
    assert len(set(kinds)) == 2


def test_windows_and_chunks_are_rescaled() -> None:
    raw = QWEN | {"use_sliding_window": True, "sliding_window": 4096, "attention_chunk_size": 8192}
    part = in_process.slice_transformers_model(raw, config_of(dict(raw)), 10**6)
    assert (part.config["sliding_window"], part.config["attention_chunk_size"]) == (16, 16)
    part = in_process.slice_transformers_model(raw, config_of(dict(raw)), 2048)
    assert part.config["sliding_window"] == 4096, "no sample is longer"


def test_oldest_transformers_gets_no_choice_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.57 refuses the option, and a slice that cannot be built is not checked."""
    assert plain_options()["experts_implementation"] == "eager"
    monkeypatch.delattr(PreTrainedModel, "set_experts_implementation")
    assert plain_options() == {"attn_implementation": "eager", "dtype": torch.float32}
