"""The self-check of engines that run transformers' own models, with engines that make mistakes of known kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.selfcheck import check, in_process
from megascend.selfcheck.in_process import Subject
from megascend.selfcheck.process import BOUND
from megascend.testing import tiny_config

QWEN = tiny_config("qwen3", num_hidden_layers=2)


class Padded(Subject):
    """An engine that pads on the right, as it should."""

    engine = "padded"
    packing = False

    def __init__(self) -> None:
        self.built = 0

    def build(self, config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        self.built += 1
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def logits(self, model: Any, samples: Sequence[Tensor]) -> list[Tensor]:
        rows = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        return [row[: len(ids)] for row, ids in zip(model(rows).logits, samples, strict=True)]


class Borderless(Padded):
    """An engine whose packed samples see each other."""

    engine = "borderless"
    packing = True
    remedy = "set batching.packing: false"

    def logits(self, model: Any, samples: Sequence[Tensor]) -> list[Tensor]:
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
        mask = torch.full((positions.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        logits = model(torch.cat(list(samples))[None], position_ids=positions, attention_mask=mask).logits[0]
        return list(logits.split([len(ids) for ids in samples]))


class Raising(Padded):
    """An engine that calls the model in a way that it does not take."""

    engine = "raising"

    def logits(self, model: Any, samples: Sequence[Tensor]) -> list[Tensor]:
        return model(samples[0][None], words="of nobody")["missing"]


def config_of(settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


def examine(subject: Subject, settings: dict[str, Any] = QWEN, longest: int = 512) -> Any:
    return check._examine_here(settings, config_of(dict(settings)), longest, subject)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path))


def test_agreement_is_found_once_and_kept() -> None:
    subject = Padded()
    random = torch.random.get_rng_state()
    first, second = examine(subject), examine(subject)
    assert (first.status, first.cached, subject.built) == ("agrees", False, 1)
    assert first.largest <= BOUND
    assert first.lengths == [3, 8, 13, 40, 48]
    assert (second.status, second.cached) == ("agrees", True)
    assert torch.equal(random, torch.random.get_rng_state()), "a run's random numbers do not depend on a cache"


def test_packed_samples_that_see_each_other_are_found_and_the_setting_is_named() -> None:
    verdict = examine(Borderless())
    assert (verdict.status, verdict.mixed_only) == ("differs", True)
    message = in_process.objection(verdict, "qwen3", Borderless(), {"transformers": "5"})
    assert "engine borderless and transformers 5 compute different numbers for this qwen3 model" in message
    assert "each by itself is right); set batching.packing: false" in message


def test_engines_and_layouts_have_verdicts_of_their_own() -> None:
    assert [examine(subject).status for subject in (Borderless(), Padded(), Borderless())] == [
        "differs",
        "agrees",
        "differs",
    ]


def test_model_that_the_engine_cannot_call_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"engine raising: Qwen3ForCausalLM \(qwen3\) cannot be called") as caught:
        examine(Raising())
    assert "use another engine" in str(caught.value)


def test_slice_is_made_of_names_of_an_architectures_own_and_of_nested_models() -> None:
    sizes = {
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "relu",
    }
    raw = {"model_type": "gpt2"} | sizes
    part = in_process.slice_here(raw, config_of(raw), 10**6)
    assert (part.config["n_layer"], part.config["n_head"], part.config["n_embd"]) == (2, 4, 256)
    assert part.config["activation_function"] == "relu"
    assert "hidden_size" not in part.config
    text = {"model_type": "qwen3_5_text", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8}
    nested = json.loads(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    part = in_process.slice_here(nested, config_of(nested), 10**6)
    assert (part.config["model_type"], part.config["num_hidden_layers"]) == ("qwen3_5_text", 4)


def test_sliding_windows_and_chunks_shrink_with_the_samples() -> None:
    raw = QWEN | {"use_sliding_window": True, "sliding_window": 4096, "attention_chunk_size": 8192}
    part = in_process.slice_here(raw, config_of(dict(raw)), 10**6)
    assert (part.config["sliding_window"], part.config["attention_chunk_size"]) == (16, 16)
    part = in_process.slice_here(raw, config_of(dict(raw)), 2048)
    assert part.config["sliding_window"] == 4096, "no sample is longer"
