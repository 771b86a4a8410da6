"""The MindSpeed provider: its two phases in order, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.bootstrap.mindspeed import adaptor, arguments, feature, prerequisites, tree, verification
from megascend.bootstrap.providers import Finding, PatchProvider, Setup
from megascend.errors import VersionError

if TYPE_CHECKING:
    from megascend.config import Batching
    from megascend.topology.topology import Topology

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
        self._defaults = adaptor.default_arguments()
        self._feature = feature.install(self._stack.name)
        self._patched = arguments.seed(self._defaults, parallel.context, parallel.context_algorithm)
        adaptor.import_adaptor(self._patched)
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
        adaptor.set_arguments(seeded)
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
        adaptor.set_arguments(wanted)
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
        with adaptor.quietly():
            import_module(adaptor.ADAPTOR).repatch(wanted)
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
