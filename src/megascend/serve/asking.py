"""Requests that are answered with a future: from their path and body to what the service does, now or repeated by a restart."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from megascend.serve import saving, training
from megascend.serve.bodies import CreateModel
from megascend.serve.scheduler.futures import Future
from megascend.serve.service import Service
from megascend.serve.wire import number_of

Ask = Callable[[Service, str, Mapping[str, Any]], Future]


def settled(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body that says what chance would decide otherwise, so that repeated it gives the same."""
    lora = body.get("lora_config")
    if path == "create_model" and isinstance(lora, dict) and lora.get("seed") is None:
        return {**body, "lora_config": {**lora, "seed": secrets.randbelow(2**31)}}
    return body


def number_in(path: str, body: Mapping[str, Any]) -> int | None:
    """The number of a model's request; None for one that makes a model."""
    makes = path == "create_model" or (path == "load_weights" and body.get("session_id") is not None)
    return None if makes else number_of(body.get("seq_id"))


def create_model(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """A new adapter from nothing."""
    session = service.tenancy.session(body.get("session_id"), tenant)
    return service.create_model(session, CreateModel.read(body))


def unload_model(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """Remove a model."""
    return service.unload(service.tenancy.model(body.get("model_id"), tenant))


def optim_step(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """A step of the optimizer."""
    model = service.tenancy.model(body.get("model_id"), tenant)
    settings = body.get("adam_params") or body.get("optimizer_params") or body.get("optim_params") or {}
    settings = settings if isinstance(settings, dict) else {"learning_rate": settings}
    return training.optim_step(service, model, number_of(body.get("seq_id")), settings)


def save_weights(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """A checkpoint to train on from."""
    return saving.save(service, service.tenancy.model(body.get("model_id"), tenant), body, "weights")


def save_weights_for_sampler(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """A checkpoint to sample from."""
    return saving.save(service, service.tenancy.model(body.get("model_id"), tenant), body, "sampler_weights")


def load_weights(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """A new model from a checkpoint; for older clients, a checkpoint in a model's place."""
    if body.get("session_id") is not None:
        return saving.load_new(service, service.tenancy.session(body["session_id"], tenant), body)
    return saving.load_into(service, service.tenancy.model(body.get("model_id"), tenant), body)


BY_PATH: Mapping[str, Ask] = {
    "create_model": create_model,
    "unload_model": unload_model,
    "optim_step": optim_step,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "load_weights": load_weights,
}
