"""What a client is told: refusals of a request, and failures of what it asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascend.errors import CheckpointError, EngineError, MegascendError, OutOfDeviceMemoryError

Category = Literal["user", "server"]
"""Whose fault a failure is, in the words of the protocol."""


class RequestRefusedError(MegascendError):
    """A request that is answered with an HTTP status other than 200. Nothing was done.

    Args:
        status: HTTP status. Clients send the request again after 408, 409, 429 and from 500 on.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """Why what a future stands for did not happen."""

    message: str
    category: Category

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an error to a client: those of storage, memory and engines are the server's, our other ones the user's."""
        ours = isinstance(error, MegascendError)
        of_server = isinstance(error, CheckpointError | EngineError | OutOfDeviceMemoryError)
        category: Category = "user" if ours and not of_server else "server"
        return cls(str(error) if ours else f"internal error ({type(error).__name__})", category)
