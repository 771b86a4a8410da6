"""An OpenAPI description of the service's routes, written by hand from what clients send: the server publishes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PROTOBUF = "application/x-protobuf"

Schema = dict[str, Any]


def obj(required: Sequence[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def array(items: Schema, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string", "maxLength": 40}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**40}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
TOKENS = array({"type": "integer", "minimum": -2, "maximum": 120}, 8)
PROMPT = obj(["chunks"], chunks=array(obj(["tokens"], type={"const": "encoded_text"}, tokens=TOKENS), 3))
TENSOR = obj(
    ["data", "dtype"],
    data=array(NUMBER, 8),
    dtype={"enum": ["int64", "float32"]},
    shape=maybe(array(COUNT, 3)),
    sparse_crow_indices=maybe(array(COUNT, 4)),
    sparse_col_indices=maybe(array(COUNT, 4)),
)
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce"]
INPUTS = obj(["target_tokens"], target_tokens=TENSOR, weights=TENSOR, advantages=TENSOR, logprobs=TENSOR)
TRAIN = obj(
    ["data", "loss_fn"],
    data=array(obj(["model_input", "loss_fn_inputs"], model_input=PROMPT, loss_fn_inputs=INPUTS), 3),
    loss_fn={"anyOf": [{"enum": LOSSES}, TEXT]},
    loss_fn_config=maybe({"type": "object", "additionalProperties": NUMBER, "maxProperties": 3}),
)
ADAM = obj(
    [],
    type={"enum": ["adamw", "adam", "sgd"]},
    learning_rate=NUMBER,
    beta1=NUMBER,
    beta2=NUMBER,
    eps=NUMBER,
    weight_decay=NUMBER,
)
LORA = obj(
    ["rank"],
    rank={"type": "integer", "minimum": 0, "maximum": 70},
    seed=maybe(COUNT),
    train_mlp=FLAG,
    train_attn=FLAG,
    train_unembed=FLAG,
)
SAMPLING = obj(
    [],
    max_tokens=COUNT,
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=NUMBER,
    seed=maybe(COUNT),
    stop=maybe(array({"anyOf": [TEXT, COUNT]}, 3)),
)
FUTURE = obj(["request_id"], request_id={"type": "string"})
CHECKPOINT = obj(
    ["checkpoint_id", "checkpoint_type", "tinker_path", "size_bytes", "public"], size_bytes=COUNT, public=FLAG
)
CURSOR = obj(["offset", "limit", "total_count"], offset=COUNT, limit=COUNT, total_count=COUNT)
RUN = obj(["training_run_id", "base_model", "is_lora", "lora_rank"], lora_rank=COUNT)
REFUSED = obj(["detail", "category"], detail={"type": "string"}, category={"enum": ["user", "server"]})


def operations(ids: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], tuple[Schema | None, Schema | None]]:
    """Return (body, answer) by method and path under /api/v1, None for none.

    Args:
        known: by kind, names that the server has.
    """

    def name(kind: str) -> Schema:
        return {"anyOf": [{"enum": list(ids[kind])}, TEXT]}

    session, model, path, sampler = (name(kind) for kind in ("session", "model", "path", "sampler"))
    save = obj(
        ["model_id"], model_id=model, path=maybe(TEXT), seq_id=maybe(COUNT), ttl_seconds=maybe(COUNT), overwrite=FLAG,
        sampling_session_seq_id=maybe(COUNT), kind=TEXT,
    )  # fmt: skip
    load = obj(
        ["path"],
        session_id=session,
        model_id=model,
        model_seq_id=COUNT,
        path=path,
        optimizer=FLAG,
        seq_id=maybe(COUNT),
    )
    create = obj(
        ["session_id", "model_seq_id", "base_model", "lora_config"], session_id=session, model_seq_id=COUNT,
        base_model={"enum": ["tiny", "other"]}, lora_config=LORA, user_metadata=maybe({"type": "object", "maxProperties": 3}),
    )  # fmt: skip
    sample = obj(
        ["prompt", "sampling_params"], sampling_session_id=maybe(sampler), model_path=maybe(path), prompt=PROMPT,
        sampling_params=SAMPLING, num_samples=COUNT, seq_id=maybe(COUNT), prompt_logprobs=FLAG, topk_prompt_logprobs=COUNT,
        topk_sample_logprobs=COUNT, prompt_alt_tokens_k=COUNT, target_prompt_logprobs=maybe(TENSOR), record_stability_info=FLAG,
    )  # fmt: skip
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    entries: Schema = {"type": "array", "items": CHECKPOINT}
    target = obj(["sampling_session_id"], sampling_session_id=sampler, cloned_sampler_id=COUNT)
    return {
        ("POST", "client/config"): (obj(), obj(["proto_compress_fwdbwd"])),
        ("POST", "client/dynamic_config"): (obj(), obj(["refresh_interval_sec"])),
        ("POST", "telemetry"): (obj([], events=array(obj())), obj(["status"])),
        ("GET", "get_server_capabilities"): (None, obj(["supported_models"])),
        ("POST", "create_session"): (obj([], tags=array(TEXT), user_metadata=maybe(obj())), obj(["session_id"])),
        ("POST", "session_heartbeat"): (obj(["session_id"], session_id=session), obj(["type"])),
        ("POST", "create_model"): (create, FUTURE),
        ("POST", "get_info"): (obj(["model_id"], model_id=model), obj(["model_id", "lora_rank", "model_data"])),
        ("POST", "forward_backward"): (
            obj(["model_id"], model_id=model, seq_id=maybe(COUNT), forward_backward_input=TRAIN), FUTURE,
        ),
        ("POST", "forward"): (obj(["model_id"], model_id=model, seq_id=maybe(COUNT), forward_input=TRAIN), FUTURE),
        ("POST", "optim_step"): (obj(["model_id"], model_id=model, seq_id=maybe(COUNT), adam_params=ADAM), FUTURE),
        ("POST", "save_weights"): (save, FUTURE),
        ("POST", "save_weights_for_sampler"): (save, FUTURE),
        ("POST", "load_weights"): (load, FUTURE),
        ("POST", "weights_info"): (obj(["tinker_path"], tinker_path=path), obj(["base_model", "lora_rank"])),
        ("POST", "create_sampling_session"): (
            obj(
                ["session_id", "sampling_session_seq_id"], session_id=session, sampling_session_seq_id=COUNT,
                model_path=maybe(path),
            ),
            obj(["sampling_session_id"]),
        ),
        ("POST", "join_sampling_session"): (obj(["sampling_session_id"], sampling_session_id=sampler), obj(["client_counter"])),
        ("GET", "samplers/{sampler}"): (None, obj(["sampler_id", "base_model"])),
        ("POST", "asample"): (sample, FUTURE),
        ("POST", "retrieve_future"): (obj(["request_id"], request_id=name("future")), obj()),
        ("POST", "retrieve_futures"): (
            obj(["target"], target=target, prev_cursor=COUNT, timeout=maybe(NUMBER), retrieved_request_ids=array(TEXT)),
            obj(["completions", "cursor"], completions={"type": "array"}, cursor={"type": "integer", "minimum": 0}),
        ),
        ("POST", "cancel_future"): (obj(["request_id"], request_id=name("future")), None),
        ("GET", "training_runs"): (
            None, obj(["training_runs", "cursor"], training_runs={"type": "array", "items": RUN}, cursor=CURSOR),
        ),
        ("GET", "training_runs/{model}"): (None, RUN),
        ("GET", "training_runs/{model}/checkpoints"): (None, obj(["checkpoints"], checkpoints=entries)),
        ("GET", "checkpoints"): (None, obj(["checkpoints", "cursor"], checkpoints=entries, cursor=CURSOR)),
        ("POST", f"{checkpoint}/publish"): (obj(), None),
        ("DELETE", f"{checkpoint}/publish"): (None, None),
        ("PUT", f"{checkpoint}/ttl"): (obj([], ttl_seconds=maybe(COUNT)), None),
        ("GET", f"{checkpoint}/archive"): (None, None),
        ("DELETE", checkpoint): (None, None),
        ("GET", "sessions"): (None, obj(["sessions"], sessions={"type": "array", "items": {"type": "string"}})),
        ("GET", "sessions/{session}"): (None, obj(["training_run_ids", "sampler_ids"])),
        ("POST", "unload_model"): (obj(["model_id"], model_id=model), FUTURE),
        ("POST", "sessions/{session}/finish"): (obj(), None),
    }  # fmt: skip


def description(ids: Mapping[str, Sequence[str]]) -> Schema:
    """Build the OpenAPI document."""
    paths: dict[str, Schema] = {}
    for (method, path), (body, answer) in operations(ids).items():
        operation: Schema = {"responses": {"4XX": _content(REFUSED)}}
        if path.endswith("/archive"):
            operation["responses"]["200"] = {"description": "", "content": {"application/gzip": {}}}
        else:
            operation["responses"]["204" if answer is None else "200"] = _content(answer)
        if path == "retrieve_future":
            operation["responses"]["408"] = _content(obj(["type", "request_id"], type={"const": "try_again"}))
        parameters = [
            {"name": part, "in": "path", "required": True, "schema": {"anyOf": [{"enum": list(ids[part])}, TEXT]}}
            for part in ("model", "session", "sampler", "kind", "name")
            if f"{{{part}}}" in path
        ]
        if answer is not None and "cursor" in answer["required"] and method == "GET":
            parameters += [{"name": part, "in": "query", "schema": COUNT} for part in ("offset", "limit")]
        if parameters:
            operation["parameters"] = parameters
        if body is not None:
            operation["requestBody"] = {"required": True, **_content(body)}
            if path == "forward_backward":
                operation["requestBody"]["content"][PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
        paths.setdefault(f"/api/v1/{path}", {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "megascend serve", "version": "1"}, "paths": paths}


def _content(schema: Schema | None) -> Schema:
    return {"description": "", **({} if schema is None else {"content": {"application/json": {"schema": schema}}})}
