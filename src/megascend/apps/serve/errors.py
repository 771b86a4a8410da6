"""Errors as clients see them: refused requests (HTTP status) and failed futures (message and category)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascend.errors import CheckpointError, EngineError, MegascendError, OutOfDeviceMemoryError

Category = Literal["user", "server"]
"""The party at fault, as the Tinker protocol names it."""


class RequestRefusedError(MegascendError):
    """A request answered with an HTTP status other than 200; it had no effect.

    Args:
        status: HTTP status. Clients retry after 408, 409, 429 and 5xx.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """The error that a future ended with."""

    message: str
    category: Category

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an error to a client: storage, memory and engine errors are the server's fault, our others the user's."""
        is_ours = isinstance(error, MegascendError)
        is_server_fault = isinstance(error, CheckpointError | EngineError | OutOfDeviceMemoryError) or (
            isinstance(error, RequestRefusedError) and error.status >= 500
        )
        category: Category = "user" if is_ours and not is_server_fault else "server"
        return cls(str(error) if is_ours else f"internal error ({type(error).__name__})", category)
