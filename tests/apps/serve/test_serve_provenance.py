"""Recorded responses, and samples that name them: stable_reinforce, and the ratio mask of gspo."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from recording_backend import Clock, served

from megascend.apps.sampling.request import SampledSequence, SampleResult
from megascend.apps.serve.api import wire
from megascend.apps.serve.api.wire import ProvenanceSpan
from megascend.apps.serve.samplers.sequences import KEEP_S, Sequences
from megascend.apps.serve.samples import loss_of, samples_of, with_recorded
from megascend.apps.serve.tenancy import Session
from megascend.errors import DataError

PROMPT, TOKENS, LOGPROBS = [3, 4, 5], [7, 8, 9, 10], [-1.0, -2.0, -3.0, -4.0]
TOKEN_SPANS = [ProvenanceSpan("one", 0, 3, False), ProvenanceSpan("one", 0, 3, True)]
TARGET_SPANS = [ProvenanceSpan("one", 1, 2, False), ProvenanceSpan("one", 0, 4, True)]


def recorded(clock: Clock, most: int = 100) -> Sequences:
    sequences = Sequences(clock, most)
    result = SampleResult([SampledSequence(TOKENS, LOGPROBS, "length"), SampledSequence([7], [-0.5], "stop")])
    sequences.record(Session("s", "alice", 0.0), np.array(PROMPT), ["one", "two"], result)
    return sequences


def datum(token_spans=TOKEN_SPANS, target_spans=TARGET_SPANS, **changes) -> wire.Datum:
    inputs = {"target_tokens": [0, 0, *TOKENS], "advantages": [0.0, 0.0, 1.0, 1.0, -1.0, 0.0], **changes}
    kinds = {"target_tokens": np.int64}
    arrays = {name: np.array(value, kinds.get(name, np.float32)) for name, value in inputs.items()}
    return wire.Datum(np.array([*PROMPT, *TOKENS[:-1]]), arrays, token_spans, target_spans)


def test_logprobs_are_the_samplers_despite_client_values() -> None:
    find = partial(recorded(Clock()).find, "alice", "s")
    client_datum = datum(logprobs=[9.0] * 6, weights=[1.0, 1.0, 1.0, 0.5, 1.0, 1.0])
    (sample,) = samples_of(with_recorded(client_datum, find), loss_of("stable_reinforce", {"kl_coeff": 0.1}))
    assert sample.old_logprobs.tolist() == [0, 0, *LOGPROBS]
    assert sample.weights.tolist() == [0, 0, 1, 0.5, 1, 1]
    assert "weights" not in datum().inputs
    (sample,) = samples_of(with_recorded(datum(), find), loss_of("stable_reinforce", {}))
    assert sample.weights.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (datum(target_spans=[]), "needs the provenance"),
        (datum(target_spans=TARGET_SPANS[1:]), "covers 4 target_tokens of 6"),
        (datum(token_spans=[]), "covers 0 tokens of 6"),
        (
            datum(target_spans=[ProvenanceSpan("one", 1, 2, False), ProvenanceSpan("three", 0, 4, True)]),
            "no sequence 'three'",
        ),
        (
            datum(target_spans=[ProvenanceSpan("one", 2, 2, False), ProvenanceSpan("one", 0, 4, True)]),
            "has 3 tokens of its prompt; .* names 4",
        ),
        (
            datum(target_spans=[ProvenanceSpan("one", 0, 2, False), ProvenanceSpan("two", 0, 4, True)]),
            "has 1 sampled tokens; .* names 4",
        ),
        (datum(target_spans=[ProvenanceSpan("one", 0, 7, False), ProvenanceSpan("one", 0, -1, True)]), "covers 6"),
        (datum(target_tokens=[0, 0, 7, 8, 8, 10]), r"target_tokens\[4\] is 8, .* has 9"),
        (
            datum(token_spans=[ProvenanceSpan("one", 0, 2, False), ProvenanceSpan("one", 0, 4, True)]),
            r"tokens\[2\] is 5, .* has 7",
        ),
        (datum(advantages=[0, 1, 1, 1, 1, 1]), "not sampled"),
        (datum(advantages=[1.0]), "of one shape"),
        (datum(weights=[1.0]), "weights"),
    ],
)
def test_unrecorded_provenance_raises_data_error(wrong, why) -> None:
    with pytest.raises(DataError, match=why):
        with_recorded(wrong, partial(recorded(Clock()).find, "alice", "s"))


def test_responses_belong_to_a_session_and_are_kept_for_a_day_after_their_use() -> None:
    clock = Clock()
    sequences = recorded(clock)
    for tenant, session in (("bob", "s"), ("alice", "t")):
        with pytest.raises(DataError, match="no sequence 'one'"):
            sequences.find(tenant, session, "one")
    clock.now = KEEP_S - 1
    assert sequences.find("alice", "s", "one").logprobs.tolist() == LOGPROBS
    clock.now += 2
    sequences.expire()
    sequences.find("alice", "s", "one")
    with pytest.raises(DataError, match="'two'"):
        sequences.find("alice", "s", "two")
    sequences.forget(Session("s", "alice", 0.0))
    with pytest.raises(DataError):
        sequences.find("alice", "s", "one")
    assert not sequences._sequences
    assert not sequences._tokens
    small = recorded(clock, most=10)  # seven tokens and four
    small.find("alice", "s", "two")
    with pytest.raises(DataError):
        small.find("alice", "s", "one")
    assert not recorded(clock, most=1)._sequences


def test_provenance_of_the_client_is_read() -> None:
    conversion = pytest.importorskip("tinker.proto.request_conv", reason="the client needs Python 3.11")
    from tinker import types

    if not hasattr(types, "SampledProvenanceSpan"):
        pytest.skip("a client from before provenance")
    prompt, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    client_datum = types.Datum(
        model_input=types.ModelInput.from_ints([3, 4, 7]), loss_fn_inputs={"target_tokens": [4, 7, 8]}
    ).with_provenance(
        model_input=[prompt(sequence_id="a", length=2), sampled(sequence_id="a", length=1)],
        loss_fn_inputs=[prompt(sequence_id="a", offset=1, length=1), sampled(sequence_id="a", length=2)],
    )
    inside = types.ForwardBackwardInput(
        data=[client_datum], loss_fn="stable_reinforce", loss_fn_config={"kl_coeff": 0.5}
    )
    client_request = types.ForwardBackwardRequest(forward_backward_input=inside, model_id="m", seq_id=1)
    body = conversion.forward_backward_request_to_proto(client_request).SerializeToString()
    (read_datum,) = wire.train_request_of_protobuf(body, 10).data
    assert read_datum.token_spans == [ProvenanceSpan("a", 0, 2, False), ProvenanceSpan("a", 0, 1, True)]
    assert read_datum.target_spans == [ProvenanceSpan("a", 1, 1, False), ProvenanceSpan("a", 0, 2, True)]
    assert wire.train_request_of_protobuf(body + b"\x1a\x04\x1a\x00\x22\x00", 10).problem is not None


def test_model_trains_on_samples_of_its_session(tmp_path) -> None:
    conversion = pytest.importorskip("tinker.proto.request_conv", reason="the client needs Python 3.11")
    from tinker import types

    with served(tmp_path / "storage") as server:
        model, elsewhere = server.alice.model(), server.alice.model()
        session = model.partition(":")[0]
        sampler = server.alice.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1})
        body = {
            "sampling_session_id": sampler.json()["sampling_session_id"], "seq_id": 1, "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}, "sampling_params": {"max_tokens": 2},
        }  # fmt: skip
        names = {}
        for recorded in (True, False):
            body |= {"seq_id": body["seq_id"] + 1, "record_stability_info": recorded}
            promised = server.alice.post("asample", body).json()
            assert server.alice.fetch(promised["request_id"])["sequences"][1]["tokens"] == [6, 7]
            names[recorded] = promised["sample_sequence_ids"][1]

        def learned(subject: str, sequence: str) -> dict:
            prompt = types.PromptProvenanceSpan(sequence_id=sequence, length=3)
            inputs = {"target_tokens": [4, 5, 6, 7], "advantages": [0.0, 0.0, 1.0, 1.0]}
            client_datum = types.Datum(model_input=types.ModelInput.from_ints([*PROMPT, 6]), loss_fn_inputs=inputs)
            client_datum = client_datum.with_provenance(
                model_input=[prompt, types.SampledProvenanceSpan(sequence_id=sequence, length=1)],
                loss_fn_inputs=[
                    types.PromptProvenanceSpan(sequence_id=sequence, offset=1, length=2),
                    types.SampledProvenanceSpan(sequence_id=sequence, length=2),
                ],
            )
            inside = types.ForwardBackwardInput(data=[client_datum], loss_fn="stable_reinforce")
            numbers[subject] = numbers.get(subject, 0) + 1
            client_request = types.ForwardBackwardRequest(
                forward_backward_input=inside, model_id=subject, seq_id=numbers[subject]
            )
            content = conversion.forward_backward_request_to_proto(client_request).SerializeToString()
            response = server.alice.client.post(
                "/api/v1/forward_backward",
                content=content,
                headers={**server.alice.headers, "content-type": wire.PROTOBUF},
            )
            return server.alice.fetch(response.json()["request_id"])

        numbers: dict[str, int] = {}
        assert learned(model, names[True])["metrics"]["loss:sum"] == 6 + 7  # the prompt's tokens have weight 0
        assert "no sequence" in learned(model, names[False])["error"]
        assert "no sequence" in learned(elsewhere, names[True])["error"]
        server.tick(301)
        assert not server.service.sequences._sequences  # its session has ended


def test_the_ratio_of_gspo_is_that_of_the_masks_tokens() -> None:
    masked = datum(logprobs=[0.0] * 6, sequence_ratio_mask=[0, 0, 1, 1, 1, 1])
    (sample,) = samples_of(masked, loss_of("gspo", {}))
    assert sample.weights.tolist() == [0, 0, 1, 1, 1, 1]
    for wrong in ([0, 0, 0, 1, 1, 1], [1.0]):
        with pytest.raises(DataError, match="sequence_ratio_mask"):
            samples_of(datum(logprobs=[0.0] * 6, sequence_ratio_mask=wrong), loss_of("gspo", {}))
    with pytest.raises(DataError, match="unknown"):
        samples_of(masked, loss_of("ppo", {}))
