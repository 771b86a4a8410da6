"""Public names that have another name now: the old one works until a version that is named, and warns.

Every such name is in :data:`RENAMED`, and in docs/migration.md.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from megascend.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class RenamedWarning(FutureWarning):
    """An old name is in use. Python shows it by default, to users and not only to developers."""


@dataclass(frozen=True)
class Renamed:
    """A public name that has another one now.

    Attributes:
        what: ``"setting"`` of a run file, or ``"argument of"`` something.
        since: the version that has the new name first.
        removal: the version that no longer has the old one.
    """

    what: str
    old: str
    new: str
    since: str
    removal: str

    def __str__(self) -> str:
        return f"{self.what} {self.old} is now called {self.new}"

    def warn(self, stacklevel: int = 1) -> None:
        """Warn of the old name. Python shows one warning for a line of the user's.

        Args:
            stacklevel: 1 is the caller of this method, as for :func:`warnings.warn`.
        """
        text = f"{self} since version {self.since}; {self.removal} will no longer know {self.old}"
        warnings.warn(text, RenamedWarning, stacklevel=stacklevel + 1)

    def refuse_both(self) -> None:
        """Raise for a value that is given under both names.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self}, and both are set: leave {self.old} out")


SETTINGS = {"mindspeed": Renamed("setting", "mindspeed", "provider_options", since="0.2", removal="0.4")}
"""Of run files, by the old name."""
MINDSPEED = Renamed("argument of MegatronBackend:", "mindspeed", "provider_options", since="0.2", removal="0.4")
RENAMED = (*SETTINGS.values(), MINDSPEED)
"""All of them."""


def renamed_argument(renamed: Renamed) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a function takes a keyword argument by its old name, too. Its signature has the new name only.

    Raises, when the function is called:
        ConfigError: the argument is given under both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **values: P.kwargs) -> R:
            if renamed.old not in values:
                return function(*args, **values)
            renamed.warn(stacklevel=2)
            if renamed.new in values:
                renamed.refuse_both()
            values[renamed.new] = values.pop(renamed.old)
            return function(*args, **values)

        return call

    return decorate
