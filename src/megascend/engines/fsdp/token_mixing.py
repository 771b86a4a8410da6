"""Find the modules of a model that mix tokens, and reject layouts in which they would mix tokens across samples.

Attention that transformers takes from its registry is computed by the engine, within each sample and over all ranks of a
sequence. Every other module that mixes tokens (short convolutions, state-space and linear attention layers) runs over its input
row: correct for one sample per row on one rank, since it is causal, and wrong for packed samples and for parts of samples. The
exception is linear attention whose functions know samples' borders (:mod:`megascend.engines.common.linear_attention`), which
:func:`pass_borders` passes to it. Modules are recognised by their classes and by the functions that their forward passes use, so
that unlisted architectures are covered too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from megascend.engines.common.linear_attention import (
    BORDERS_KEYWORD,
    PACKAGE,
    delta_rule_modules,
    forward_code,
    packing_problem,
)
from megascend.engines.fsdp.attention import KEYWORD, SampleLengths
from megascend.errors import ConfigError

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Name of transformers' registry of attention functions in the forward pass of an attention module."""
MIXERS = (nn.Conv1d, nn.RNNBase)
STATE_PARAMETERS = ("A_log", "dt_bias", "time_decay", "time_mix_key")
"""Names of parameters by which state-space and similar layers are recognised."""
WINDOW_MASK, WINDOW = "create_sliding_window_causal_mask", "sliding_window"
"""transformers' function that builds the mask of a sliding window, and the attention function's argument for the window."""
CHUNKED = "chunked_attention"
"""A kind of layer in ``layer_types`` whose mask this engine does not support."""


def check_layers(model: Any, layers: Iterable[nn.Module], *, packing: bool, context: int, longest: int) -> None:
    """Raise ConfigError if tokens would be mixed across samples, or if attention needs a mask that this engine does not build.

    Args:
        model: a transformers model; may be on ``meta``.
        layers: its decoder layers.
        packing: samples share a row.
        context: context parallel size: ranks that hold parts of every sample.
        longest: tokens of the longest sample that is allowed.
    """
    text = model.config.get_text_config()
    kind = text.model_type
    # Models of state-space layers only have no attention to take.
    if not any(_takes_attention(module) for module in model.modules()) and not any(_mixers(model)):
        raise ConfigError(
            f"engine fsdp: {type(model).__name__} ({kind}) does not take its attention from transformers' registry, so samples "
            "would mix; use engine single"
        )
    if CHUNKED in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"engine fsdp: {kind} has layers of kind {CHUNKED}, whose mask is not supported; use engine single"
        )
    window = _window(text)
    if window is not None and window < longest:
        _check_window(model, kind, window, longest)
    # One sample a row on one rank: modules that mix tokens causally are correct.
    if not packing and context == 1:
        return
    for layer in layers:
        mixers = list(_mixers(layer))
        if not mixers and any(_takes_attention(module) for module in layer.modules()):
            continue
        mixing = [mixer for mixer in mixers if context > 1 or packing_problem(mixer) != "none"]
        if mixers and not mixing:
            continue
        name = f"{type(mixing[0]).__name__} in {type(layer).__name__}" if mixing else type(layer).__name__
        _refuse(kind, name, packing, context, package=bool(mixing) and packing_problem(mixing[0]) == "package")
    # Also before the first and after the last layer.
    inside = {module for layer in layers for module in layer.modules()}
    outside = next((mixer for mixer in _mixers(model) if mixer not in inside), None)
    if outside is not None:
        _refuse(kind, type(outside).__name__, packing, context, package=False)


def _check_window(model: nn.Module, kind: str, window: int, longest: int) -> None:
    """Raise ConfigError unless a model passes its window to the attention function and builds a mask of it, too."""
    codes = [forward_code(module) for module in model.modules()]
    masks = any(WINDOW_MASK in _names(code) for code in codes)
    passes = any(WINDOW in _keywords(code) for code in codes if REGISTRY in _names(code))
    if window == 0:
        raise ConfigError(
            f"engine fsdp: {kind} has layer_types with sliding_window: 0, which see no token; correct config.json"
        )
    if masks and not passes:
        raise ConfigError(
            f"engine fsdp: {kind} has a sliding window of {window} tokens, applied only by a mask, and samples may have "
            f"{longest}; set batching.max_length: {window} or less"
        )
    if passes and not masks:
        # Its argument acts in flash attention alone; transformers' other functions would attend to all tokens.
        raise ConfigError(
            f"engine fsdp: {kind} has sliding_window: {window}, which some of transformers' attention functions ignore for "
            f"it; set sliding_window: null in config.json"
        )


def _refuse(kind: str, module: str, packing: bool, context: int, *, package: bool) -> None:
    settings = [*(["batching.packing: false"] if packing else []), *(["parallel.context: 1"] if context > 1 else [])]
    effect = "parts of a sample ignore those on other ranks" if not packing else "packed samples affect each other"
    remedy = f"set {' and '.join(settings)}"
    if package and context == 1:
        remedy = f"install {PACKAGE}, whose functions keep them apart, or {remedy}"
    raise ConfigError(f"engine fsdp: {kind} mixes tokens other than by attention ({module}), where {effect}; {remedy}")


def carries_state(model: nn.Module) -> bool:
    """Check whether a module mixes tokens by a convolution or a state: a sample's own tokens would start from its prefix's."""
    return any(True for _ in _mixers(model))


def pass_borders(model: nn.Module) -> None:
    """Pass the borders of packed samples to the linear attention of a model that :func:`check_layers` has accepted."""
    for module in delta_rule_modules(model):
        module.register_forward_pre_hook(_add_borders_uncompiled, with_kwargs=True)


def _add_borders(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    lengths = kwargs.get(KEYWORD)
    if not isinstance(lengths, SampleLengths):
        raise ConfigError(
            f"engine fsdp: the layers of this model do not pass keywords on to {type(module).__name__}, so that samples in one "
            "micro batch would affect each other; use engine single"
        )
    # One sample in each row has no borders within it.
    if lengths.starts is None:
        return args, kwargs
    return args, kwargs | {BORDERS_KEYWORD: lengths.starts, "seq_idx": lengths.sample_index}


# Compiled code would depend on the number of tokens.
_add_borders_uncompiled: Any = torch.compiler.disable(_add_borders)


def _mixers(root: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that mix tokens by a convolution or a state: the modules that hold it, not their parts."""
    for module in root.modules():
        parameters = {name for name, _ in module.named_parameters(recurse=False)}
        if parameters & set(STATE_PARAMETERS) or any(isinstance(child, MIXERS) for child in module.children()):
            yield module


def _window(text: Any) -> int | None:
    """Return the size of the sliding window in tokens; None if no layer has one."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, WINDOW, None)
    if not isinstance(window, int) or (kinds and "sliding_attention" not in kinds):
        return None
    return window if window or kinds else None  # of a model without a list, 0 stands for none


def _takes_attention(module: nn.Module) -> bool:
    """Check whether a module's forward pass takes its attention function from transformers' registry."""
    return REGISTRY in _names(forward_code(module))


def _keywords(code: CodeType | None) -> set[str]:
    """Return the names of keyword arguments in calls, and all other entries of constant tuples."""
    # CPython passes the names of keyword arguments as a constant tuple.
    return set() if code is None else {name for const in code.co_consts if isinstance(const, tuple) for name in const}


def _names(code: CodeType | None) -> set[str]:
    """Return the global names and attributes that a function uses, including nested functions."""
    if code is None:
        return set()
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
