"""Settings of ``megascend serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from megascend.config import Seconds, Section, Size, parsed, read_settings
from megascend.config.data import ImageLimits
from megascend.config.rules import Rule
from megascend.config.training import ModelSettings

DURABLE_BODY_BYTES = 2**27
"""SQLite takes rows of up to 10**9 bytes, and a body may be several times as long when stored as JSON."""


class RequestImages(ImageLimits):
    """Limits of the images in requests, for a served model that takes them."""

    setting: ClassVar[str] = "images"

    max_total_pixels: Size = Field(2**28, description="most pixels of all images of a request")


class Limits(Section):
    """Limits of one request, one model and one tenant. Requests beyond them are refused, or answered with 429."""

    body_bytes: Size = Field(64 * 2**20, description="largest body of a request, decompressed")
    samples: Size = Field(
        4096, description="most samples of one request; of targets [n, k], 16 times as many columns in all"
    )
    pending: Size = Field(256, description="unfinished requests of one model; one more is answered with 429")
    tokens: Size = Field(2**24, description="tokens of one tenant's unfinished requests; more are answered with 429")
    answer_bytes: Size = Field(
        2**28,
        description="bytes of one tenant's stored answers; fetched ones are dropped first, then requests are answered with 429",
    )
    models: Size = Field(16, description="models of one tenant at a time")
    sessions: Size = Field(256, description="sessions of one tenant at a time")
    samplers: Size = Field(
        4,
        description="saved adapters of max_samplers that are loaded for one tenant at a time; one more replaces another or waits",
    )
    requests: Size = Field(
        1024, description="requests of one tenant being read or waiting for an answer; one more is answered with 429"
    )
    storage_bytes: Size = Field(
        2**40, description="bytes of one tenant's checkpoints; a save beyond them is removed, and fails"
    )


class ServeConfig(ModelSettings):
    """Settings of ``megascend serve``, from its YAML file and its options."""

    name: str | None = Field(
        None, description="name under which clients may request the model (base_model), besides the directory's path"
    )
    storage: Path = Field(Path("runs/serve"), description="directory of the checkpoints that clients save")
    host: str = Field(
        "127.0.0.1", description="address to listen on; 0.0.0.0: all, which should be behind TLS or a proxy"
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    keys: Path | None = Field(None, description="file with lines NAME SHA256-OF-KEY, in addition to MEGASCEND_API_KEYS")
    tls_certificate: Path | None = Field(None, description="PEM file; with tls_key, the server uses HTTPS")
    tls_key: Path | None = Field(None, description="PEM file with the private key of tls_certificate")
    proxies: list[str] = Field(
        [], description="addresses of proxies whose X-Forwarded-For is trusted for the audit log"
    )
    engine: str = Field("megatron", description="training engine: megatron, fsdp or single")
    max_models: Size = Field(64, description="models (adapters) of all tenants at a time")
    max_samplers: Size = Field(
        8, description="saved adapters that the ranks load for sampling at a time, in addition to max_models"
    )
    vllm: list[str] = Field(
        [],
        description="vLLM servers for sampling, http://HOST:PORT each; default: the ranks sample, alternating with training",
    )
    max_rank: Size = Field(64, description="largest LoRA rank")
    alpha: float = Field(32.0, gt=0, description="LoRA's alpha; clients do not send one")
    unembed: bool = Field(True, description="adapt the output layer if a client requests it and its weight is not tied")
    window_ms: float = Field(
        5.0, ge=0, description="time that a request waits for those of other models to share its batch"
    )
    batch_tokens: Size = Field(65536, description="most tokens of one batch of several models")
    session_timeout_s: Seconds = Field(
        300, description="an idle session ends after this time, and its models are removed"
    )
    gap_timeout_s: Seconds = Field(120, description="a step fails if one of its requests is missing for this time")
    answer_s: Seconds = Field(3600, description="time that an unfetched answer is kept")
    log: Literal["requests", "none"] = Field(
        "requests", description="requests: record every request's tenant and call in audit.jsonl, in storage"
    )
    durable: bool = Field(
        False,
        description="keep the service's state in storage: a restarted server fulfils the requests that were accepted",
    )
    durable_steps: Size = Field(
        20, description="with durable, optimizer steps of a model between its saves; a restart repeats about that many"
    )
    limits: Limits = Limits()
    images: RequestImages = RequestImages()

    rules = (
        Rule(
            "tls_key with no tls_certificate: the server would speak plain HTTP; set tls_certificate",
            lambda s: s.tls_key is not None and s.tls_certificate is None,
        ),
        Rule(
            f"limits.body_bytes with durable: at most {DURABLE_BODY_BYTES} can be stored; lower it",
            lambda s: s.durable and s.limits.body_bytes > DURABLE_BODY_BYTES,
        ),
    )


def load_serve_config(path: Path | None, values: dict[str, Any], overrides: list[str] | None = None) -> ServeConfig:
    """Read settings from a YAML file, if any; ``a.b=value`` overrides and then ``values`` of the command's options win."""
    settings = read_settings(path, overrides, ServeConfig)
    # Merged key by key: --tensor alone must not reset the file's other parallel sizes.
    parallel = {**(settings.get("parallel") or {}), **values.get("parallel", {})}
    # Options of the command take precedence over --set, which takes precedence over the file.
    settings |= values
    if parallel:
        settings["parallel"] = parallel
    return parsed(ServeConfig, settings, path or "megascend serve")
