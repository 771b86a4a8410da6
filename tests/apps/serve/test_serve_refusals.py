"""Requests that are refused as their sender's fault, with the words that say why; none of them reaches the ranks."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from recording_backend import Served, served, train_body
from tinker import types

TOKENS = {"type": "encoded_text", "tokens": [1, 2, 3]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("forward_backward", train_body("", None, 5, 6, weights=[1.0, 1.0])),
    "ppo": ("forward_backward", train_body("", None, 5, loss="ppo", logprobs=[-1.0], advantages=[1.0])),
    "step": ("optim_step", {"model_id": "", "seq_id": None}),
    "save": ("save_weights", {"model_id": "", "seq_id": None, "path": "one"}),
    "sample": ("asample", {"prompt": {"chunks": [TOKENS]}, "sampling_params": {"max_tokens": 1}, "num_samples": 1}),
    "poll": ("retrieve_futures", {"target": {"sampling_session_id": "none"}}),
}
DATUM = "forward_backward_input.data.0"
TARGETS, WEIGHTS = f"{DATUM}.loss_fn_inputs.target_tokens", f"{DATUM}.loss_fn_inputs.weights"
CONFIG = "forward_backward_input.loss_fn_config"
DENSE = {"data": [7, -1, 5, 6], "dtype": "int64", "shape": [2, 2]}
SPARSE = {
    "data": [4, 9],
    "dtype": "int64",
    "shape": [2, 50],
    "sparse_crow_indices": [0, 0, 2],
    "sparse_col_indices": [3, 40],
}
WIDE = {"data": [], "dtype": "int64", "shape": [1, 2**23], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}
BOMBS = {f"t{number}": WIDE for number in range(50)}
NOT_FINITE = (None, math.nan, math.inf, -math.inf)
"""Numbers that train nothing; the client sends the others as null in JSON."""

REFUSED: list[tuple[str, str, Any, str]] = [
    # numpy takes texts and true for numbers, and gives every number the bytes of a long text beside it.
    ("train", f"{TARGETS}.data", [True, 5], "expected integers, got bool"),
    ("train", f"{TARGETS}.data", ["x" * 50_000, *[5] * 4000], "expected integers, got str"),
    ("train", f"{TARGETS}.data", [2**64 - 100, 5], "too large"),
    ("train", f"{TARGETS}.data", {"5": 6}, "a list of numbers is expected, got dict"),
    ("train", f"{TARGETS}.data", [[5, 6], [7]], "must have the same length"),
    ("train", f"{WEIGHTS}.data", ["1", 1.0], "expected numbers, got str"),
    ("train", f"{WEIGHTS}.data", [True, 1.0], "expected numbers, got bool"),
    ("train", f"{WEIGHTS}.data", [None, 1.0], "must be finite"),
    ("train", f"{WEIGHTS}.data", [math.nan, 1.0], "must be finite"),
    ("train", f"{WEIGHTS}.data", [1e39, 1.0], "must be finite"),
    ("train", f"{WEIGHTS}.data", [1.0], "the same shape"),
    ("train", f"{DATUM}.loss_fn_inputs.advantages", {"data": [1.0, 1.0], "dtype": "float32"}, "'advantages' is unknown"),
    ("train", "forward_backward_input.loss_fn", "ppo", "'logprobs' is missing"),
    ("train", "forward_backward_input.loss_fn", "stable_reinforce", "needs the provenance"),
    ("train", "forward_backward_input.loss_fn", "__import__", "not supported"),
    # A sparse tensor of a few bytes must not grow.
    ("train", f"{DATUM}.loss_fn_inputs", BOMBS, "have more than"),
    ("train", f"{DATUM}.loss_fn_inputs", {"t": {**WIDE, "shape": ["x", 1]}}, "cannot be read: ValueError"),
    ("train", f"{DATUM}.loss_fn_inputs", {"t": {**WIDE, "shape": 5}}, "cannot be read: TypeError"),
    ("train", f"{DATUM}.loss_fn_inputs", {"t": {**WIDE, "data": {}}}, "a list of numbers is expected, got dict"),
    *(
        (kind, f"{place}.chunks.0.tokens", tokens, "list of integers|list of numbers|expected integers|same length")
        for kind, place in (("train", f"{DATUM}.model_input"), ("sample", "prompt"))
        for tokens in ([[1, 2], [3, 4]], [[]], 5, "12", [1.5], [None], [True], [[1], 2])
    ),
    *(("ppo", CONFIG, config, "must be a number") for config in (0, False, [], "", {"clip_low_threshold": None})),
    ("ppo", CONFIG, {"self": 1.0}, "no setting 'self'"),
    ("ppo", CONFIG, {"kl_coeff": -(10**400)}, "out of range"),
    *(
        ("ppo", CONFIG, {f"clip_{side}_threshold": value}, f"clip_{side}")
        for side in ("low", "high")
        for value in (*NOT_FINITE, 10**400)
    ),
    *(
        ("step", f"adam_params.{name}", value, "number|greater than")
        for name in types.AdamParams.model_fields
        for value in NOT_FINITE
        if (name, value) != ("grad_clip_norm", -math.inf)  # below 0: not clipped
    ),
    ("step", "adam_params.learning_rate", "1", "learning_rate"),
    ("step", "adam_params.learning_rate", 10**400, "lr: .*finite"),
    ("step", "adam_params.beta1", 1.0, r"betas\.0"),
    ("step", "adam_params.beta2", True, "beta2"),
    ("step", "adam_params.eps", 0, "eps"),
    ("step", "adam_params.type", "dimuon", "'dimuon' is not supported"),
    *(("step", name, None, "learning_rate") for name in ("adam_params", "optimizer_params", "optim_params")),
    *(("step", "seq_id", number, "seq_id") for number in (0, -1, 2**70, "1", True, 1.5)),
    ("save", "ttl_seconds", 2**61, "ttl_seconds"),
    *(("poll", "timeout", seconds, "timeout") for seconds in (math.nan, math.inf, "1")),
    # What ranks could not look for, or what would grow.
    *(
        ("sample", "sampling_params.stop", stop, "stop")
        for stop in (5, {"a": 1}, 1.5, True, [None], ["\ud800"], ["x" * 1025], ["a"] * 65)
    ),
    *(
        ("sample", name, value, name)
        for name in ("num_samples", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        for value in NOT_FINITE
    ),
    ("sample", "sampling_params.top_k", 2.5, "top_k: .*whole number.*2.5"),
    ("sample", "sampling_params.seed", 0.1, "seed: .*whole number.*0.1"),
    ("sample", "sampling_params.max_tokens", 2**40, "exceed the maximum length 512"),
    ("sample", "target_prompt_logprobs", {**SPARSE, "data": [4.5, 9.0]}, "expected integers, got float"),
    ("sample", "target_prompt_logprobs", {**DENSE, "data": [7, 8, 5, 6.5]}, "expected integers, got float"),
    ("sample", "target_prompt_logprobs", {**SPARSE, "shape": [2, 2**22]}, "at most 1048576 values"),
    ("sample", "target_prompt_logprobs", {**DENSE, "shape": [4]}, r"\[prompt - 1, k\]"),
    ("sample", "target_prompt_logprobs", {**DENSE, "dtype": "float32"}, "an int64 tensor is expected"),
    ("sample", "target_prompt_logprobs", "all", "an int64 tensor is expected"),
    ("sample", "topk_prompt_logprobs", 2**40, "top-k log-probabilities of all positions"),
    ("sample", "topk_sample_logprobs", 2**40, "top-k log-probabilities of all positions"),
    ("sample", "num_samples", 2**30, "from 1 to 1024"),
    ("sample", "prompt.chunks.0.tokens", [1] * 600, "exceed the maximum length 512"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("storage")) as server:
        yield server
        assert {call[0] for call in server.backend.calls} <= {"add", "remove", "discard"}
        assert server.backend.sampled == []


@pytest.mark.parametrize(("kind", "place", "value", "reason"), REFUSED)
def test_request_is_refused_as_its_senders_fault(
    server: Served, kind: str, place: str, value: Any, reason: str
) -> None:
    route, body = copy.deepcopy(BODIES[kind])
    if "model_id" in body:
        body["model_id"] = server.alice.model()
    *outer, last = place.split(".")
    part: Any = body
    for name in outer:
        part = part[int(name)] if isinstance(part, list) else part.setdefault(name, {})
    part[last] = value
    answer = server.alice.post(route, content=json.dumps(body).encode()).json()
    if "request_id" in answer:
        answer = server.alice.fetch(answer["request_id"])
    if "model_id" in body:
        server.alice.ask("unload_model", {"model_id": body["model_id"]})
    assert answer["category"] == "user"
    assert re.search(reason, answer.get("error") or answer["detail"])
