"""Translation of verl's rollout settings to megascend's; unsupported ones are refused by name. Plain data."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.errors import ConfigError
from megascend.integrations.verl.rollout_settings import translate_rollout

LOCAL: dict[str, Any] = {"name": "megascend", "tensor_model_parallel_size": 1}


def test_lengths_precision_seed_and_sizes_are_taken_over() -> None:
    settings = translate_rollout(
        LOCAL
        | {
            "prompt_length": 30,
            "response_length": 12,
            "dtype": "float32",
            "seed": 7,
            "max_num_seqs": 5,
            "ignore_eos": True,
        }
    )
    assert (settings.max_model_len, settings.response_length, settings.rows, settings.seed) == (42, 12, 5, 7)
    assert (settings.precision, settings.ignore_eos, settings.vllm_python) == ("fp32", True, None)
    assert translate_rollout(LOCAL | {"max_model_len": 99}).max_model_len == 99


def test_a_vllm_has_its_interpreter_options_and_workers() -> None:
    options = {"vllm_python": "/v/bin/python", "options": ["--x", 3], "timeout_s": 9}
    settings = translate_rollout(
        {
            "name": "megascend",
            "tensor_model_parallel_size": 2,
            "engine_kwargs": {"megascend": options, "vllm": {"y": 1}},
        }
    )
    assert (settings.vllm_python, settings.options, settings.tensor_parallel) == ("/v/bin/python", ("--x", "3"), 2)
    assert (settings.timeout_s, settings.host) == (9.0, "127.0.0.1")


PREFIX = "actor_rollout_ref.rollout"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.9}, f"{PREFIX}.top_p=0.9: "),
    ({"val_kwargs": {"top_k": 5}}, f"{PREFIX}.val_kwargs.top_k=5: "),
    ({"a_new_setting": 1}, f"{PREFIX}.a_new_setting=1: megascend has no rule for it"),
    ({"tensor_model_parallel_size": 2}, "the local engine is one process"),
    ({"engine_kwargs": {"megascend": {"pythn": "x"}}}, f"{PREFIX}.engine_kwargs.megascend.pythn='x'"),
    ({"engine_kwargs": {"megascend": {"options": ["--x"]}}}, "are vLLM's, and there is no vllm_python"),
    ({"checkpoint_engine": {"backend": "nccl"}}, "checkpoint_engine.backend='nccl'"),
    ({"disaggregation": {"enabled": True}}, f"{PREFIX}.disaggregation.enabled=True"),
    ({"nnodes": 1}, f"{PREFIX}.nnodes=1: "),
    ({"dtype": "int8"}, f"{PREFIX}.dtype='int8'; known: "),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_unsupported_rollout_settings_raise_config_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_rollout(LOCAL | changes)
    assert message in str(caught.value)
