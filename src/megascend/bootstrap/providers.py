"""What a package that patches Megatron-Core onto another device has to offer the bootstrap.

MindSpeed is the one in use. Its successor patches without the second phase; it would be a second class with an empty
``for_model``, and nothing outside the bootstrap would change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megascend.topology.topology import Topology


class PatchProvider(ABC):
    """A package that makes Megatron-Core run on a device by replacing parts of it.

    The phases come in the order of the methods; all but the first two may be repeated, for another model or layout in
    the same process. Each returns one line for every change made, for ``Runtime.changes``.

    Attributes:
        name: of the package, for messages.
    """

    name: ClassVar[str]

    @abstractmethod
    def before_megatron(self, context_size: int, context_algorithm: str) -> list[str]:
        """Patch, before anything else imports megatron.core, transformer_engine or mcore_bridge.

        Args:
            context_size: context parallel size, as far as it is known; 1 if it is not.
            context_algorithm: as in ``Parallel.context_algorithm``.

        Raises:
            PlatformError, VersionError: something is missing or does not fit; nothing has been changed.
        """

    @abstractmethod
    def after_megatron(self) -> list[str]:
        """Right after megatron.core and mcore_bridge are imported."""

    @abstractmethod
    def for_topology(self, topology: Topology) -> list[str]:
        """Before Megatron's process groups are created."""

    @abstractmethod
    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        """When the ModelConfig exists and before the model is built; then check that all is as it must be.

        Args:
            config: mcore-bridge's ModelConfig; attributes that the provider's classes read are set on it.
            options: settings of the provider's own that the user asked for.

        Raises:
            ConfigError: the provider would get this model or these options wrong.
            PlatformError: a check failed; the message says which.
        """
