"""Rotary embeddings whose frequencies depend on the length of a sequence, for each sample of a micro batch by its own length.

transformers looks at the largest position of all that it is called with: beside a long sample, a short one would be turned by the
long one's frequencies (``longrope``, ``dynamic``), and dynamic frequencies would be those of the longest sample so far.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megascend.batch.micro_batch import MicroBatch
from megascend.changes import patch
from megascend.kernels.host_copy import to_device

LONGROPE, DYNAMIC = "longrope", "dynamic"


class RotaryByLength:
    """The rotary embeddings of a transformers model that depend on a sequence's length; most models have none.

    Args:
        model: patched; :meth:`enter` must be called before it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sample: Tensor | None = None
        self._lengths: Sequence[int] = ()
        for module in model.modules():
            kinds = _kinds(module)
            if kinds & {LONGROPE, DYNAMIC}:
                forward = _by_sample(self, module, module.forward, DYNAMIC in kinds)
                patch(module, "forward", forward, "frequencies follow each sample's own length")

    def enter(self, batch: MicroBatch) -> None:
        """Compute the samples of ``batch`` from now on."""
        self.enter_samples(batch.sample.view(batch.input_ids.shape), batch.lengths)

    def enter_samples(self, sample: Tensor, lengths: Sequence[int]) -> None:
        """Compute these samples from now on.

        Args:
            sample: int64, in the shape of the ids, the number of each token's sample.
            lengths: tokens of each sample, on all ranks that hold parts of it, without padding.
        """
        self._sample, self._lengths = sample, lengths

    def groups(self, borders: Sequence[int], dynamic: bool) -> list[tuple[int, Tensor]]:
        """Return lengths that have frequencies of their own, and which tokens they are for: bool, in the shape of the ids.

        Args:
            borders: lengths above which frequencies change.
            dynamic: above them, each length has its own.
        """
        assert self._sample is not None, "the engine enters a micro batch before it calls the model"
        kinds = [sum(length > border for border in borders) for length in self._lengths]
        if dynamic:
            kinds = [length if kind else 0 for kind, length in zip(kinds, self._lengths, strict=True)]
        longest = {kind: max(n for n, own in zip(self._lengths, kinds, strict=True) if own == kind) for kind in kinds}
        if len(longest) == 1:
            return [(max(self._lengths), torch.ones_like(self._sample, dtype=torch.bool))]
        kind_of_token = to_device(torch.tensor(kinds), self._sample.device)[self._sample]
        return [(longest[kind], kind_of_token == kind) for kind in sorted(longest)]


def depends_on_length(model: nn.Module) -> bool:
    """Check whether a model has rotary embeddings whose frequencies depend on the length of a sequence."""
    return any(_kinds(module) & {LONGROPE, DYNAMIC} for module in model.modules())


def _kinds(module: nn.Module) -> set[str]:
    """Return the kinds of RoPE that a module computes: one, or one for each kind of layer."""
    kind = getattr(module, "rope_type", None)
    names = kind.values() if isinstance(kind, Mapping) else [kind]
    return {DYNAMIC if DYNAMIC in name else name for name in names if isinstance(name, str)}


def _borders(module: Any, dynamic: bool) -> list[int]:
    """Return the lengths above which frequencies change."""
    if dynamic:  # whatever original_max_position_embeddings is
        return [module.original_max_seq_len]
    settings = getattr(module.config, "rope_parameters", None) or {}
    nested = [each for each in settings.values() if isinstance(each, Mapping)] or [settings]
    lengths = [each.get("original_max_position_embeddings") for each in nested]
    stated = {length for length in lengths if length is not None}
    if not stated:
        stated = {getattr(module.config, "original_max_position_embeddings", None) or module.original_max_seq_len}
    return sorted(stated)


def _set_frequencies(module: Any, length: int, device: torch.device) -> None:
    """Give a module with dynamic frequencies those of a length, from the host.

    transformers' own way compares lengths on the device: the host would wait for it more than once a micro batch.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = module.rope_type.items() if isinstance(module.rope_type, Mapping) else [(None, module.rope_type)]
    for layer_type, kind in kinds:
        if DYNAMIC in kind:
            prefix, of_layer = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length, **of_layer)
            setattr(module, f"{prefix}inv_freq", to_device(frequencies, device))
            setattr(module, f"{prefix}attention_scaling", scaling)


def _by_sample(
    owner: RotaryByLength, module: nn.Module, forward: Callable[..., Any], dynamic: bool
) -> Callable[..., Any]:
    undecorated = functools.partial(inspect.unwrap(type(module).forward), module) if dynamic else forward

    def run(states: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        outputs = None
        for length, tokens in owner.groups(_borders(module, dynamic), dynamic):
            places = position_ids.masked_fill(~tokens, 0).clamp_max(length - 1)  # padding lies behind it
            last = torch.full_like(places[..., :1], length - 1)
            compute = forward
            if dynamic:
                _set_frequencies(module, length, states.device)
                compute = undecorated
            turned = compute(states, torch.cat([places, last], dim=-1), *args, **options)
            outputs = _chosen(turned, outputs, tokens)
        return outputs

    return run


def _chosen(turned: Any, others: Any, tokens: Tensor) -> Any:
    """``turned`` [..., tokens + 1, d], or several of them, at ``tokens``, and ``others`` elsewhere."""
    if not isinstance(turned, Tensor):
        pairs = zip(turned, others or [None] * len(turned), strict=True)
        return tuple(_chosen(mine, other, tokens) for mine, other in pairs)
    own = turned[..., :-1, :]
    return own if others is None else torch.where(tokens[..., None], own, others)
