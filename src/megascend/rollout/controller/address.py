"""Where the controller is: a file that it writes when it listens, and that nobody else may write meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megascend.errors import ControllerError, ControllerLostError
from megascend.io.atomic import replacing


@dataclass(frozen=True)
class Address:
    """Of a controller that listens. No secret.

    Attributes:
        instance: of this controller; another one has another, on the same port or not.
    """

    host: str
    port: int
    instance: str = ""

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class PublishedAddress:
    """Holds an address file for one process: a second controller that is given the same file is refused.

    The lock (beside the file, ``.lock`` behind its name) is the system's and goes with the process, however it ends.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._descriptor: int | None = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            where = ""
            with contextlib.suppress(ControllerError):
                where = f", at {read_address(path)}"
            raise ControllerError(f"{path} is held by another controller{where}") from None

    def publish(self, address: Address) -> None:
        """Write it; whoever reads sees the former one or this one, whole."""
        with replacing(self._path) as path:
            path.write_text(json.dumps({"version": 1, **asdict(address)}) + "\n", encoding="utf-8")

    def withdraw(self) -> None:
        """Remove the file and let go of it. Nothing happens the second time."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def read_address(where: str | Path) -> Address:
    """An address from its file, or from ``HOST:PORT``.

    Raises:
        ControllerLostError: there is no such file (yet), or no address in it.
    """
    host, colon, port = str(where).rpartition(":")
    if colon and port.isascii() and port.isdigit() and "/" not in str(where):
        return Address(host.strip("[]"), int(port))
    try:
        with open(where, "rb") as stream:
            data = json.loads(stream.read(4096))
    except FileNotFoundError:
        raise ControllerLostError(f"no controller has published its address in {where}") from None
    except (OSError, ValueError) as error:
        raise ControllerLostError(f"{where} holds no controller's address: {error}") from error
    fields = {"version": int, "host": str, "port": int, "instance": str}
    if not isinstance(data, dict) or any(type(data.get(name)) is not kind for name, kind in fields.items()):
        raise ControllerLostError(f"{where} holds no controller's address")
    if data["version"] != 1 or not 0 < data["port"] < 65536:
        raise ControllerLostError(
            f"{where} holds an address of version {data['version']}, port {data['port']}; expected version 1"
        )
    return Address(data["host"], data["port"], data["instance"])
