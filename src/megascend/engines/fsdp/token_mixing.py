"""Which modules of a model carry information between tokens, and whether this engine knows the samples' borders there.

Attention that transformers takes from its registry is computed by the engine, within each sample and over all ranks of a
sequence. Everything else that mixes tokens (short convolutions, state-space and linear attention layers) runs over whatever row
it gets: right for one sample a row on one rank, since it is causal, and wrong for packed samples and for parts of samples. The
judgement is by what modules are and which functions their forward passes use, so that architectures nobody has listed are judged
too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from megascend.errors import ConfigError

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""transformers' registry of attention functions, as the forward pass of an attention module names it."""
MIXERS = (nn.Conv1d, nn.RNNBase)
STATE_PARAMETERS = ("A_log", "dt_bias", "time_decay", "time_mix_key")
"""Parameters of state-space models and of their kind."""
WINDOW_MASK, WINDOW = "create_sliding_window_causal_mask", "sliding_window"
"""Of a sliding window: transformers' function that makes a mask of it, and the argument of an attention function."""
CHUNKED = "chunked_attention"
"""A kind of layer whose mask this engine does not make, as ``layer_types`` has it."""


def check_layers(model: Any, layers: Iterable[nn.Module], *, packing: bool, context: int, longest: int) -> None:
    """Raise ConfigError where tokens would be mixed across samples, or by a mask that is not made here.

    Args:
        model: of transformers; may be without memory.
        layers: its decoder layers.
        packing: samples share a row.
        context: ranks that hold parts of every sample.
        longest: tokens of the longest sample that is allowed.
    """
    text = model.config.get_text_config()
    kind = text.model_type
    if not any(_takes_attention(module) for module in model.modules()) and not any(_mixers(model)):
        raise ConfigError(
            f"engine fsdp: {type(model).__name__} ({kind}) does not take its attention from transformers' registry of attention "
            "functions, so that the engine cannot keep samples apart; use engine single"
        )
    if CHUNKED in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"engine fsdp: {kind} has layers of kind {CHUNKED}, whose mask is not known here; use engine single"
        )
    window = _window(text)
    if window is not None and window < longest and _window_is_a_mask(model):
        raise ConfigError(
            f"engine fsdp: {kind} has a sliding window of {window} tokens (sliding_window) that it makes by a mask alone, of "
            f"which this engine has none, and samples may be up to {longest} long; set batching.max_length: {window} or less, or "
            "use engine single"
        )
    if not packing and context == 1:
        return
    for layer in layers:
        mixer = next(_mixers(layer), None)
        if mixer is None and any(_takes_attention(module) for module in layer.modules()):
            continue
        what = type(layer).__name__ if mixer is None else f"{type(mixer).__name__} in {type(layer).__name__}"
        _refuse(kind, what, packing, context)
    outside = next(_mixers(model), None)
    if outside is not None:
        _refuse(kind, type(outside).__name__, packing, context)


def _refuse(kind: str, what: str, packing: bool, context: int) -> None:
    settings = [*(["batching.packing: false"] if packing else []), *(["parallel.context: 1"] if context > 1 else [])]
    wrong = "parts of a sample do not see those on other ranks" if not packing else "packed samples see each other"
    raise ConfigError(
        f"engine fsdp: {kind} mixes tokens other than by attention ({what}), where {wrong}; set {' and '.join(settings)}"
    )


def _mixers(root: nn.Module) -> Iterator[nn.Module]:
    """Modules that mix tokens by a convolution or a state, the ones that hold it rather than their parts."""
    for module in root.modules():
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if own & set(STATE_PARAMETERS) or any(isinstance(child, MIXERS) for child in module.children()):
            yield module


def _window(text: Any) -> int | None:
    """Return the tokens that each token sees in layers with a sliding window; None: there is no such layer."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, WINDOW, None)
    return window if isinstance(window, int) and window and (not kinds or "sliding_attention" in kinds) else None


def _window_is_a_mask(model: nn.Module) -> bool:
    """Some forward pass makes a mask of the sliding window, and no attention passes the window to its attention function."""
    codes = [_code(module) for module in model.modules()]
    return any(WINDOW_MASK in _names(code) for code in codes) and not any(
        WINDOW in _keywords(code) for code in codes if REGISTRY in _names(code)
    )


def _takes_attention(module: nn.Module) -> bool:
    """The module's forward pass asks transformers' registry for its attention function."""
    return REGISTRY in _names(_code(module))


def _code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward pass, without decorators."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _keywords(code: CodeType | None) -> set[str]:
    """Names of keyword arguments, and all else that is in a tuple of constants."""
    return set() if code is None else {name for const in code.co_consts if isinstance(const, tuple) for name in const}


def _names(code: CodeType | None) -> set[str]:
    """Global names and attributes that a function uses, those of functions inside it among them."""
    if code is None:
        return set()
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
