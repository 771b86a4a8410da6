"""``python contract_report.py SCENARIO``: facts about the ``mindspeed`` on the path, as JSON on the last line of stdout.

A helper of ``test_contract.py``. Patching is process-wide, so each scenario is a process of its own:

- ``patched``: arguments seeded, the adaptor imported first, repatched many times;
- ``ring``: context parallelism known before the adaptor is imported, two fake ranks;
- ``late``: Megatron imported before the adaptor.

It runs the interface as megascend's bootstrap does, without megascend.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

EXTENSIONS = "megatron.core.extensions.transformer_engine"
OWNED = (
    # names that megascend requires to be replaced, or not to be
    f"{EXTENSIONS}.TEColumnParallelLinear",
    f"{EXTENSIONS}.TEDotProductAttention",
    f"{EXTENSIONS}.TEGroupedLinear",
    f"{EXTENSIONS}.TELayerNormColumnParallelLinear",
    f"{EXTENSIONS}.TELinear",
    f"{EXTENSIONS}.TENorm",
    f"{EXTENSIONS}.TERowParallelLinear",
    "megatron.core.jit.jit_fuser",
    "megatron.core.models.common.embeddings.rope_utils.apply_rotary_pos_emb",
    "megatron.core.models.gpt.gpt_layer_specs.LNImpl",
    "megatron.core.models.gpt.gpt_layer_specs.TENorm",
    "megatron.core.optimizer.Adam",
    "megatron.core.optimizer.clip_grads.l2_norm_impl",
    "megatron.core.optimizer.clip_grads.multi_tensor_scale_impl",
    "megatron.core.optimizer.distrib_optimizer.Adam",
    "megatron.core.optimizer.optimizer.multi_tensor_scale_impl",
    "megatron.core.parallel_state.destroy_model_parallel",
    "megatron.core.parallel_state.initialize_model_parallel",
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "megatron.core.tensor_parallel.layers.RowParallelLinear",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "torch.compile",
    "torch.cuda.get_device_capability",
    "torch.jit.script",
)
FLAGS = (
    f"{EXTENSIONS}.HAVE_TE",
    "megatron.core.models.gpt.gpt_layer_specs.HAVE_TE",
    "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
    "megatron.core.transformer.moe.experts.HAVE_TE",
)


def look(name: str) -> Any:
    """Return the object behind a dotted name: a module's attribute."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute, "absent")


def owner(value: Any) -> str:
    """Return the top package that an object belongs to; look through wrappers with ``__wrapped__``."""
    if isinstance(value, str):
        return value
    chain = [value]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    # functools.wraps copies __module__, so a wrapper can only be recognised by the file of its code
    home = str(Path(str(import_module("mindspeed").__file__)).parent)
    if any(code is not None and code.co_filename.startswith(home) for code in map(_code, chain)):
        return "mindspeed"
    return str(getattr(value, "__module__", None)).partition(".")[0]


def owners() -> dict[str, str]:
    return {name: owner(look(name)) for name in OWNED}


def fingerprint() -> dict[str, str]:
    """Describe the value of every patched name and every global of Megatron's modules; equal functions have equal texts."""
    contents: dict[str, str] = {}
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] not in ("megatron", "torch", "transformer_engine", "apex", "amp_C"):
            continue
        for attribute, value in vars(module).copy().items():
            if callable(value):
                contents[f"{name}.{attribute}"] = _describe(value)
    for name, patch in import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info.items():
        if patch.orig_func_name is not None and patch.orig_module is not None:
            contents[name] = _describe(getattr(patch.orig_module, patch.orig_func_name))
    return contents


def _code(value: Any) -> CodeType | None:
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _describe(value: Any) -> str:
    parts = []
    for _ in range(10):  # a chain that grows with every repatch grows the text, up to here
        code = _code(value)
        location = (
            f"{code.co_filename}:{code.co_firstlineno}" if code else f"{type(value).__module__}.{type(value).__name__}"
        )
        parts.append(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}@{location}")
        try:
            value = vars(value)["__wrapped__"]
        except (TypeError, KeyError):
            break
    return " > ".join(parts)


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of ``before`` whose values changed."""
    return sorted(name for name, value in before.items() if after.get(name) != value)


def import_megatron() -> None:
    for module in ("models.gpt.gpt_layer_specs", "models.gpt", "optimizer", "transformer.moe.moe_layer"):
        import_module(f"megatron.core.{module}")


def seed(**arguments: Any) -> Any:
    """Seed the runtime arguments as the bootstrap does, and return them."""
    from mindspeed import args_utils

    seeded = args_utils.get_mindspeed_args(get_defaults=True)
    for name, value in ({"optimization_level": 0, "use_flash_attn": True} | arguments).items():
        setattr(seeded, name, value)
    args_utils._MINDSPEED_ARGS = seeded
    return seeded


def patched() -> dict[str, Any]:
    import contract_attention as attention
    import contract_interface as interface
    import contract_process as process

    facts: dict[str, Any] = {
        "signatures": {name: interface.signature(name) for name in interface.CALLABLES},
        "arguments": interface.arguments(),
        "patch_manager": interface.patch_manager(),
        "lazy_modules_hook": interface.lazy_modules_hook(),
    }
    handler = logging.NullHandler()
    logging.getLogger().handlers[:] = [handler]
    sys.argv = ["train.py", "-h", "--optimization-level", "3"]
    seeded = seed(contract_key="seeded")
    adaptor = import_module("mindspeed.megatron_adaptor")
    from mindspeed import args_utils

    facts["signatures"]["megatron_adaptor.repatch"] = interface.signature("megatron_adaptor.repatch")
    facts["seeding"] = {
        "kept": args_utils.get_full_args() is seeded,
        "command_line_untouched": sys.argv[1:] == ["-h", "--optimization-level", "3"],
    }
    facts["root_logging"] = process.root_logging(handler)
    import_megatron()
    facts["owners"] = owners()
    facts["flags"] = {name: look(name) for name in FLAGS}
    facts["process"] = process.side_effects()
    facts["config"] = process.configuration()
    facts["optimizer"] = process.optimizer()
    facts["repatch"] = process.repatching(adaptor, fingerprint, changed)
    facts["attention"] = attention.classes(adaptor)
    facts["attention_calls"] = attention.calls()
    facts["owners_at_the_end"] = owners()
    return facts


def ring() -> dict[str, Any]:
    import contract_process as process

    seed(context_parallel_size=2, context_parallel_algo="megatron_cp_algo", optimization_level=2)
    import_module("mindspeed.megatron_adaptor")
    import_megatron()
    return {"owners": owners(), "groups": process.ring_groups()}


def late() -> dict[str, Any]:
    import_megatron()
    seed()
    import_module("mindspeed.megatron_adaptor")
    return {"owners": owners(), "flags": {name: look(name) for name in FLAGS}}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {"patched": patched, "ring": ring, "late": late}

if __name__ == "__main__":
    report = SCENARIOS[sys.argv[1]]()
    print(json.dumps(report, sort_keys=True))
