"""Facts about a process that MindSpeed has patched. Part of ``contract_report.py``; see there."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import pickle
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch

TE = "megatron.core.extensions.transformer_engine"
REPEATS = 10
DUMMIES = ("transformer_engine.pytorch", "apex.optimizers", "amp_C", "flash_attn.flash_attn_interface")


def root_logging(handler: logging.Handler) -> dict[str, Any]:
    root = logging.getLogger()
    return {
        "our_handler_is_gone": handler not in root.handlers,
        "handlers": [type(handler).__name__ for handler in root.handlers],
        "level": logging.getLevelName(root.level),
    }


def side_effects() -> dict[str, Any]:
    """Return the import's changes outside Megatron."""
    on_device = torch.arange(6.0, device="npu").reshape(2, 3)
    return {
        "transformer_engine_version": metadata.version("transformer-engine"),
        "dummies_have_no_loader": {name: import_module(name).__spec__.loader is None for name in DUMMIES},
        "compile_passes_through": torch.compile(_twice)(2) == 4 and torch.compile(dynamic=True)(_twice)(2) == 4,
        "type_of_device_tensor": on_device.type(),
        "view_of_transposed": on_device.t().view(-1).tolist(),
        "capability_parameters": list(inspect.signature(torch.cuda.get_device_capability).parameters),
        "capability": list(torch.cuda.get_device_capability()),
        "all_reduce": _all_reduce(),
    }


def _twice(number: int) -> int:
    return 2 * number


def _all_reduce() -> dict[str, Any]:
    """Return the result of an all_reduce that adds one, called through the registered wrappers, by dtype."""
    info = import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info["torch.distributed.all_reduce"]
    observed = []

    def adding_one(tensor: torch.Tensor, **kwargs: Any) -> None:
        observed.append(str(tensor.dtype))
        tensor += 1

    all_reduce: Callable[..., Any] = adding_one
    for wrapper in info.wrappers:
        all_reduce = wrapper(all_reduce)
    results = {}
    for dtype in (torch.float32, torch.float64):
        tensor = torch.zeros(1, dtype=dtype)
        all_reduce(tensor)
        results[str(dtype)] = tensor.item()
    return {"wrappers": [wrapper.__name__ for wrapper in info.wrappers], "results": results, "reduced_as": observed}


def configuration() -> dict[str, Any]:
    """Return facts about runtime arguments in a TransformerConfig, and about the side effects."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from mindspeed import args_utils

    args_utils._MINDSPEED_ARGS.hidden_dropout = 0.25  # a field
    size = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    config = TransformerConfig(**size)
    args_utils._MINDSPEED_ARGS.contract_key = "at subclassing"

    @dataclasses.dataclass
    class Subclass(TransformerConfig):
        extra: int = 1

    args_utils._MINDSPEED_ARGS.contract_key = "later"
    subclassed = Subclass(**size)
    args_utils._MINDSPEED_ARGS.contract_key = "seeded"
    del args_utils._MINDSPEED_ARGS.hidden_dropout
    return {
        "class_of_its_own": type(config) is not TransformerConfig and isinstance(config, TransformerConfig),
        "name": type(config).__name__,
        "argument_becomes_field": config.hidden_dropout,
        "argument_wins_over_nothing_given": TransformerConfig(**size, hidden_dropout=0.5).hidden_dropout,
        "other_arguments_become_attributes": config.contract_key,
        "pickles": _works(lambda: pickle.loads(pickle.dumps(config))),
        "replaces": _works(lambda: dataclasses.replace(config, hidden_size=32)),
        "subclass_keeps_its_moment": subclassed.contract_key,
        "subclass_takes_it_as_a_field": _works(lambda: Subclass(**size, contract_key="given")),
        "subclass_argument_becomes_field": subclassed.hidden_dropout,
    }


def _works(fn: Callable[[], Any]) -> bool:
    try:
        fn()
    except (TypeError, ValueError, AttributeError, pickle.PicklingError):
        return False
    return True


def optimizer() -> dict[str, Any]:
    """Compare megatron-core's Adam on the device with torch's AdamW on the CPU."""
    adam = import_module("megatron.core.optimizer").Adam
    start, settings = torch.linspace(-1, 1, 7), {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    parameter, reference = (torch.nn.Parameter(start.clone().to(device)) for device in ("npu", "cpu"))
    optimizers = [adam([parameter], **settings), torch.optim.AdamW([reference], **settings)]
    for step in range(3):
        grad = torch.linspace(2, -1, 7) * (step + 1)
        parameter.grad, reference.grad = grad.to("npu"), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {
        "class": adam.__name__,
        "as_torch_adamw": torch.allclose(parameter.detach().cpu(), reference.detach(), rtol=1e-5, atol=1e-6),
        "state": sorted(optimizers[0].state[parameter]),
        "step_in_group": int(optimizers[0].param_groups[0].get("step", -1)),
    }


def repatching(
    adaptor: Any, fingerprint: Callable[[], dict[str, str]], changed: Callable[..., list[str]]
) -> dict[str, Any]:
    """Return facts about repatching: idempotence, reversibility, kept arguments, and appended features."""
    from mindspeed import args_utils
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    adaptor.repatch({})
    before, table = fingerprint(), len(Manager.patches_info)
    for _ in range(REPEATS):
        adaptor.repatch({})
    facts: dict[str, Any] = {
        "left_by_repeats": changed(before, fingerprint()),
        "table_grew_by_repeats": len(Manager.patches_info) - table,
    }
    for arguments in ({"optimization_level": 1}, {"optimization_level": 2}, {"context_parallel_size": 2}):
        adaptor.repatch(arguments)
    away = fingerprint()
    facts["changed_by_context_parallelism"] = [
        name for name in changed(before, away) if name in (f"{TE}.TEDotProductAttention", _PARALLEL)
    ]
    adaptor.repatch({"context_parallel_size": 1, "optimization_level": 0})
    facts["left_by_going_there_and_back"] = changed(before, fingerprint())
    adaptor.repatch({"contract_other_key": 1})
    adaptor.repatch({})
    facts["arguments_stay"] = getattr(args_utils.get_full_args(), "contract_other_key", None)
    args_utils._MINDSPEED_ARGS = args_utils.get_mindspeed_args(get_defaults=True)
    adaptor.repatch({"optimization_level": 0, "use_flash_attn": True})
    facts["arguments_go_with_the_namespace"] = not hasattr(args_utils.get_full_args(), "contract_other_key")
    return facts | _own_feature(adaptor)


_PARALLEL = "megatron.core.parallel_state.initialize_model_parallel"


def _own_feature(adaptor: Any) -> dict[str, Any]:
    """Check that a feature appended to the list wins in every repatch until it is removed."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from mindspeed.features_manager.feature import MindSpeedFeature
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    class AppendedFeature(MindSpeedFeature):
        def __init__(self) -> None:
            super().__init__("Contract-Feature ", optimization_level=0)

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            patch_manager.register_patch(f"{TE}.TERowParallelLinear", RowParallelLinear, force_patch=True)

    extensions = import_module(TE)
    original = extensions.TERowParallelLinear
    feature = AppendedFeature()
    MindSpeedFeaturesManager.FEATURES_LIST.append(feature)
    active = []
    for _ in range(2):
        adaptor.repatch({})
        active.append(extensions.TERowParallelLinear is RowParallelLinear)
    MindSpeedFeaturesManager.FEATURES_LIST.remove(feature)
    adaptor.repatch({})
    return {
        "feature_name": feature.feature_name,
        "own_feature_in_force": active,
        "own_feature_gone": extensions.TERowParallelLinear is original,
    }


def ring_groups() -> dict[str, Any]:
    """Return the ring's process groups on rank 0 of two fake ranks, before, during and after Megatron's groups."""
    from megatron.core import parallel_state
    from mindspeed.core.context_parallel import model_parallel_utils as groups
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    facts: dict[str, Any] = {"before": _ranks(groups.get_ring_ranks_for_intra_window)}
    parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
    group = groups.get_ring_group_for_intra_window()
    facts["window"] = _ranks(groups.get_ring_ranks_for_intra_window)
    facts["across_windows"] = _ranks(groups.get_ring_ranks_for_inter_window_kv)
    facts["group_of_the_window"] = torch.distributed.get_process_group_ranks(group)
    facts["group_is_not_megatrons"] = group is not parallel_state.get_context_parallel_group()
    facts["overlap"] = _ranks(parallel_state.get_context_parallel_group_for_send_recv_overlap)
    parallel_state.destroy_model_parallel()
    facts["megatrons_are_destroyed"] = parallel_state.model_parallel_is_initialized() is False
    return facts


def _ranks(get: Callable[[], Any]) -> Any:
    try:
        return list(get())
    except AssertionError:
        return "AssertionError"
