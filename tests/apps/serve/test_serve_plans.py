"""The pure parts: order, names, keys, bodies, tensors, losses."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from tinker import types

from megascend.apps.serve.api import keys, wire
from megascend.apps.serve.api.bodies import AdamParams, SampleBody, parse_adam
from megascend.apps.serve.checkpoints import CheckpointPath, model_of_run, run_directory
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.samplers.messages import sample_request_of
from megascend.apps.serve.samples import arrange_as_targets, loss_of, samples_of, value_of
from megascend.apps.serve.served_model import ServedModel, allowed_targets
from megascend.apps.serve.tenancy import Order
from megascend.errors import ConfigError, DataError

MODEL = f"s-{'0' * 32}:train:3"


def test_every_arrival_gives_the_same_order() -> None:
    for arrival in itertools.permutations(range(1, 6)):
        order: Order[int] = Order()
        ran = [item for number in arrival for item in order.offer(number, number)]
        assert (ran, order.following, order.early, list(order.missing())) == ([1, 2, 3, 4, 5], 6, {}, [])


def test_a_checkpoints_path_leads_into_its_tenants_directory(tmp_path) -> None:
    path = CheckpointPath.parse(f"tinker://{MODEL}/weights/step-10")
    assert path.directory(tmp_path, "alice") == tmp_path / "alice" / f"s-{'0' * 32}.3" / "weights" / "step-10"
    assert (str(path), path.checkpoint_id) == (f"tinker://{MODEL}/weights/step-10", "weights/step-10")
    assert model_of_run(run_directory(tmp_path, "alice", MODEL)) == MODEL
    for text in ("s-1:train:0", "../x", "", MODEL + "/..", MODEL.replace("0", "g"), MODEL + "\n"):
        with pytest.raises(RequestRefusedError):
            run_directory(tmp_path, "alice", text)


def test_keys_belong_to_tenants_and_are_kept_as_digests(tmp_path) -> None:
    tenants = keys.parse_keys(" alice=tml-0123456789abcdefgh , tml-another-key-of-nobody,")
    lookup = keys.Keys(tenants)
    assert lookup.tenant("tml-0123456789abcdefgh") == "alice"
    assert lookup.tenant("tml-another-key-of-nobody") == f"k{keys.key_digest('tml-another-key-of-nobody')[:12]}"
    assert [lookup.tenant(text) for text in ("", "tml-0123456789abcdefg", "alice", "\ud800")[:3]] == [None] * 3
    assert "tml-" not in repr(vars(lookup))
    file = tmp_path / "keys"
    file.write_text(f"# who\nbob {keys.key_digest('tml-bobs')}  # may\n\n")
    assert keys.Keys(keys.read_keys(file)).tenant("tml-bobs") == "bob"
    for text in ("short", "tml-short", "a/b=tml-0123456789abcdefgh", "tml-0123456789abcdefgh,tml-0123456789abcdefgh"):
        with pytest.raises(ConfigError) as refused:
            keys.parse_keys(text)
        assert text.split(",")[0].rpartition("=")[2] not in str(refused.value)  # no key in a message
    for line in ("bob", "bob 123", f"b/b {'0' * 64}"):
        file.write_text(line)
        with pytest.raises(ConfigError, match="keys:1"):
            keys.read_keys(file)
    with pytest.raises(ConfigError, match="no API keys"):
        keys.Keys({})


# --- bodies ---


def test_messages_are_counted_before_they_are_parsed() -> None:
    empty = b"\x1a\x00"  # field 3, length 0
    schema = wire._schema()
    wire.check_message(empty * 100, schema, 100)
    with pytest.raises(RequestRefusedError, match="more than 100"):
        wire.check_message(empty * 101, schema, 100)
    inner = b"\x0a\x00" * 60
    datum = b"\x1a" + bytes([len(inner)]) + inner
    with pytest.raises(RequestRefusedError, match="more than 100"):
        wire.check_message(datum * 2, schema, 100)
    for body in (b"\x1a", b"\x1a\x05a", b"\x0b", b"\xff" * 11, b"\x1a\xff\xff\xff\xff\x7f"):
        with pytest.raises(RequestRefusedError, match="not a protobuf message"):
            wire.check_message(body, schema, 100)


# --- tensors and losses ---


def test_sparse_targets_are_dense_ones() -> None:
    tensor = wire.tensor_of_json({
        "data": [5, 7, 9], "dtype": "int64", "shape": [3, 2],
        "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 1],
    })  # fmt: skip
    assert tensor.tolist() == [[0, 5], [0, 0], [7, 9]]
    values, rows, columns = np.array([1.0]), np.array([0, 1, 1]), np.array([0])
    assert wire.dense(values, rows, columns, [2, 2]).tolist() == [[1, 0], [0, 0]]
    for bad_rows, bad_columns, shape in (
        ([0, 1, 1], [2], [2, 2]), ([0, 1, 1], [-1], [2, 2]), ([0, 2, 1], [0], [2, 2]), ([0, 1], [0], [2, 2]),
        ([0, 1, 1], [0], [2, 2**40]), ([0, 1, 1], [0], [2]), ([0, 1, 1], [0], [-2, -2]),
    ):  # fmt: skip
        with pytest.raises(DataError):
            wire.dense(values, np.array(bad_rows), np.array(bad_columns), shape)


def test_targets_of_several_columns_are_a_sample_each() -> None:
    targets, weights = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[1, 0], [-0.5, 2], [0, 0]], np.float32)
    data = [wire.Datum(np.arange(3), {"target_tokens": targets, "weights": weights})]
    loss = loss_of("cross_entropy", {})
    samples = samples_of(data[0], loss)
    assert [sample.target_ids.tolist() for sample in samples] == [[1, 3, 5], [2, 4, 6]]
    logprobs = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -5.0, -6.0])]
    assert value_of(loss, samples, logprobs) == pytest.approx(1 * 1 - 0.5 * 2 + 2 * 5)
    assert arrange_as_targets(data, logprobs)[0].tolist() == [[-1, -4], [-2, -5], [-3, -6]]


def test_a_losss_value_is_that_of_its_formula() -> None:
    inputs = {"target_tokens": [1, 2], "logprobs": [-1.0, -2.0], "advantages": [1.0, -2.0]}
    datum = wire.Datum(
        np.array([3, 4]), {k: np.array(v, np.int64 if k[0] == "t" else np.float32) for k, v in inputs.items()}
    )
    now = [torch.tensor([-0.5, -2.5])]
    ratios = (math.exp(0.5), math.exp(-0.5))
    expected = {
        ("importance_sampling", ()): -(ratios[0] * 1 + ratios[1] * -2),
        ("ppo", ()): -(1.2 * 1 + min(ratios[1] * -2, 0.8 * -2)),
        ("ppo", (("clip_low_threshold", 0.5), ("clip_high_threshold", 2.0))): -(ratios[0] * 1 + ratios[1] * -2),
        ("cispo", ()): -(1.2 * 1 * -0.5 + 0.8 * -2 * -2.5),
        ("dro", (("beta", 0.1),)): 0.05 * (0.25 + 0.25) - (-0.5 * 1 + -2.5 * -2),
    }
    for (name, settings), value in expected.items():
        loss = loss_of(name, dict(settings))
        assert loss.reduction == "sum"
        assert value_of(loss, samples_of(datum, loss), now) == pytest.approx(value, rel=1e-5), name
    for name, settings in (
        ("nll", {}),
        ("ppo", {"clip": 1}),
        ("ppo", {"clip_low_threshold": 1.5}),
        ("dro", {"beta": "x"}),
    ):
        with pytest.raises(ConfigError):
            loss_of(name, settings)


def test_client_reads_protobuf_answers() -> None:
    conversion = pytest.importorskip("tinker.proto.response_conv", reason="the client needs Python 3.11")
    parts = [np.float32([-1, -2]), np.float32([[-3, -4]]), np.float32([[-5, -6], [-7, -8]])]
    answer = wire.TrainAnswer(parts, {"loss:sum": math.inf, "kl:mean": math.nan, "ratio:mean": 2.0})
    read = conversion.deserialize_forward_backward_output(answer.protobuf())
    assert [
        np.array(output["logprobs"].data).reshape(output["logprobs"].shape).tolist() for output in read.loss_fn_outputs
    ] == [part.tolist() for part in parts]
    assert read.metrics == {"loss:sum": math.inf, "ratio:mean": 2.0}


def test_step_settings_have_the_clients_defaults() -> None:
    adam = parse_adam({"learning_rate": 3e-4, "grad_clip_norm": -1})
    assert (adam.lr, adam.betas, adam.eps, adam.weight_decay, adam.max_grad_norm) == (3e-4, (0.9, 0.95), 1e-12, 0, 0)
    assert set(types.AdamParams.model_fields) == set(AdamParams.model_fields) - {"type"}


NOT_FINITE = (None, float("nan"), float("inf"), float("-inf"))
"""Numbers that train nothing; the client sends the others as null in JSON."""


@pytest.mark.parametrize("value", NOT_FINITE)
def test_number_for_sampling_that_is_null_or_not_finite_is_refused(value: float | None) -> None:
    """The ranks refuse it, unlike the numbers in test_serve_refusals.py."""
    sent = types.AdamParams(learning_rate=float("nan") if value is None else value)
    assert json.loads(sent.model_dump_json())["learning_rate"] is None, "so the client sends it"
    for name in ("temperature", "top_p", "top_k"):
        body = SampleBody.read({"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {name: value}})
        problem = ""
        try:
            problem = sample_request_of(body, None, 10).params.problem or ""  # which fails the request on the ranks
        except ConfigError as error:
            problem = str(error)
        assert name in problem


def test_switches_mean_layers_of_the_model() -> None:
    names = (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "lm_head",
    )
    base = ServedModel(("tiny",), None, "Tiny", 1, 1, names)  # type: ignore[arg-type]
    assert base.targets(attention=True, mlp=False, output=False) == names[:1]
    assert base.targets(attention=False, mlp=True, output=True) == names[1:]
    tied = ServedModel(("tiny",), None, "Tiny", 1, 1, names[:3])  # type: ignore[arg-type]
    assert tied.targets(attention=True, mlp=True, output=True) == names[:3]
    with pytest.raises(ConfigError, match="no layer"):
        tied.targets(attention=False, mlp=False, output=True)
    assert allowed_targets([*names, "model.embed_tokens"], unembed=True) == (
        "down_proj",
        "lm_head",
        "q_proj",
        "up_proj",
    )
    assert allowed_targets(names, unembed=False) == allowed_targets(names[:3], unembed=True) == "all-linear"
