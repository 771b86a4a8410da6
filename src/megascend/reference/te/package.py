"""The modules of the reference ``transformer_engine`` package and their contents.

It has every public name of the real package (``scripts/te_names.py`` lists them), except modules in
:data:`.unsupported.LEFT_OUT`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from megascend.changes import add_modules
from megascend.errors import ImportOrderError, PlatformError
from megascend.reference.te import unsupported
from megascend.reference.te.unsupported import refuse, unavailable

VERSION = "2.8.0"  # satisfies megatron-core's version checks; there is no distribution metadata
ROOT = "transformer_engine"
MUST_COME_LATER = ("megatron.core", "mcore_bridge", ROOT)
MARK = "__megascend_reference__"


def is_installed() -> bool:
    """Check whether ``transformer_engine`` in this process is the reference implementation."""
    return hasattr(sys.modules.get(ROOT), MARK)


def install(force: bool = False) -> list[str]:
    """Make the reference layers importable as ``transformer_engine``; return a line for each change. Idempotent.

    ``force``: replace a real Transformer Engine even if it could run.
    """
    if is_installed():
        return []
    # Megatron-Core chooses its layer classes at import, by whether transformer_engine can be imported; later is too late.
    early = [name for name in MUST_COME_LATER if name in sys.modules]
    if early:
        raise ImportOrderError(
            f"already imported: {', '.join(early)}. The reference Transformer Engine must be in place before them: "
            "call megascend.bootstrap() first, at the top of the program"
        )
    changes = []
    if importlib.util.find_spec(ROOT) is not None:
        import torch

        # Hiding a fast implementation that works would look like a slow run, not like a mistake.
        if torch.cuda.is_available() and not force:
            raise PlatformError(
                "a real transformer_engine is installed and CUDA is available: use platform 'cuda', or ask for the "
                "reference implementation with force=True"
            )
        changes.append(f"{ROOT}: the installed package is hidden")
    modules = build_modules()
    setattr(modules[ROOT], MARK, True)
    sys.modules.update(modules)
    changes.append(f"{ROOT} {VERSION}: megascend's reference layers in plain PyTorch ({len(modules)} modules)")
    return changes


def build_modules() -> dict[str, ModuleType]:
    """Build all modules, by full name, each an attribute of its parent. Imports torch and the layers."""
    modules: dict[str, ModuleType] = {}
    # The ImportError for a missing name quotes __file__.
    contents = {
        name: {**attributes, "__file__": __file__, "__getattr__": _absent(name)}
        for name, attributes in _contents().items()
    }
    add_modules(contents, "megascend.reference.te", modules=modules)
    return modules


def _absent(module: str) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``: a missing name raises AttributeError, as probing programs expect, and is explained."""

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"megascend's reference Transformer Engine has no {module}.{name}; the real one, on CUDA, may have it"
        )

    return __getattr__


def _contents() -> dict[str, dict[str, Any]]:
    """Return the contents of each module, parents before children."""
    from megascend.reference.te import attention, base, fp8, linear, norms, optimizers, rope

    quantized = unsupported.classes(unsupported.QUANTIZED, unsupported.FP8)
    quantized_functions = unsupported.functions(unsupported.QUANTIZED_FUNCTIONS, unsupported.FP8)
    implemented = (linear.Linear, linear.LayerNormLinear, linear.GroupedLinear, norms.RMSNorm, norms.LayerNorm)
    unsupported_layers = unsupported.classes(unsupported.LAYERS)
    layers = {layer.__name__: layer for layer in (*implemented, fp8.Fp8Padding, fp8.Fp8Unpadding)}
    layers["LayerNormMLP"] = unsupported_layers["LayerNormMLP"]
    overlap = unsupported.functions(("initialize_ub", "destroy_ub"), unsupported.OVERLAP)
    overlap |= unsupported.classes(("UserBufferQuantizationMode",), unsupported.OVERLAP)
    recompute = {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": unavailable("te_checkpoint", unsupported.FP8),
    }
    recipes = {recipe.__name__: recipe for recipe in fp8.CLASSES}
    contexts = (fp8.fp8_autocast, fp8.autocast, fp8.fp8_model_init, fp8.quantized_model_init)
    kinds = ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
    switches = {
        **{context.__name__: context for context in contexts},
        **{f"is_{kind}_available": fp8.is_available for kind in kinds},
    }
    recipe_functions = unsupported.functions(unsupported.RECIPE_FUNCTIONS, unsupported.FP8)
    quantization = {
        "FP8GlobalStateManager": fp8.FP8GlobalStateManager,
        **switches,
        **recipe_functions,
        **unsupported.classes(unsupported.RECIPE_STATES, unsupported.FP8),
        **{name: recipe for name, recipe in recipes.items() if name not in ("MMParams", "QParams")},
        **dict.fromkeys(
            ("check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support", "check_nvfp4_support"),
            fp8.check_support,
        ),
    }
    return {
        ROOT: {"__version__": VERSION},
        f"{ROOT}.common": {},
        f"{ROOT}.common.recipe": recipes,
        f"{ROOT}.pytorch": {
            **layers,
            **unsupported_layers,
            "DotProductAttention": attention.DotProductAttention,
            **recompute,
            **switches,
            "get_default_recipe": recipe_functions["get_default_recipe"],
            "is_bf16_available": fp8.is_bf16_available,
            **quantized,
            **quantized_functions,
            **overlap,
            **unsupported.functions(unsupported.PERMUTATION, "moe_permute_fusion"),
            **unsupported.functions(unsupported.CUDA_FUNCTIONS),
            "make_graphed_callables": unavailable("make_graphed_callables", "cuda_graph_impl"),
            "parallel_cross_entropy": unavailable("parallel_cross_entropy", "cross_entropy_fusion_impl='te'"),
        },
        f"{ROOT}.pytorch.module": {**layers, **overlap},
        f"{ROOT}.pytorch.module.base": {"TransformerEngineBaseModule": base.ReferenceModule, **overlap},
        f"{ROOT}.pytorch.fp8": quantization,
        f"{ROOT}.pytorch.quantization": quantization,
        f"{ROOT}.pytorch.attention": {
            "DotProductAttention": attention.DotProductAttention,
            **{
                name: layer
                for name, layer in unsupported_layers.items()
                if name not in ("LayerNormMLP", "TransformerLayer")
            },
            "apply_rotary_pos_emb": rope.apply_rotary_pos_emb,
            "_SplitAlongDim": SplitAlongDim,
        },
        # Without apply_fused_qkv_rotary_pos_emb, so that megatron-core itself refuses fused_single_qkv_rope.
        f"{ROOT}.pytorch.attention.rope": {"apply_rotary_pos_emb": rope.apply_rotary_pos_emb},
        f"{ROOT}.pytorch.distributed": {
            **recompute,
            "activation_recompute_forward": fp8.activation_recompute_forward,
        },
        f"{ROOT}.pytorch.ops": unsupported.classes(unsupported.OPS, unsupported.OPERATIONS),
        f"{ROOT}.pytorch.router": {
            **unsupported.functions(unsupported.ROUTING, unsupported.ROUTER),
            **unsupported.classes(unsupported.ROUTING_CLASSES, unsupported.ROUTER),
        },
        f"{ROOT}.pytorch.tensor": {**quantized, **quantized_functions},
        f"{ROOT}.pytorch.optimizers": {
            "FusedAdam": optimizers.FusedAdam,
            "FusedSGD": optimizers.FusedSGD,
            "multi_tensor_applier": optimizers.multi_tensor_applier,
            "multi_tensor_l2norm": optimizers.multi_tensor_l2norm,
            "multi_tensor_scale": optimizers.multi_tensor_scale,
            **unsupported.classes(("MultiTensorApply",)),
            **unsupported.functions(unsupported.MULTI_TENSOR),
        },
    }


class CudaRNGStatesTracker:
    """Placeholder that refuses construction, which only happens with the unsupported setting ``te_rng_tracker``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("te_rng_tracker", "use megatron-core's own tracker (te_rng_tracker=False)")


class SplitAlongDim:
    """Split a tensor along a dimension into views; called through ``apply`` like an autograd function."""

    @staticmethod
    def apply(tensor: Any, dim: int, sizes: Any, squeeze: bool = False) -> tuple[Any, ...]:
        pieces = tensor.split(sizes, dim=dim)
        return tuple(piece.squeeze(dim) for piece in pieces) if squeeze else tuple(pieces)
