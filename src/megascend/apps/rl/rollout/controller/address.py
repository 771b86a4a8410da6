"""Address of the controller: a file that it writes when it listens, locked against other controllers."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megascend.errors import ControllerError, ControllerLostError
from megascend.runtime.io.atomic import replacing
from megascend.runtime.io.shared import hold


@dataclass(frozen=True)
class Address:
    """Address of a listening controller. Contains no secret.

    Attributes:
        instance: unique id of the controller, which a restart on the same port changes.
    """

    host: str
    port: int
    instance: str = ""

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class PublishedAddress:
    """An address file, locked for one process: a second controller with the same file is refused.

    The lock (beside the file, with the suffix ``.lock``) is released by the system when the process ends in any way.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._lock = hold(Path(f"{path}.lock"))
        except TimeoutError:
            holder = ""
            # The holder has the lock before it publishes its address: there may be none to name yet.
            with contextlib.suppress(ControllerError):
                holder = f", at {read_address(path)}"
            raise ControllerError(f"{path} is held by another controller{holder}") from None

    def publish(self, address: Address) -> None:
        # Clients read it at any moment, and must not find half of it.
        with replacing(self._path) as path:
            path.write_text(json.dumps({"version": 1, **asdict(address)}) + "\n", encoding="utf-8")

    def withdraw(self) -> None:
        """Remove the file and release the lock. May be called twice."""
        if self._lock.is_locked:
            # Under the lock: the next controller's file must not be removed.
            self._path.unlink(missing_ok=True)
            self._lock.release()


def unbracketed(host: str) -> str:
    """Return an address without the brackets of an IPv6 one in a URL, which versions of Ray add or leave out."""
    if "[" not in host and "]" not in host:
        return host
    try:
        ipaddress.IPv6Address(bare := host[1:-1])
    except ValueError:
        bare = "?"
    if host != f"[{bare}]":
        raise ControllerError(f"{host!r:.80} is not an address: write an IPv6 address as [::1]")
    return bare


def read_address(source: str | Path) -> Address:
    """Read an address from its file, or parse ``HOST:PORT``."""
    host, colon, port = str(source).rpartition(":")
    if colon and port.isascii() and port.isdigit() and "/" not in str(source):
        return Address(unbracketed(host), int(port))
    try:
        with open(source, "rb") as stream:
            data = json.loads(stream.read(4096))
    except FileNotFoundError:
        raise ControllerLostError(f"no controller has published its address in {source}") from None
    except (OSError, ValueError) as error:
        raise ControllerLostError(f"{source} does not contain a controller's address: {error}") from error
    fields = {"version": int, "host": str, "port": int, "instance": str}
    if not isinstance(data, dict) or any(type(data.get(name)) is not kind for name, kind in fields.items()):
        raise ControllerLostError(f"{source} does not contain a controller's address")
    if data["version"] != 1 or not 0 < data["port"] < 65536:
        raise ControllerLostError(
            f"{source} holds an address of version {data['version']}, port {data['port']}; expected version 1"
        )
    return Address(data["host"], data["port"], data["instance"])
