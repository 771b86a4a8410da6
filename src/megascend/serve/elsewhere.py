"""Routes that clients know and this server does not have: the answer names what is missing, and what there is in its place."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from megascend.serve.errors import RequestRefusedError
from megascend.serve.guard import Handler

ABSENT = {
    ("POST", "auth/token"): "exchanging keys for tokens; every request carries the API key",
    ("GET", "auth/apikey/me"): "looking up an API key; keys are in the server's settings",
    ("DELETE", "auth/apikey/me"): "revoking an API key; keys are in the server's settings",
    ("GET", "audit"): "reading the audit log; it is a file beside the checkpoints, for who runs the server",
    ("GET", "billing/usage/events"): "billing",
    ("GET", "billing/usage/checkpoints/current"): "billing; listings of checkpoints have their sizes",
    ("POST", "billing/usage/checkpoints/current"): "billing; listings of checkpoints have their sizes",
    ("POST", "create_custom_loss"): "uploading a loss; forward_backward_custom computes it in the client",
    ("POST", "copy_weights"): "copying checkpoints; load one that is published, and save it",
    ("POST", "save_weights_external"): "saving in other formats; checkpoints are in that of peft (archive)",
    ("GET", "training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls"): "signed addresses; use archive",
    ("PUT", "sessions/{session}/project"): "projects",
    ("GET", "sessions/{session}/trace_export"): "exporting traces; /metrics has the server's figures",
    ("POST", "sessions/search"): "searching sessions; list them",
}
"""What is not here, by method and path under /api/v1."""


def absent_routes() -> list[tuple[str, str, Handler]]:
    """(method, path under /api/v1, handler) of all of them."""
    return [(method, path, partial(_refuse, path, what)) for (method, path), what in ABSENT.items()]


async def _refuse(path: str, what: str, request: Request, tenant: str) -> Response:
    raise RequestRefusedError(f"{path} is not supported by this server. It lacks {what}")
