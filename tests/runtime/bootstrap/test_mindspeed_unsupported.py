"""Refusals of models and options that MindSpeed computes wrongly without an error."""

from __future__ import annotations

import pytest

from megascend.errors import ConfigError
from megascend.runtime.bootstrap.mindspeed import arguments

FINE = {
    "context_parallel_size": 1,
    "context_parallel_algo": "megatron_cp_algo",
    "attention_dropout": 0.0,
    "window_size": None,
    "softmax_type": "vanilla",
    "schedules_method": None,
    "swap_attention": False,
}
ALL_GATHER = {"context_parallel_size": 2, "context_parallel_algo": "kvallgather_cp_algo"}


def test_a_plain_model_is_not_refused():
    assert arguments.reasons(FINE) == []
    assert arguments.reasons(FINE | {"context_parallel_size": 2}) == []
    assert arguments.reasons(FINE | ALL_GATHER) == []
    assert arguments.reasons(FINE | {"attention_dropout": 0.1}) == []
    arguments.check_model(FINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": (128, 0)}, r"window attention \(window_size=\(128, 0\)\).*ignores the window"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'.*vanilla softmax"),
        ({"hf_model_type": "glm4"}, "model_type: glm4: .*by position"),
        (
            {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"},
            "ulysses needs one fixed seq_length.*use ring or all_gather",
        ),
        (
            {"context_parallel_size": 2, "context_parallel_algo": "hybrid_cp_algo"},
            "hybrid_cp_algo needs a fixed seq_length",
        ),
        (ALL_GATHER | {"attention_dropout": 0.1}, "attention_dropout=0.1.*different dropout mask"),
        (
            {"context_parallel_size": 2, "use_cp_send_recv_overlap": True},
            "use_cp_send_recv_overlap=True.*process groups",
        ),
        ({"context_parallel_size": 4, "cp_window_size": 2}, "cp_window_size=2.*process groups"),
    ],
)
def test_silent_faults_are_refused_with_a_reason(change, message):
    with pytest.raises(ConfigError, match=message):
        arguments.check_model(FINE | change)


@pytest.mark.parametrize("name", arguments.NEEDS_MEGATRON_TRAINING)
def test_features_that_import_megatron_training_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"{name}=True: that feature imports megatron\.training"):
        arguments.check_model(FINE | {name: True})


def test_packing_under_context_parallelism_is_refused_with_the_setting():
    arguments.check_batching(1, packing=True)
    arguments.check_batching(2, packing=False)
    with pytest.raises(ConfigError, match=r"batching\.packing with parallel\.context=2.*set batching\.packing: false"):
        arguments.check_batching(2, packing=True)
