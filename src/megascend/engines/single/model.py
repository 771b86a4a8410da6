"""Load transformers' model of a directory, check that it is complete, and stream its weights under checkpoint names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.config import Moe
from megascend.engines.common.heads import check_tied, model_class, not_plain, tie_embeddings, without_bias
from megascend.engines.common.transformers_names import as_stored, in_checkpoint, layer_of, persistent_tensors
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.padding_rows import restore_padding_rows
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.models.checkpoint_files.scalar_head import BIAS
from megascend.reference.reductions import out_of_range
from megascend.training.batch.micro_batch import MicroBatch

HEAD_BOUND = 1e-2
"""Largest difference of the plain product's logits from the model's, relative to their maximum: bf16 rounding."""
ROUTER_LOSS = "load_balancing_loss_func"
"""transformers' function for the load-balancing loss, in the modules of its mixture-of-experts models."""


def model_config(model_dir: Path) -> Any:
    """Return the configuration of a directory, in transformers' class; CheckpointError if transformers cannot load it."""
    try:
        return transformers_config(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {model_dir}: {error}") from error


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    info: ModelInfo,
    fresh: Mapping[str, Tensor] | None = None,
) -> Any:
    """Load transformers' model of a directory with all its weights.

    Args:
        info: description of the checkpoint in the directory.
        fresh: weights of a scalar head that are not in the checkpoint.
    """
    head = info.scalar_head
    config = model_config(model_dir)
    loader = model_class(config, head)
    try:
        if head is None:
            tie_embeddings(config, info.shape.tied)
        with _no_progress_bars(known_differences=head is not None):
            # transformers dequantises on some devices only.
            weights, files = None, dict[Path, Any]()
            if info.quantised:
                weights = {name: read_tensor(name, header, files) for name, header in info.tensors.items()}
            model, report = loader.from_pretrained(
                None if info.quantised else model_dir,
                state_dict=weights,
                config=config,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {model_dir}: {error}") from error
    # Not in the files: a new head's weights, and the bias that transformers adds to any token classifier.
    expected = set() if head is None else {BIAS, *(fresh or {})} - (set() if head.fresh else {*head.names})
    for kind in ("missing_keys", "mismatched_keys"):
        if names := set(report[kind]) - expected:
            raise CheckpointError(
                f"model: {model_dir}: {kind.replace('_', ' ')}: {sorted(names)[:3]}: correct config.json, or "
                "fetch the files again"
            )
    # info.tensors leaves out those that no engine builds, such as heads of multi-token prediction.
    if unused := sorted(set(report["unexpected_keys"]) & set(info.tensors)):
        raise CheckpointError(
            f"{model_dir} holds tensors that the {type(model).__name__} of config.json has no place for: {abbreviated(unused)}: "
            "correct config.json, or remove the tensors"
        )
    restore_padding_rows(model, info.tensors)
    if head is None:
        check_tied(model, info.shape.tied)
    without_bias(model, head)
    with torch.no_grad():
        for name, values in (fresh or {}).items():
            model.get_parameter(name).copy_(values)
    if dtype == torch.float16:  # transformers has converted larger numbers to infinity silently
        _check_range(info)
    return model.to(device)


def _check_range(info: ModelInfo) -> None:
    """Raise CheckpointError for a stored number that is infinite in fp16."""
    files: dict[Path, Any] = {}
    for name, header in info.tensors.items():
        if header.file is not None and (problem := out_of_range(name, read_tensor(name, header, files))):
            raise CheckpointError(f"model: {header.file}: {problem}")


@contextlib.contextmanager
def _no_progress_bars(*, known_differences: bool = False) -> Iterator[None]:
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


def hidden_states(model: Any, input_ids: Tensor, position_ids: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
    """Return (hidden states [batch, sequence, h] after the last norm, the base model's output). Causal; padding comes last."""
    # use_cache=False: transformers would otherwise keep keys and values of every layer, which this engine does not
    # read.
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
    return output.last_hidden_state, output


def plain_head(model: Any) -> Any:
    """Return the output layer of a model, which may be on ``meta``; ConfigError if it is more than a product."""
    head = model.get_output_embeddings()
    if (problem := not_plain(head, None)) is not None:
        raise ConfigError(f"engine single: {type(model).__name__} has {problem}, which no engine supports")
    return head


def check_plain_head(model: Any, vocab_size: int) -> None:
    """Compare the output layer's plain product with the model's own logits, for a few tokens."""
    head = plain_head(model)
    products: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: products.append(output))
    try:
        with torch.no_grad():
            tokens = torch.arange(min(4, vocab_size), device=head.weight.device)[None]
            hidden = hidden_states(model, tokens, None)[0]
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            plain = torch.nn.functional.linear(hidden, head.weight).float()
    finally:
        hook.remove()
    # Relative to the largest logit, since bf16 rounds in proportion; the floor keeps logits that are all 0 from dividing by 0.
    difference = float((logits - plain).abs().max() / logits.abs().max().clamp_min(1e-6))
    if len(products) != 1 or not torch.equal(products[0].float(), logits):
        raise ConfigError(
            f"engine single: {type(model).__name__} changes its logits after the output layer (a cap or a scale in its "
            "configuration?), which no engine supports"
        )
    if not difference <= HEAD_BOUND:
        raise ConfigError(
            f"engine single: the logits of {type(model).__name__} are not its last hidden states times its output layer "
            f"(relative difference {difference:.3g}, at most {HEAD_BOUND})"
        )


def check_router_loss(model: Any, moe: Moe, *, frozen: bool, recomputed: bool) -> None:
    """Raise ConfigError for ``moe`` settings that this engine or this model does not support."""
    if moe.aux_loss == "none":
        return
    if moe.aux_loss != "transformers":
        raise ConfigError(f"engine single: moe.aux_loss={moe.aux_loss!r} is not supported; set transformers or none")
    if not hasattr(sys.modules[type(model).__module__], ROUTER_LOSS):
        raise ConfigError(
            f"engine single: moe.aux_loss is set, but transformers has no such loss for {type(model).__name__}; set none"
        )
    if frozen or recomputed:
        reason = "the model is frozen (adapters)" if frozen else "recompute.granularity is full"
        raise ConfigError(f"engine single: moe.aux_loss={moe.aux_loss!r} does not work where {reason}; set none")


def router_loss(model: Any, output: Any, batch: MicroBatch) -> Tensor:
    """Compute transformers' load-balancing loss of one micro batch over its samples' tokens, without a coefficient.

    Args:
        output: the base model's output, with ``router_logits``.
    """
    function = getattr(sys.modules[type(model).__module__], ROUTER_LOSS)
    config, logits = model.config.get_text_config(), output.router_logits
    # The model routes padding, too, which would count as load of the experts that it goes to.
    mask = (~batch.padding).view(batch.input_ids.shape).long()
    return function(logits, logits[0].shape[-1], config.num_experts_per_tok, mask)


def named_weights(
    model: Any,
    stored: Mapping[str, TensorHeader],
    merge: Callable[[str, Tensor], Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the checkpoint, tensor) of all persistent tensors, a layer at a time; tied weights once.

    Args:
        stored: headers of the checkpoint's tensors; see :func:`megascend.engines.common.transformers_names.in_checkpoint`.
        device: device of the tensors; default: the model's.
    """
    tensors = persistent_tensors(model)
    describes = device is not None and torch.device(device).type == "meta"
    for _, names in groupby(tensors, key=layer_of):
        layer = {name: tensors[name].detach() for name in names}
        if describes:
            layer = {name: tensor.to("meta") for name, tensor in layer.items()}
        for name, tensor in in_checkpoint(model, layer, stored).items():
            merged = tensor if merge is None else merge(name, tensor)
            merged = as_stored(merged, stored.get(name))
            yield name, merged if device is None else merged.to(device)
