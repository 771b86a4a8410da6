"""Adapter to transformers: all its interfaces that this engine uses beyond calling models. Those for experts change often.

Tested with 5.10 and 5.23. Versions before 5 have experts as lists of modules, whose shards ranks would gather at different times:
a rank on which an expert has no token would wait for the others forever.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from megascend.changes import changed, patch
from megascend.engines.common import linear_attention
from megascend.engines.common.heads import (
    check_tied,
    model_class,
    not_plain,
    output_layer,
    tie_embeddings,
    without_bias,
)
from megascend.engines.common.transformers_names import persistent_tensors
from megascend.engines.common.vision import attention_of
from megascend.engines.fsdp import attention, experts
from megascend.engines.fsdp.expert_parallel import ExpertShare, compute_on_expert_ranks, keep_local_experts
from megascend.engines.fsdp.experts import Experts
from megascend.engines.fsdp.recomputation import saved_routing
from megascend.errors import CheckpointError, ConfigError, VersionError
from megascend.models import architecture_named
from megascend.models.base import IndexedAttention
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.padding_rows import restore_padding_rows
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.models.checkpoint_files.scalar_head import BIAS, ScalarHead
from megascend.training.kernels.npu import GroupedProduct

OLDEST = "5.10"
NAME = "megascend"
"""Name of our functions in transformers' registries."""
MASKED = "sdpa"
"""transformers' attention function for models with sparse attention, which they compute as a mask. transformers makes one from
positions: tokens see those of their own sample."""
EXPERT_PRODUCTS = "grouped_mm"
"""transformers' experts function for experts that :mod:`megascend.engines.fsdp.experts` does not compute; on every device."""
COMPUTED_BY = "_computed_by_megascend"
"""Attribute of an experts module: the function that computes it in place of :func:`grouped_experts`."""
SHARE = "_share_by_megascend"
"""Attribute of an experts module that holds a part of its layer's experts."""
GROUPED_MODULE, GROUPED_FUNCTION = "transformers.integrations.moe", "_grouped_mm"
"""transformers' grouped product, which torch_npu's operator replaces on NPUs."""


def check_version() -> None:
    """Raise VersionError for a version of transformers that lacks the interfaces used here."""
    import transformers

    if Version(transformers.__version__) < Version(OLDEST):
        raise VersionError(
            f"engine fsdp needs transformers {OLDEST} or newer (experts as fused parameters), found "
            f"{transformers.__version__}; pip install 'transformers>={OLDEST}'"
        )


def meta_model(
    model_dir: Path, tied: bool, scalar_head: ScalarHead | None = None, unsharded: torch.dtype | None = None
) -> Any:
    """Build the model of a directory's configuration on ``meta``, with tied parameters tied.

    Args:
        tied: the output layer is the embedding; overrides the configuration.
        scalar_head: head that replaces a causal language model's output layer, or None.
        unsharded: see :func:`engine_model`.
    """
    try:
        config = transformers_config(model_dir)
        tie_embeddings(config, tied)
        with torch.device("meta"):
            model = engine_model(config, scalar_head, unsharded=unsharded)
    except (OSError, ValueError, KeyError) as error:
        # ConfigError is a ValueError too.
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"model: transformers cannot build {model_dir}: {error}") from error
    check_tied(model, tied)
    if unsharded is None:
        _check_experts(model)
    return model


def engine_model(
    config: Any, scalar_head: ScalarHead | None = None, outputs: int | None = None, unsharded: torch.dtype | None = None
) -> Any:
    """Build the model of a configuration with this engine's attention and experts functions, tied parameters tied.

    Args:
        outputs: values per token of a scalar head; default: its labels.
        unsharded: the model will be on one rank, one sample a row. It then has transformers' own attention, and this dtype but
            for the tensors that transformers keeps in fp32. None: the shards of the parameters, and so the model, are fp32.
    """
    _register()
    config, cap = without_cap(config)
    kind = config.model_type
    indexed = IndexedAttention.from_config(config.get_text_config().to_dict()) is not None
    # Any architecture is causal over plain rows, so that one rank needs no attention of this engine.
    implementation = None
    if unsharded is None:
        implementation = MASKED if indexed else attention_of(NAME, architecture_named(kind).images)
    try:
        model = model_class(config, scalar_head, outputs).from_config(
            config, dtype=unsharded or torch.float32, attn_implementation=implementation
        )
    except (KeyError, ValueError) as error:
        if error.args == (NAME,):
            attention = "has its own attention classes instead of transformers' registry of attention functions"
        elif "does not support an attention implementation" in str(error):
            attention = "has transformers' eager attention only"
        else:
            raise
        raise ConfigError(
            f"engine fsdp: {kind} {attention}, so that the engine cannot keep samples apart; use engine single"
        ) from error
    model.logit_cap = cap
    linear_attention.check_activation(model)
    linear_attention.use_convolution_of_fla(model)
    linear_attention.compute_fp32_exactly(model)
    linear_attention.correct_steps(model)
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # else the row of pad_token_id, a token like any other, would have no gradient
    without_bias(model, scalar_head)
    head = output_layer(model)
    if (problem := not_plain(head, scalar_head)) is not None:
        biases = [
            name for name, value in config.get_text_config().to_dict().items() if "bias" in name and value is True
        ]
        settings = f" (settings of biases: {', '.join(biases)})" if biases else ""
        raise ConfigError(f"engine fsdp: {type(model).__name__} has {problem}{settings}, which no engine supports")
    if unsharded is None:
        _check_unshared_parameters(model)
    else:
        _keep_in_fp32(model, unsharded)
    if has_experts(model):
        use_experts(config, NAME, "experts keep their routing in recomputation")
    return model


def without_cap(config: Any) -> tuple[Any, float | None]:
    """Return a configuration whose model leaves the cap of its logits (Gemma's) to the head, and the cap or None."""
    from huggingface_hub.errors import StrictDataclassError

    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    if cap is None or "final_logit_softcapping" not in vars(type(text)()):  # others ignore the key
        return config, None
    uncapped = copy.deepcopy(config)
    try:
        uncapped.get_text_config().final_logit_softcapping = None
    except StrictDataclassError:  # a model that always caps (Inkling 2): refused by what its first pass returns
        return config, None
    return uncapped, cap


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Convert the tensors to fp32 that transformers loads in fp32 whatever dtype a model is loaded in."""
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.float()


def converted_tensors(model_dir: Path, info: ModelInfo, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as transformers loads them, fp32 on the CPU, by the model's names.

    Args:
        fresh: weights of a scalar head that are not in the checkpoint, and that the result has.
    """
    head = info.scalar_head
    try:
        config = transformers_config(model_dir)
        loader = model_class(config, head)
        if head is None:
            tie_embeddings(config, info.shape.tied)
        weights, files = None, dict[Path, Any]()
        if info.quantised:  # transformers dequantises on some devices only
            weights = {name: read_tensor(name, header, files) for name, header in info.tensors.items()}
        with _quiet(head is not None):
            model, report = loader.from_pretrained(
                None if info.quantised else model_dir,
                state_dict=weights,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {model_dir}: {error}") from error
    # Not in the files: a new head's weights, and the bias that transformers adds to any token classifier.
    expected = set() if head is None else {BIAS, *fresh} - (set() if head.fresh else {*head.names})
    for kind in ("missing_keys", "mismatched_keys"):
        if names := set(report[kind]) - expected:
            raise CheckpointError(
                f"model: {model_dir}: {kind.replace('_', ' ')}: {sorted(names)[:3]}: correct config.json, or fetch the files "
                "again"
            )
    # info.tensors leaves out those that no engine builds, such as heads of multi-token prediction.
    if unused := sorted(set(report["unexpected_keys"]) & set(info.tensors)):
        raise CheckpointError(
            f"{model_dir} holds tensors that the {type(model).__name__} of config.json has no place for: {abbreviated(unused)}: "
            "correct config.json, or remove the tensors"
        )
    restore_padding_rows(model, info.tensors)
    return persistent_tensors(model) | dict(fresh)


@contextlib.contextmanager
def _quiet(known_differences: bool) -> Iterator[None]:
    """Switch off transformers' progress bars, and with ``known_differences`` its report of missing weights."""
    from transformers.utils import logging

    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if known_differences:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()


def use_experts(config: Any, name: str, reason: str) -> None:
    """Set the experts function of a model's configuration, and of the language model's within it, which its experts read."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        # The public setter accepts only transformers' own names.
        patch(part, "_experts_implementation_internal", name, reason)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order: the modules that transformers lists in ``_no_split_modules``."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if not modules:
        raise ConfigError(
            f"engine fsdp: transformers does not name the layers of {type(model).__name__} (_no_split_modules); use another "
            "engine"
        )
    return modules


def _check_unshared_parameters(model: nn.Module) -> None:
    """Raise ConfigError for layers that share parameters: each layer is a separate FSDP unit."""
    names = {id(module): name for name, module in model.named_modules()}
    owner: dict[int, str] = {}
    for layer in layers(model):
        layer_name = names[id(layer)]
        for name, parameter in layer.named_parameters():
            first = owner.setdefault(id(parameter), f"{layer_name}.{name}")
            if not first.startswith(f"{layer_name}."):
                raise ConfigError(
                    f"engine fsdp: {type(model).__name__} shares {first} with {layer_name}, but each layer is sharded "
                    "separately; use engine single"
                )


def has_experts(model: nn.Module) -> bool:
    """Check whether a model has experts that are fused into parameters."""
    return any(is_fused_experts(module) for module in model.modules())


def names_of_experts(model: nn.Module) -> list[str]:
    """Return the names of the parameters of fused experts."""
    modules = ((name, module) for name, module in model.named_modules() if is_fused_experts(module))
    return [f"{name}.{key}" for name, module in modules for key, _ in module.named_parameters()]


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on ``meta`` on a device, uninitialised; shared ones stay shared."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in allocated:
                values = torch.empty_like(parameter, device=device)
                allocated[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[name] = allocated[id(parameter)]


def compute_buffers(model: Any, device: torch.device) -> None:
    """Allocate buffers on ``device``, and compute the non-persistent ones (rotary frequencies) as transformers does."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            # Uninitialised memory could hold plausible numbers by chance; a marker shows what nobody has computed.
            module._buffers[name] = torch.full_like(buffer, _unset(buffer.dtype), device=device)
        if buffers and module._non_persistent_buffers_set:
            _initialise_buffers(model, module)
    persistent = set(model.state_dict())
    missing = [name for name in _not_computed(model) if name not in persistent]
    for owner in dict.fromkeys(outer for name in missing for outer in _modules_around(name)):
        _initialise_buffers(model, model.get_submodule(owner))  # some compute the buffers of their submodules
    missing = [name for name in _not_computed(model) if name in missing] or _switches_not_computed(model)
    if missing:
        raise ConfigError(
            f"engine fsdp: transformers does not compute the buffer {missing[0]} of {type(model).__name__}; use engine single"
        )


def _unset(dtype: torch.dtype) -> float | int | bool:
    """Return the marker value of a buffer that has not been computed."""
    if dtype == torch.bool:
        return False
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _not_computed(model: nn.Module) -> list[str]:
    """Return the names of buffers that contain the marker."""

    def is_unset(buffer: Tensor) -> bool:
        if buffer.dtype == torch.bool:
            return False
        unset = buffer.isnan() if buffer.is_floating_point() or buffer.is_complex() else buffer == _unset(buffer.dtype)
        return bool(unset.any())

    return [name for name, buffer in model.named_buffers() if is_unset(buffer)]


def _switches_not_computed(model: nn.Module) -> list[str]:
    """Initialise the non-persistent bool buffers from True and from False; return the names of those that end different.

    No bool value can mark a buffer as not computed; one that keeps its start value was not.
    """
    persistent = set(model.state_dict())
    names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool and name not in persistent]
    owners = dict.fromkeys(owner for name in names for owner in (name.rpartition(".")[0], *_modules_around(name)))
    outcomes: list[list[Tensor]] = []
    for start in (True, False):
        for name in names:
            model.get_buffer(name).fill_(start)
        for owner in owners:
            _initialise_buffers(model, model.get_submodule(owner))
        # A copy: the next pass overwrites the buffers.
        outcomes.append([model.get_buffer(name).clone() for name in names])
    return [name for name, first, second in zip(names, *outcomes, strict=True) if not torch.equal(first, second)]


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules that contain a buffer's module, innermost first."""
    parts = name.split(".")[:-2]
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _initialise_buffers(model: Any, module: nn.Module) -> None:
    """Initialise a module's buffers by transformers' ``_init_weights``.

    Its parameters are replaced for the call: they are DTensors, to which ``_init_weights`` cannot write.
    """
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        if parameter is not None:
            scratch = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module._parameters[name] = nn.Parameter(scratch, requires_grad=False)
    try:
        with torch.no_grad():
            model._init_weights(module)
    finally:
        module._parameters.update(parameters)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention.attention)
    # Without a mask function of that name transformers builds no mask, and does not look for packed samples, which would make
    # the host wait for the device.
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    changed(f"transformers' registries of attention and experts functions know {NAME!r}")


def grouped_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts by grouped products, ours for plain gated experts, else transformers' own."""
    from transformers.integrations import moe

    if experts.is_plain_gated(module):
        # Looked up at every call, since platforms may replace it.
        return experts.grouped_experts(module, hidden, index, weights, moe._grouped_mm)
    return moe.ALL_EXPERTS_FUNCTIONS[EXPERT_PRODUCTS](module, hidden, index, weights)


def divide_experts(model: nn.Module, share: ExpertShare) -> None:
    """Reduce a model on ``meta`` to this rank's experts, and exchange tokens with the ranks that hold the others."""
    keep_local_experts(model, share.size, is_fused_experts)
    for module in filter(is_fused_experts, model.modules()):
        setattr(module, SHARE, share)


def compute_experts_by(module: nn.Module, function: Experts, token_adapters: Callable[[], Tensor | None]) -> None:
    """Compute fused experts by ``function`` in place of :func:`grouped_experts`.

    Args:
        token_adapters: called in every forward pass; returns the adapter of each token, int64 [n], which is sent with the token
            and passed to ``function`` as ``row_adapters``; or None, on all ranks.
    """
    setattr(module, COMPUTED_BY, (function, token_adapters))


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    index, weights = saved_routing(top_k_index), saved_routing(top_k_weights)
    compute, get_token_adapters = getattr(module, COMPUTED_BY, (grouped_experts, None))
    token_adapters = None if get_token_adapters is None else get_token_adapters()
    share: ExpertShare | None = getattr(module, SHARE, None)
    if share is not None:
        return compute_on_expert_ranks(module, hidden_states, index, weights, share, compute, token_adapters)
    options = {} if token_adapters is None else {"row_adapters": token_adapters}
    return compute(module, hidden_states, index, weights, **options)


def is_fused_experts(module: nn.Module) -> bool:
    """Check whether transformers' ``use_experts_implementation`` has decorated a module."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _check_experts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if re.search(r"(^|\.)experts$", name) and not is_fused_experts(module):
            raise ConfigError(
                f"engine fsdp: {name} of {type(model).__name__} is a {type(module).__name__} that takes no experts function; "
                "ranks would gather its shards at different times. Use another engine"
            )


def use_grouped_operator() -> None:
    """Replace the product of transformers' grouped experts by torch_npu's operator.

    On a device without a kernel torch's own product is one call per expert, after a wait for the groups' sizes; before torch
    2.10 it does not exist.
    """
    module: Any = import_module(GROUPED_MODULE)
    if not hasattr(module, GROUPED_FUNCTION):
        raise VersionError(
            f"engine fsdp on NPUs replaces {GROUPED_MODULE}.{GROUPED_FUNCTION}, which transformers "
            f"{import_module('transformers').__version__} does not have; install 5.10 to 5.23"
        )
    patch(module, GROUPED_FUNCTION, _npu_grouped, "experts' products are torch_npu's grouped operator")


def _npu_grouped(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply [n, k] by [experts, k, m], given the ends of the experts' rows, to [n, m]; names are transformers'."""
    rows = input.to(weight.dtype)
    if not len(rows):  # the operator takes no empty factors; the gradients are 0
        return rows @ weight[0]
    return GroupedProduct.apply(rows, weight, offs)  # type: ignore[reportReturnType]
