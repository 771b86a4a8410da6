"""The MindSpeed provider: its two phases, and the state between them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.changes import changed
from megascend.config.rules import enforce
from megascend.errors import ImportOrderError, VersionError
from megascend.runtime.bootstrap import ascend
from megascend.runtime.bootstrap.ascend import import_errors, quietly
from megascend.runtime.bootstrap.mindspeed import arguments, feature, tree, verification
from megascend.runtime.bootstrap.providers import Finding, PatchProvider, ProviderSetup

if TYPE_CHECKING:
    from megascend.config import Batching
    from megascend.runtime.topology.topology import Topology


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

    The import parses ``sys.argv`` unless arguments are set in advance, replaces the root logger's handlers (restored here),
    imports megatron.core and patches it.
    """
    if ADAPTOR in sys.modules:
        raise ImportOrderError(
            f"{ADAPTOR} was imported before megascend.bootstrap(), and patched Megatron with arguments of sys.argv: remove the "
            "import; the bootstrap does it"
        )
    set_arguments(values)
    ascend.guard_module_scan()
    with import_errors(ADAPTOR), quietly():
        import_module(ADAPTOR)
    # It warns on every rank that megatron.training is missing, which is normal with megascend.
    logging.getLogger("mindspeed.args_utils").setLevel(logging.ERROR)
    changed("the logger mindspeed.args_utils", "logs errors only")


LATE_FIELDS = ("context_parallel_algo", "use_flash_attn", "attention_mask_type", "optimization_level")
"""Arguments that are fields of a ModelConfig and may be determined only after it was created."""


class MindSpeed(PatchProvider):
    """Provider that patches Megatron-Core for Ascend with MindSpeed."""

    name: ClassVar[str] = "mindspeed"
    keeps_groups_in: ClassVar[tuple[str, ...]] = ("mindspeed.core.context_parallel.model_parallel_utils",)  # its rings

    def __init__(self, setup: ProviderSetup) -> None:
        super().__init__(setup)
        self._stack = setup.stack
        self._defaults: dict[str, Any] = {}
        self._patched: dict[str, Any] = {}  # arguments of the current patches
        self._signature: Any = None  # signature of these arguments
        self._verified: Any = None  # signature of the arguments that passed verification with these patches
        self._algorithm = "ring"
        self._feature: Any = None
        self.repatches = 0  # since the adaptor's import

    # --- phase one ---

    def before_megatron(self) -> list[str]:
        ascend.check(tree.PREREQUISITES, self._stack)
        mindspeed, parallel = tree.find(), self.setup.parallel
        assert mindspeed is not None, "checked by its prerequisite"
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
        return {ascend.BRIDGE: self._keep_bridges_rotary}

    def _keep_bridges_rotary(self) -> list[str]:
        self._feature.rotary = ascend.bridge_rotary()
        return ["mcore-bridge's apply_rotary_pos_emb stays when MindSpeed patches again"]

    # --- phase two ---

    def for_topology(self, topology: Topology) -> list[str]:
        self._algorithm = topology.context_algorithm
        seeded = arguments.seed(self._defaults, topology.context, topology.context_algorithm)
        # Fields without a value of a ModelConfig get these arguments, so values of an earlier model must not remain.
        set_arguments(seeded)
        decisive = ("context_parallel_size", "context_parallel_algo")
        if all(self._patched.get(name) == seeded[name] for name in decisive):
            return []
        return self._repatch(seeded)

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        arguments.check_options(options, self._defaults)
        levels = feature.levels(self._feature)
        values = arguments.from_config(self._defaults, config, self._algorithm, options, levels)
        enforce(arguments.RULES, arguments.Arguments(values))
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
        torch = import_module("torch")
        # core_r0.15.3 reads the count's device, so it needs a tensor; core_r0.16.0 accepts both.
        return torch.tensor(count, dtype=torch.int64)

    # --- queries ---

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        return ascend.findings(tree.PREREQUISITES, self._stack, before_each=before_each)

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

        The values that it was created with may predate a repatch, and do not include ``options``.
        """
        fields = getattr(type(config), "__dataclass_fields__", {})
        for name, value in values.items():
            if name not in fields or name in LATE_FIELDS or name in options:
                setattr(config, name, value)
