"""The MegatronAdaptor provider: imports in order, refused models, arguments from the model, repatching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.changes import changed, patch
from megascend.config.rules import Rule, enforce
from megascend.errors import ConfigError, ImportOrderError, PlatformError
from megascend.runtime.bootstrap import ascend
from megascend.runtime.bootstrap.megatron_adaptor import packages, verification
from megascend.runtime.bootstrap.mindspeed import tree
from megascend.runtime.bootstrap.mindspeed.arguments import ON_OTHER_DEVICES, Arguments
from megascend.runtime.bootstrap.mindspeed.provider import default_arguments
from megascend.runtime.bootstrap.providers import Finding, PatchProvider, ProviderSetup, refuse_options

if TYPE_CHECKING:
    from megascend.config import Batching
    from megascend.runtime.topology.topology import Topology

MINDSPEED_ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = "megatron_adaptor.utils.args_utils"
RANDOM = "megatron.core.tensor_parallel.random"
FIXED = {"transformer_impl": "transformer_engine", "use_flash_attn": True}
"""Arguments that are the same for every model, where MegatronAdaptor has them."""


class MegatronAdaptor(PatchProvider):
    """Provider that patches Megatron-Core 0.18 and later for Ascend with MegatronAdaptor and TransformerEngineNPU."""

    name: ClassVar[str] = "megatron_adaptor"

    def __init__(self, setup: ProviderSetup) -> None:
        super().__init__(setup)
        self._stack = setup.stack
        self._defaults: dict[str, Any] = {}  # of MegatronAdaptor's and MindSpeed's arguments
        self._names: list[str] = []  # MegatronAdaptor's arguments
        self._rotary: Any = None
        self._verified: Any = None  # arguments with which the process passed verification
        self.repatches = 0  # calls of MegatronAdaptor's ``repatch``

    def before_megatron(self) -> list[str]:
        if early := [name for name in (packages.ADAPTOR, MINDSPEED_ADAPTOR) if name in sys.modules]:
            raise ImportOrderError(
                f"{', '.join(early)} was imported before megascend.bootstrap(), and patched Megatron with arguments of "
                "sys.argv: remove the import; the bootstrap does it"
            )
        ascend.check(packages.PREREQUISITES, self._stack)
        engine = packages.transformer_engine_folders()[0]
        with without_command_line(), ascend.quietly():
            import_module("torch_npu")
            # MegatronAdaptor imports megatron.core, and by it transformer_engine, after it has prepared the device.
            for package in (packages.ADAPTOR, packages.TRANSFORMER_ENGINE):
                with ascend.import_errors(package):
                    import_module(package)
            require_engine(engine)
            mindspeed = tree.find()
            if mindspeed is not None:
                self._complete()  # MindSpeed imports modules of Megatron-Core that need te_checkpoint
                import_mindspeed()
            # MegatronAdaptor parses its arguments when they are first read, and keeps them.
            import_module(ARGUMENTS).get_mindspeed_args()
            adaptor = vars(import_module(ARGUMENTS).get_mindspeed_args(get_defaults=True))
            self._names = list(adaptor)
            self._defaults = (default_arguments() if mindspeed is not None else {}) | adaptor
        self._complete()
        platform: Any = self.setup.platform
        # Transformer Engine's layers take the lengths of packed samples on the device.
        platform.packed_lengths_on_host = False
        names = [packages.ADAPTOR, packages.TRANSFORMER_ENGINE, *([MINDSPEED_ADAPTOR] if mindspeed else [])]
        return [
            f"{', '.join(names)}: imported in this order with sys.argv hidden; torch.cuda names mean the NPU, and megatron.core "
            "is patched; transformer_engine is TransformerEngineNPU"
        ]

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        return {ascend.BRIDGE: self._after_bridge}

    def _after_bridge(self) -> list[str]:
        self._rotary = ascend.bridge_rotary()
        kind: Any = import_module(f"{ascend.BRIDGE}.config.model_config").ModelConfig
        if MINDSPEED_ADAPTOR in sys.modules:
            # Its check of Ulysses divides a length of the training script by the context parallel size. A configuration has no
            # such length: micro batches differ, and each is padded to a multiple of that size.
            patch(kind, "seq_length", 0, "for MindSpeed's check of Ulysses, a multiple of any context parallel size")
        else:
            # mcore-bridge would look for MindSpeed's defaults, and warn in every process that it has none.
            patch(kind, "_mindspeed_defaults_cache", {}, "there is no MindSpeed whose defaults it could take")
        return ["mcore-bridge's apply_rotary_pos_emb stays when MegatronAdaptor patches again"]

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        refuse_options(options, "none of MegatronAdaptor's arguments has been tested with megascend")
        enforce(RULES, Arguments(vars(config)))
        for name, value in self._defaults.items():
            if not hasattr(config, name):
                setattr(config, name, value)
        arguments = import_module(ARGUMENTS).get_mindspeed_args()
        values = {name: FIXED.get(name, getattr(config, name)) for name in self._names}
        updates = {name: value for name, value in values.items() if getattr(arguments, name, None) != value}
        for name, value in updates.items():
            setattr(arguments, name, value)
        for name in FIXED:
            if name in values:
                setattr(config, name, values[name])
        changes = self._repatch(updates) if updates and find_spec("megatron.training") is not None else []
        state = repr(sorted(values.items()))
        if changes or state != self._verified:
            verification.verify(config, self._defaults)
            self._verified = state
        return changes

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        check_batching(topology.context, topology.context_algorithm, packing=batching.packing)

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        return ascend.findings(packages.PREREQUISITES, self._stack, before_each=before_each)

    def versions(self) -> dict[str, str]:
        return packages.versions()

    # --- private ---

    def _repatch(self, updates: dict[str, Any]) -> list[str]:
        self._verified = None
        with without_command_line(), ascend.quietly():
            import_module(packages.ADAPTOR).repatch(updates)
        self._complete()
        self.repatches += 1
        return [f"MegatronAdaptor patched again with {', '.join(sorted(updates))}"]

    def _complete(self) -> None:
        """Apply patches that the packages may have omitted, as public programs on them do. Idempotent."""
        import torch

        extensions: Any = import_module(verification.EXTENSIONS)
        random: Any = import_module(RANDOM)
        npu: Any = vars(torch)["npu"]
        if not hasattr(extensions, "te_checkpoint"):
            patch(extensions, "te_checkpoint", checkpoint, "Megatron-Core's own recomputation")
        if torch.cuda.current_device() != npu.current_device():
            patch(torch.cuda, "current_device", lambda: npu.current_device(), "the NPU of this process")
        if not verification.random_state_is_npus():
            patch(random, "_set_cuda_rng_state", lambda state, *_, **__: npu.set_rng_state(state), "the NPU's state")
            patch(random, "_get_cuda_rng_state", lambda *_, **__: npu.get_rng_state(), "the NPU's state")
        ascend.keep_float64()
        for name in ascend.modules_with_other_rotary(self._rotary) if self._rotary else []:
            patch(sys.modules[name], "apply_rotary_pos_emb", self._rotary, "mcore-bridge's again")


RULES: tuple[Rule[Arguments], ...] = (
    Rule(
        "window_size with TransformerEngineNPU: its attention is not known to apply the window, and might attend "
        f"to all tokens; {ON_OTHER_DEVICES}",
        lambda c: c["window_size"] is not None,
    ),
    Rule(
        "softmax_type with TransformerEngineNPU: its attention is only known to compute the vanilla softmax; "
        f"{ON_OTHER_DEVICES}",
        lambda c: c["softmax_type"] not in (None, "vanilla"),
    ),
    Rule(
        "attention_dropout with TransformerEngineNPU: its random stream, and whether it drops in evaluation, is "
        "not known; set it to 0",
        lambda c: (c["attention_dropout"] or 0) > 0,
    ),
    Rule(
        "experimental_attention_variant with TransformerEngineNPU: its kernels need a real NPU, and no test has "
        f"run them; {ON_OTHER_DEVICES}",
        lambda c: c["experimental_attention_variant"] is not None,
    ),
    Rule(
        "is_hybrid_model with TransformerEngineNPU: kernels of state spaces (mamba_ssm, causal_conv1d) are "
        f"CUDA's; {ON_OTHER_DEVICES}",
        lambda c: bool(c["is_hybrid_model"]),
    ),
    *(
        Rule(
            f"{name} with MindSpeed: it reads this from Megatron's training script, which does not run; leave it out",
            lambda c, name=name, off=off: c.divides_context and (c[name] or off) > off,
        )
        for name, off in (("use_cp_send_recv_overlap", False), ("cp_window_size", 1))
    ),
)
"""Models that TransformerEngineNPU may compute otherwise, without an error."""


def check_batching(context_size: int, context_algorithm: str, *, packing: bool) -> None:
    """Raise ConfigError for packed samples that are exchanged by all-to-all, which MindSpeed's table of TENPU leaves out."""
    if context_size > 1 and packing and context_algorithm == "ulysses":
        raise ConfigError(
            f"batching.packing with parallel.context={context_size} and parallel.context_algorithm: ulysses: "
            "TransformerEngineNPU packs no samples there; use ring"
        )


def import_mindspeed() -> None:
    """Import MindSpeed's adaptor, which patches on top of MegatronAdaptor."""
    optimizer: Any = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    load_state_dict = optimizer.load_state_dict
    ascend.guard_module_scan()
    with ascend.import_errors(MINDSPEED_ADAPTOR):
        import_module(MINDSPEED_ADAPTOR)
    # MindSpeed's method is older than Megatron's and refuses optimizer state that any layout can read (fully_reshardable).
    patch(optimizer, "load_state_dict", load_state_dict, "Megatron's own, in the place of MindSpeed's")


def require_engine(folder: Path) -> None:
    """Raise PlatformError unless ``transformer_engine`` in this process is TransformerEngineNPU, the package in ``folder``."""
    file = getattr(sys.modules[packages.TRANSFORMER_ENGINE], "__file__", None)
    if file is None or Path(file).parent != folder:
        raise PlatformError(
            f"transformer_engine in this process is {file}, not TransformerEngineNPU in {folder}: MegatronAdaptor put its "
            "placeholder there; start another process"
        )


def checkpoint(
    function: Any, distribute_saved_activations: bool, get_rng_state_tracker: Any, tp_group: Any, *args: Any
):
    """Recompute ``function`` with Megatron-Core's own function, under the signature of Transformer Engine's."""
    return import_module("megatron.core.tensor_parallel").checkpoint(function, distribute_saved_activations, *args)


@contextlib.contextmanager
def without_command_line() -> Iterator[None]:
    """Hide the program's command line within the context: the packages parse ``sys.argv`` when they are imported."""
    changed("sys.argv", "without arguments while MegatronAdaptor and MindSpeed are imported or patch again")
    command_line, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = command_line
