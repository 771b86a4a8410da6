"""Routes about training runs, checkpoints and sessions: listing, publishing, deleting, downloading."""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megascend.apps.serve.api.bodies import KeepFor, WeightsInfo
from megascend.apps.serve.api.guard import Json
from megascend.apps.serve.api.reading import read_json
from megascend.apps.serve.checkpoints import CheckpointPath, CheckpointRecord
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.service import Service
from megascend.apps.serve.tenancy import Model

MAX_DOWNLOADS = 4
"""Concurrent downloads per tenant: each holds a temporary file until its client has read it."""
MAX_PAGE = 1000
"""Most entries of one listing, whatever limit a client asks for."""

Handler = Callable[[Service, Request, str], Awaitable[Response]]
"""(service, request, tenant) -> response."""


def pack(directory: Path) -> IO[bytes]:
    """Pack the regular files of a directory (tar, gzip): no links, which could point elsewhere, and no directories.

    Owners and permissions of this machine are left out.

    Returns:
        An anonymous temporary file, positioned at its end.
    """
    packed = tempfile.TemporaryFile(suffix=".tar.gz")  # noqa: SIM115  the answer reads it
    # Level 1: weights hardly compress, and higher levels take minutes for large adapters.
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for file in sorted(directory.iterdir()):
            if file.is_file() and not file.is_symlink():
                tar.add(file, file.name, recursive=False, filter=_plain)
    return packed


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Strip owner and mode; return None to skip all but files, which tarfile calls links if they are repeated hard links."""
    if not (entry.isfile() or entry.islnk()):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def catalogue_routes() -> list[tuple[str, str, Handler]]:
    """List the routes as (method, path under /api/v1, handler)."""
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    return [
        ("POST", "weights_info", weights_info),
        ("GET", "training_runs", list_runs),
        ("GET", "training_runs/{model}", get_run),
        ("GET", "training_runs/{model}/checkpoints", list_run_checkpoints),
        ("GET", "checkpoints", list_checkpoints),
        ("DELETE", checkpoint, delete),
        ("POST", f"{checkpoint}/publish", publish),
        ("DELETE", f"{checkpoint}/publish", unpublish),
        ("PUT", f"{checkpoint}/ttl", keep_for),
        ("GET", f"{checkpoint}/archive", archive),
        ("GET", "sessions", list_sessions),
        ("GET", "sessions/{session}", get_session),
        ("POST", "sessions/{session}/finish", finish_session),
    ]


def _path(request: Request) -> CheckpointPath:
    values = request.path_params
    return CheckpointPath(values["model"], values["kind"], values["name"])


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": record.path.checkpoint_id,
        "checkpoint_type": "training" if record.path.kind == "weights" else "sampler",
        "time": _iso_time(record.saved),
        "tinker_path": str(record.path),
        "size_bytes": record.size,
        "public": record.public,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires is None else _iso_time(record.expires),
    }


def _checkpoints(service: Service, tenant: str, model: str | None = None) -> list[dict[str, Any]]:
    return [_checkpoint(record) for record in service.checkpoints.list_records(tenant, model)]


def _page(request: Request) -> tuple[int, int]:
    """Return (offset, limit) of a listing."""
    numbers = []
    for name, default in (("offset", "0"), ("limit", "20")):
        value = request.query_params.get(name, default)
        if not value.isascii() or not value.isdecimal() or len(value) > 9:
            raise RequestRefusedError(f"{name} must be a number from 0 on", 422)
        numbers.append(int(value))
    return numbers[0], min(numbers[1], MAX_PAGE)


async def weights_info(service: Service, request: Request, tenant: str) -> Response:
    path = CheckpointPath.parse(WeightsInfo.read(await read_json(request)).tinker_path)
    record, _ = await service.in_thread(tenant, partial(service.checkpoints.find, tenant, path, public=True))
    return Json({
        "base_model": record.base_model, "is_lora": True, "lora_rank": record.rank, "train_unembed": record.output,
        "train_mlp": record.mlp, "train_attn": record.attention,
    })  # fmt: skip


def _run(service: Service, model: Model, tenant: str) -> dict[str, Any]:
    checkpoints = _checkpoints(service, tenant, model.name)
    last = {
        kind: next((c for c in checkpoints if c["checkpoint_type"] == kind), None) for kind in ("training", "sampler")
    }
    ago = service.clock() - model.used
    return {
        "training_run_id": model.name,
        "base_model": service.base.names[0],
        "model_owner": tenant,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "corrupted": False,
        "last_request_time": _iso_time(datetime.now(timezone.utc).timestamp() - ago),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": model.metadata,
    }


async def list_runs(service: Service, request: Request, tenant: str) -> Response:
    offset, limit = _page(request)
    models = [model for model in service.tenancy.models.values() if model.tenant == tenant]
    page = models[offset : offset + limit]
    runs = await service.in_thread(tenant, lambda: [_run(service, model, tenant) for model in page])
    return Json({"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(models)}})


async def get_run(service: Service, request: Request, tenant: str) -> Response:
    model = service.tenancy.model(request.path_params["model"], tenant)
    return Json(await service.in_thread(tenant, _run, service, model, tenant))


async def list_run_checkpoints(service: Service, request: Request, tenant: str) -> Response:
    model = request.path_params["model"]
    return await service.in_thread(tenant, lambda: Json({"checkpoints": _checkpoints(service, tenant, model)}))


async def list_checkpoints(service: Service, request: Request, tenant: str) -> Response:
    offset, limit = _page(request)
    checkpoints = await service.in_thread(tenant, _checkpoints, service, tenant)
    cursor = {"offset": offset, "limit": limit, "total_count": len(checkpoints)}
    return Json({"checkpoints": checkpoints[offset : offset + limit], "cursor": cursor})


async def delete(service: Service, request: Request, tenant: str) -> Response:
    await service.in_thread(tenant, service.checkpoints.delete, tenant, _path(request))
    return Response(status_code=204)


async def publish(service: Service, request: Request, tenant: str) -> Response:
    await _change(service, request, tenant, public=True)
    return Response(status_code=204)


async def unpublish(service: Service, request: Request, tenant: str) -> Response:
    await _change(service, request, tenant, public=False)
    return Response(status_code=204)


async def keep_for(service: Service, request: Request, tenant: str) -> Response:
    """Set the lifetime of a checkpoint, from now on."""
    seconds = KeepFor.read(await read_json(request)).ttl_seconds
    expires = None if seconds is None else time.time() + seconds
    await _change(service, request, tenant, expires=expires)
    return Response(status_code=204)


async def _change(service: Service, request: Request, tenant: str, **values: Any) -> None:
    await service.in_thread(tenant, partial(service.checkpoints.change, tenant, _path(request), **values))


async def archive(service: Service, request: Request, tenant: str) -> Response:
    """Answer with the checkpoint's files as one archive (tar, gzip)."""
    find = partial(service.checkpoints.find, tenant, _path(request), public=True)
    record, directory = await service.in_thread(tenant, find)
    if service.downloads[tenant] >= MAX_DOWNLOADS:
        raise RequestRefusedError(f"{MAX_DOWNLOADS} of your archives are being sent; wait for one to finish", 429)
    download = ExitStack()
    service.downloads[tenant] += 1
    download.callback(service.downloads.subtract, [tenant])
    try:
        # The tenant's own turn first: its second archive must not wait in the place of another tenant's.
        async with service.packing_turns[tenant], service.packing:
            packed = download.enter_context(await asyncio.to_thread(pack, directory))
        headers = {"content-disposition": f'attachment; filename="{record.path.name}.tar.gz"'}
        headers["content-length"] = str(packed.seek(0, 2))
        packed.seek(0)
    except BaseException:  # cancellation, too
        download.close()
        raise
    parts = iter(partial(packed.read, 2**18), b"")
    # The response owns the resources now: the handler returns long before the archive has been sent.
    return _Download(download, parts, headers)


class _Download(StreamingResponse):
    """Response that streams an archive and frees its resources at the end or when the client disconnects."""

    def __init__(self, resources: ExitStack, parts: Iterator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(parts, media_type="application/gzip", headers=headers)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            await super().__call__(scope, receive, send)


async def list_sessions(service: Service, request: Request, tenant: str) -> Response:
    offset, limit = _page(request)
    names = [session.name for session in service.tenancy.sessions.values() if session.tenant == tenant]
    return Json({"sessions": names[offset : offset + limit]})


async def get_session(service: Service, request: Request, tenant: str) -> Response:
    session = service.tenancy.session(request.path_params["session"], tenant)
    return Json({
        "training_run_ids": session.models, "sampler_ids": list(session.samplers), "user_metadata": session.metadata,
    })  # fmt: skip


async def finish_session(service: Service, request: Request, tenant: str) -> Response:
    service.end_session(service.tenancy.session(request.path_params["session"], tenant))
    return Response(status_code=204)
