"""verl's settings of a rollout become those of megascend's, or are refused by name. Plain data."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.errors import ConfigError
from megascend.integrations.verl.rollout_settings import translate_rollout

LOCAL: dict[str, Any] = {"name": "megascend", "tensor_model_parallel_size": 1}


def test_lengths_precision_seed_and_sizes_are_taken_over() -> None:
    found = translate_rollout(
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
    assert (found.max_model_len, found.response_length, found.rows, found.seed) == (42, 12, 5, 7)
    assert (found.precision, found.ignore_eos, found.vllm_python) == ("fp32", True, None)
    assert translate_rollout(LOCAL | {"max_model_len": 99}).max_model_len == 99


def test_a_vllm_has_its_interpreter_options_and_workers() -> None:
    own = {"vllm_python": "/v/bin/python", "options": ["--x", 3], "timeout_s": 9}
    found = translate_rollout(
        {"name": "megascend", "tensor_model_parallel_size": 2, "engine_kwargs": {"megascend": own, "vllm": {"y": 1}}}
    )
    assert (found.vllm_python, found.options, found.tensor_parallel) == ("/v/bin/python", ("--x", "3"), 2)
    assert (found.timeout_s, found.host) == (9.0, "127.0.0.1")


PLACE = "actor_rollout_ref.rollout"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.9}, f"{PLACE}.top_p=0.9: "),
    ({"val_kwargs": {"top_k": 5}}, f"{PLACE}.val_kwargs.top_k=5: "),
    ({"a_new_setting": 1}, f"{PLACE}.a_new_setting=1: megascend has no rule for it"),
    ({"tensor_model_parallel_size": 2}, "the local engine is one process"),
    ({"engine_kwargs": {"megascend": {"pythn": "x"}}}, f"{PLACE}.engine_kwargs.megascend.pythn='x'"),
    ({"engine_kwargs": {"megascend": {"options": ["--x"]}}}, "are vLLM's, and there is no vllm_python"),
    ({"checkpoint_engine": {"backend": "nccl"}}, "checkpoint_engine.backend='nccl'"),
    ({"disaggregation": {"enabled": True}}, f"{PLACE}.disaggregation.enabled=True"),
    ({"nnodes": 1}, f"{PLACE}.nnodes=1: "),
    ({"dtype": "int8"}, f"{PLACE}.dtype='int8'; known: "),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate_rollout(LOCAL | changes)
    assert message in str(caught.value)
