"""Trackers by name: those that are built in, and those that plug-ins register."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from megascend.errors import ConfigError, MissingDependencyError
from megascend.surroundings import is_installed
from megascend.tracking.base import OpenTracker


@dataclass(frozen=True)
class Kind:
    """A tracker that a run file can name.

    Attributes:
        open: the function, or where it is, ``module:name``, to be imported when it is used.
        package: what has to be installed, or None.
        extra: of megascend's, which installs it, or None.
    """

    open: OpenTracker | str
    package: str | None = None
    extra: str | None = None


def register_tracker(name: str, open_tracker: OpenTracker, *, package: str | None = None) -> None:
    """Make a tracker known by its name, to run files (``trackers: [NAME]``).

    Every rank registers it, most simply where the module that defines it is imported, which a run file names under ``plugins``.
    Registering it again changes nothing.

    Args:
        open_tracker: called with a :class:`TrackedRun` on rank 0; returns a :class:`Tracker`.
        package: the module that has to be there; its absence is then an error before training.

    Raises:
        ConfigError: another tracker has that name.
    """
    known = _kinds.get(name)
    if known is not None and known.open is not open_tracker:
        raise ConfigError(f"register_tracker: another tracker is called {name!r}; names in use: {', '.join(_kinds)}")
    _kinds[name] = Kind(open_tracker, package)


def check_trackers(names: Iterable[str], *, plugins: bool = False) -> None:
    """Find out before training that a tracker is unknown or its package missing. Imports nothing.

    Args:
        plugins: the run names modules that may register others and have not been imported yet.

    Raises:
        ConfigError: a name is unknown.
        MissingDependencyError: a package is not installed; the message says how to install it.
    """
    names = list(names)
    if not plugins:
        check_tracker_names(names)
    for name in names:
        if name not in _kinds:
            continue
        kind = _kinds[name]
        if kind.package is not None and not is_installed(kind.package):
            install = f"pip install 'megascend[{kind.extra}]'" if kind.extra is not None else "install it"
            raise MissingDependencyError(
                f"trackers: {name} needs {kind.package}, which is not installed: {install}, or leave {name} out"
            )


def check_tracker_names(names: Iterable[str]) -> None:
    """Refuse trackers that nobody has registered. Imports nothing.

    Raises:
        ConfigError: a name is unknown; the message lists those there are.
    """
    for name in names:
        if name not in _kinds:
            alike = get_close_matches(name, _kinds, 1)
            advice = f", did you mean {alike[0]}?" if alike else ";"
            raise ConfigError(
                f"trackers: there is no {name!r}{advice} there are {', '.join(_kinds)}. Register yours on every rank "
                "(megascend.register_tracker; a run file names the module under plugins)"
            )


def opener(name: str) -> OpenTracker:
    """What opens a tracker whose name :func:`check_trackers` has passed; imports its module, not its package."""
    found = _kinds[name].open
    if not isinstance(found, str):
        return found
    module, _, attribute = found.partition(":")
    return getattr(import_module(module), attribute)


_kinds: dict[str, Kind] = {
    "tensorboard": Kind("megascend.tracking.tensorboard_tracker:open_tensorboard", "tensorboard", "track"),
    "wandb": Kind("megascend.tracking.wandb_tracker:open_wandb", "wandb", "wandb"),
    "swanlab": Kind("megascend.tracking.swanlab_tracker:open_swanlab", "swanlab", "swanlab"),
    "trackio": Kind("megascend.tracking.trackio_tracker:open_trackio", "trackio", "trackio"),
    "mlflow": Kind("megascend.tracking.mlflow_tracker:open_mlflow", "mlflow", "mlflow"),
}
