"""The MindSpeed provider: its two phases, and the state between them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.bootstrap.mindspeed import arguments, feature, prerequisites, tree, verification
from megascend.bootstrap.providers import Finding, PatchProvider, ProviderSetup
from megascend.changes import changed, patch
from megascend.errors import ImportOrderError, PlatformError, VersionError

if TYPE_CHECKING:
    from megascend.config import Batching
    from megascend.topology.topology import Topology


ADAPTOR = "mindspeed.megatron_adaptor"


def default_arguments() -> dict[str, Any]:
    """Return the defaults of the arguments of all MindSpeed features. Does not read the command line."""
    return vars(import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True))


def set_arguments(values: Mapping[str, Any]) -> None:
    """Replace the arguments that MindSpeed takes for its command line, including all values of an earlier model."""
    args_utils: Any = import_module("mindspeed.args_utils")
    args_utils._MINDSPEED_ARGS = argparse.Namespace(**values)


def import_adaptor(values: Mapping[str, Any]) -> None:
    """Import the adaptor with the arguments ``values``.

    Its import parses ``sys.argv``, replaces the root logger's handlers, imports megatron.core and patches it. Arguments that are
    set in advance avoid the parsing, and logging is restored afterwards.
    """
    if ADAPTOR in sys.modules:
        raise ImportOrderError(
            f"{ADAPTOR} was imported before megascend.bootstrap(): it has read its arguments from sys.argv and patched "
            "Megatron with them. Remove the import; the bootstrap does it"
        )
    set_arguments(values)
    guard_module_scan()
    try:
        with quietly():
            import_module(ADAPTOR)
    except SystemExit as error:  # argparse, if a MindSpeed version parses the command line after all
        raise PlatformError(f"importing {ADAPTOR} tried to end the process ({error.code})") from error
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise PlatformError(
            f"importing {ADAPTOR} failed: {type(error).__name__}: {error}. This process is patched half-way; start another"
        ) from error
    # It warns on every rank that megatron.training is missing, which is normal with megascend.
    logging.getLogger("mindspeed.args_utils").setLevel(logging.ERROR)
    changed("the logger mindspeed.args_utils", "logs errors only")


def guard_module_scan() -> None:
    """Prevent MindSpeed's scan of ``sys.modules`` from importing lazy modules.

    For every patch it calls ``hasattr(module, name)`` for every module. That makes lazy modules (for example transformers)
    import the module that defines the name, and crash if an optional package is missing. Attributes of lazy modules are
    never patched, so only attributes that exist already are considered.
    """
    patch_utils: Any = import_module("mindspeed.patch_utils")

    def present(owner: Any, name: str) -> bool:
        return name in vars(owner) if isinstance(owner, ModuleType) else hasattr(owner, name)

    patch(patch_utils, "hasattr", present, "its scan of sys.modules leaves lazy modules alone")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress Python warnings and log records below error within the context; restore the root logger at its end."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


LATE = ("context_parallel_algo", "use_flash_attn", "attention_mask_type", "optimization_level")
"""Arguments that are fields of a ModelConfig and may be determined only after it was created."""


class MindSpeed(PatchProvider):
    """Provider that patches Megatron-Core for Ascend with MindSpeed.

    Attributes:
        repatches: number of repatches of Megatron since the adaptor's import.
    """

    name: ClassVar[str] = "mindspeed"
    keeps_groups_in: ClassVar[tuple[str, ...]] = ("mindspeed.core.context_parallel.model_parallel_utils",)  # its rings

    def __init__(self, setup: ProviderSetup) -> None:
        super().__init__(setup)
        self._stack = setup.stack
        self._defaults: dict[str, Any] = {}
        self._patched: dict[str, Any] = {}  # arguments of the current patches
        self._signature: Any = None  # signature of these arguments
        self._fields: dict[type, list[str]] = {}  # model fields of every ModelConfig class so far
        self._verified: Any = None  # signature of the arguments that passed verification with these patches
        self._algorithm = "ring"
        self._feature: Any = None
        self.repatches = 0

    # --- phase one ---

    def before_megatron(self) -> list[str]:
        prerequisites.check(self._stack)
        mindspeed, parallel = tree.find(), self.setup.parallel
        assert mindspeed is not None, "checked by prerequisites.check()"
        self._defaults = default_arguments()
        self._feature = feature.install(self._stack.name)
        self._patched = arguments.seed(self._defaults, parallel.context, parallel.context_algorithm)
        import_adaptor(self._patched)
        return [
            f"mindspeed {mindspeed.version_for(self._stack)}: adaptor imported with seeded arguments, sys.argv not read; "
            "torch.cuda names mean the NPU; torch.compile and torch.jit.script do nothing; dummy transformer_engine, "
            "apex, flash_attn and fla modules; importlib.metadata knows a transformer-engine",
            "on top of it: Megatron's own column and row parallel linears, and its DistributedOptimizer.load_state_dict; "
            "all_reduce of float64 works on the CPU and is refused on the NPU"
            + feature.branch_changes(self._stack.name),
        ]

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        return {feature.BRIDGE: self._keep_bridges_rotary}

    def _keep_bridges_rotary(self) -> list[str]:
        self._feature.rotary = feature.bridge_rotary()
        return ["mcore-bridge's apply_rotary_pos_emb stays when MindSpeed patches again"]

    # --- phase two ---

    def for_topology(self, topology: Topology) -> list[str]:
        self._algorithm = topology.context_algorithm
        seeded = arguments.seed(self._defaults, topology.context, topology.context_algorithm)
        # A ModelConfig takes fields without a value from these arguments, so none of an earlier model may remain.
        set_arguments(seeded)
        decisive = ("context_parallel_size", "context_parallel_algo")
        if all(self._patched.get(name) == seeded[name] for name in decisive):
            return []
        return self._repatch(seeded)

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        arguments.check_options(options, self._defaults)
        kind = type(config)
        if kind not in self._fields:
            self._fields[kind] = arguments.model_fields(kind, self._defaults)
        levels = feature.levels(self._feature)
        values = arguments.from_config(
            self._defaults, config, self._algorithm, options, levels, fields=self._fields[kind]
        )
        arguments.check_model(values)
        set_arguments(values)
        self._set_on_config(config, values, options)
        signature = arguments.signature(values)
        if self._signature is None:
            self._signature = arguments.signature(self._patched)
        changes = [] if signature == self._signature else self._repatch(values)
        if changes or signature != self._verified:
            verification.verify(config, values, self._feature.rotary)
            self._verified = signature
        return changes

    # --- properties of its layers and its Adam ---

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        arguments.check_batching(topology.context, batching.packing)

    def adam_count(self, optimizer: Any, count: int) -> Any:
        if type(optimizer).__module__.partition(".")[0] != tree.PACKAGE:
            return count
        torch = import_module(
            "torch"
        )  # core_r0.15.3 reads the count's device, so it needs a tensor; core_r0.16.0 takes both
        return torch.tensor(count, dtype=torch.int64)

    # --- queries ---

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        return prerequisites.findings(self._stack, before_each=before_each)

    def versions(self) -> dict[str, str]:
        try:
            mindspeed = tree.find()
        except VersionError as error:
            return {"MindSpeed": str(error)}
        return {"MindSpeed": "none" if mindspeed is None else str(mindspeed.version_for(self._stack) or mindspeed.name)}

    # --- private ---

    def _repatch(self, values: dict[str, Any]) -> list[str]:
        self._verified = self._signature = None
        self._patched = {}  # if this fails half-way, the next attempt patches everything again
        with quietly():
            import_module(ADAPTOR).repatch(values)
        self._patched = values
        self.repatches += 1
        return [
            f"Megatron patched again (level {values['optimization_level']}, context parallel size "
            f"{values['context_parallel_size']}, {values['context_parallel_algo']})"
        ]

    @staticmethod
    def _set_on_config(config: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Set arguments on the ModelConfig, where MindSpeed's layers read them.

        Its own values may predate a repatch, and lack ``options``.
        """
        fields = getattr(type(config), "__dataclass_fields__", {})
        for name, value in values.items():
            if name not in fields or name in LATE or name in options:
                setattr(config, name, value)
