"""The MindSpeed provider: its two phases in order, and the state between them."""

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
from megascend.bootstrap.providers import Finding, PatchProvider, Setup
from megascend.changes import changed, patch
from megascend.errors import ImportOrderError, PlatformError, VersionError

if TYPE_CHECKING:
    from megascend.config import Batching
    from megascend.topology.topology import Topology


ADAPTOR = "mindspeed.megatron_adaptor"


def default_arguments() -> dict[str, Any]:
    """Every argument of every MindSpeed feature at its default. No command line is looked at."""
    return vars(import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True))


def set_arguments(values: Mapping[str, Any]) -> None:
    """Replace what MindSpeed takes for its command line. Values of an earlier model do not stay behind."""
    args_utils: Any = import_module("mindspeed.args_utils")
    args_utils._MINDSPEED_ARGS = argparse.Namespace(**values)


def import_adaptor(values: Mapping[str, Any]) -> None:
    """Import the adaptor with ``values`` for its arguments.

    Its import parses ``sys.argv``, replaces the root logger's handlers, imports megatron.core and patches it. Here it is told
    its arguments beforehand, and logging is put back.
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
    # It reports at warning level on every rank that megatron.training is absent, which is how megascend runs.
    logging.getLogger("mindspeed.args_utils").setLevel(logging.ERROR)
    changed("the logger mindspeed.args_utils", "logs errors only")


def guard_module_scan() -> None:
    """Keep MindSpeed's scan of ``sys.modules`` from loading what it looks at.

    For every patch it asks every module ``hasattr(module, name)``, which makes lazy modules (transformers, for one)
    import whatever defines that name, and crash where an optional package is missing. A lazy module's attributes are
    not what is to be replaced, so only those are asked for that are there.
    """
    patch_utils: Any = import_module("mindspeed.patch_utils")

    def present(owner: Any, name: str) -> bool:
        return name in vars(owner) if isinstance(owner, ModuleType) else hasattr(owner, name)

    patch(patch_utils, "hasattr", present, "its scan of sys.modules leaves lazy modules alone")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Only errors are logged, no Python warnings, and the root logger is as it was when the block ends."""
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
"""Arguments that are fields of a ModelConfig and may be decided only after it was made."""


class MindSpeed(PatchProvider):
    """MindSpeed, patching Megatron-Core for Ascend.

    Attributes:
        repatches: how often Megatron has been patched again since the adaptor's import.
    """

    name: ClassVar[str] = "mindspeed"
    keeps_groups_in: ClassVar[tuple[str, ...]] = ("mindspeed.core.context_parallel.model_parallel_utils",)  # its rings

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._stack = setup.stack
        self._defaults: dict[str, Any] = {}
        self._patched: dict[str, Any] = {}  # the arguments that the present patches were made with
        self._signature: Any = None  # theirs
        self._fields: dict[type, list[str]] = {}  # of every ModelConfig class seen
        self._verified: Any = None  # signature of the arguments that passed the checks with these patches
        self._algorithm = "ring"
        self._feature: Any = None
        self.repatches = 0

    # --- phase one ---

    def before_megatron(self) -> list[str]:
        prerequisites.check(self._stack)
        found, parallel = tree.find(), self.setup.parallel
        assert found is not None, "check() has seen it"
        self._defaults = default_arguments()
        self._feature = feature.install(self._stack.name)
        self._patched = arguments.seed(self._defaults, parallel.context, parallel.context_algorithm)
        import_adaptor(self._patched)
        return [
            f"mindspeed {found.version_for(self._stack)}: adaptor imported with seeded arguments, sys.argv not read; "
            "torch.cuda names mean the NPU; torch.compile and torch.jit.script do nothing; dummy transformer_engine, "
            "apex, flash_attn and fla modules; importlib.metadata knows a transformer-engine",
            "on top of it: Megatron's own column and row parallel linears, and its DistributedOptimizer.load_state_dict; "
            "all_reduce of float64 works on the CPU and is refused on the NPU" + feature.told_of(self._stack.name),
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
        # The ModelConfig takes fields that nobody gives it from these arguments: none of an earlier model may be left.
        set_arguments(seeded)
        decides = ("context_parallel_size", "context_parallel_algo")
        if all(self._patched.get(name) == seeded[name] for name in decides):
            return []
        return self._repatch(seeded)

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        arguments.check_options(options, self._defaults)
        kind = type(config)
        if kind not in self._fields:
            self._fields[kind] = arguments.model_fields(kind, self._defaults)
        levels = feature.levels(self._feature)
        wanted = arguments.from_config(
            self._defaults, config, self._algorithm, options, levels, fields=self._fields[kind]
        )
        arguments.check_model(wanted)
        set_arguments(wanted)
        self._tell(config, wanted, options)
        signature = arguments.signature(wanted)
        if self._signature is None:
            self._signature = arguments.signature(self._patched)
        changes = [] if signature == self._signature else self._repatch(wanted)
        if changes or signature != self._verified:
            verification.verify(config, wanted, self._feature.rotary)
            self._verified = signature
        return changes

    # --- what its layers and its Adam are like ---

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        arguments.check_batching(topology.context, batching.packing)

    def adam_count(self, optimizer: Any, count: int) -> Any:
        if type(optimizer).__module__.partition(".")[0] != tree.PACKAGE:
            return count
        torch = import_module("torch")  # core_r0.15.3's asks its count on which device it is; core_r0.16.0's takes both
        return torch.tensor(count, dtype=torch.int64)

    # --- what is there ---

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        return prerequisites.findings(self._stack, before_each=before_each)

    def versions(self) -> dict[str, str]:
        try:
            found = tree.find()
        except VersionError as error:
            return {"MindSpeed": str(error)}
        return {"MindSpeed": "none" if found is None else str(found.version_for(self._stack) or found.name)}

    # --- inside ---

    def _repatch(self, wanted: dict[str, Any]) -> list[str]:
        self._verified = self._signature = None
        self._patched = {}  # should it fail half-way, the next attempt patches everything again
        with quietly():
            import_module(ADAPTOR).repatch(wanted)
        self._patched = wanted
        self.repatches += 1
        return [
            f"Megatron patched again (level {wanted['optimization_level']}, context parallel size "
            f"{wanted['context_parallel_size']}, {wanted['context_parallel_algo']})"
        ]

    @staticmethod
    def _tell(config: Any, wanted: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Set arguments on the ModelConfig, where MindSpeed's layers read them: its own are older than a repatch and lack
        ``options``.
        """
        fields = getattr(type(config), "__dataclass_fields__", {})
        for name, value in wanted.items():
            if name not in fields or name in LATE or name in options:
                setattr(config, name, value)
