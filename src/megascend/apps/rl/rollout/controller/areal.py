"""AReaL's callbacks: its trainers pause and resume the controller's engines, its workers report completed rollouts.

AReaL posts JSON to ``http://ADDRESS/callback/...`` without signatures. An address with the token as a password authenticates it
by HTTP basic authentication: ``areal:TOKEN@HOST:PORT``, where TOKEN is ``key.bearer_token(BEARER)``. Its calls for weight updates
are refused: they have no point at which the complete update is verified.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.controller.messages import read_object
from megascend.errors import ControllerBusyError, ControllerError, MegascendError, MessageError, RolloutTaskError

CALLBACKS = "/callback/"
OWNER = "AReaL"
WEIGHTS = ("init_weights_group", "update_weights_xccl", "update_weights_disk")


def bearer_of(authorization: bytes) -> bytes:
    """Convert the password of a basic authorization to a bearer token; return anything else unchanged."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return authorization


class ArealCallbacks:
    """AReaL's callbacks on a controller. A pause claims all engines, and ends with its lease if no call ends it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._claim: str | None = None
        # AReaL may send continue before its pause was answered.
        self._changing = asyncio.Lock()

    async def answer(self, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Handle a callback; return status and JSON of the answer."""
        try:
            # An offer and a seal cannot be made of these calls: AReaL names no digests, and activates while it sends.
            if name in WEIGHTS:
                reason = "weights reach the controller's engines by megascend.WeightSync (docs/controller.md)"
                return 501, {"error": f"{name} is not supported: {reason}"}
            await self._carry_out(name, read_object(body or b"{}"))
        except (MessageError, RolloutTaskError) as error:
            return 400, {"error": str(error)}
        except MegascendError as error:
            return 503 if isinstance(error, ControllerBusyError) else 500, {"error": str(error)}
        return 200, {"status": "ok"}

    async def _carry_out(self, name: str, fields: dict[str, Any]) -> None:
        if name == "rollout_complete":
            task = fields.get("task_id")
            if type(task) is not int:
                raise MessageError(f"task_id is {task!r:.80}; a number was expected")
            # A worker that lost the answer repeats the call.
            if not self._controller.tasks.completed(str(task)):
                self._controller.tasks.complete(str(task), {"task_id": task})
            return
        async with self._changing:
            if name == "pause_generation":
                await self._pause()
            elif name == "continue_generation":
                await self._continue()
            else:
                names = ", ".join(("pause_generation", "continue_generation", "rollout_complete"))
                raise MessageError(f"unknown callback {name[:80]!r}; known: {names}")

    async def _pause(self) -> None:
        lease_s = self._controller.limits.max_lease_s
        try:
            if self._claim is not None:
                # A pause during a pause extends it.
                self._controller.renew(self._claim, lease_s)
        except ControllerError:  # it lapsed, possibly so long ago that the controller does not know it any more
            self._claim = None
        if self._claim is None:
            self._claim = (await self._controller.claim(OWNER, lease_s=lease_s)).id
        await self._controller.engine(self._claim).pause(lease_s)

    async def _continue(self) -> None:
        # Forgotten first: a release that fails must not be tried again with a dead claim.
        claim, self._claim = self._claim, None
        if claim is not None:
            try:
                await self._controller.release(claim)  # which resumes paused engines
            except ControllerError:  # as above: its engines were resumed when it lapsed
                return
