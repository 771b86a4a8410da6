"""Rotary embeddings with length-dependent frequencies, applied per sample of a micro batch.

transformers uses the largest position in its input: beside a long sample, a short one would be rotated by the long one's
frequencies (``longrope``, ``dynamic``), and dynamic frequencies would be those of the longest sample so far.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megascend.changes import patch
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.kernels.host_copy import to_device

LONGROPE, DYNAMIC = "longrope", "dynamic"


class RotaryByLength:
    """Patches the length-dependent rotary embeddings of a transformers model to follow each sample's own length.

    Most models have none, and are not changed.

    Args:
        model: patched; call :meth:`enter` before each forward pass.
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
        """Set the samples of the next forward passes to those of ``batch``."""
        self.enter_samples(batch.sample.view(batch.input_ids.shape), batch.lengths)

    def enter_samples(self, sample: Tensor, lengths: Sequence[int]) -> None:
        """Set the samples of the next forward passes.

        Args:
            sample: int64, in the shape of the ids, the index of each token's sample.
            lengths: tokens of each sample, on all ranks that hold parts of it, without padding.
        """
        self._sample, self._lengths = sample, lengths

    def groups(self, borders: Sequence[int], dynamic: bool) -> list[tuple[int, Tensor]]:
        """Return the lengths with different frequencies, each with a mask of its tokens: bool, in the shape of the ids.

        Args:
            borders: lengths above which frequencies change.
            dynamic: above them, every length has its own frequencies.
        """
        assert self._sample is not None, "the engine enters a micro batch before it calls the model"
        kinds = [sum(length > border for border in borders) for length in self._lengths]
        if dynamic:
            kinds = [length if kind else 0 for kind, length in zip(kinds, self._lengths, strict=True)]
        longest: dict[int, int] = {}
        for kind, length in zip(kinds, self._lengths, strict=True):
            # Lengths between two borders have the same frequencies: use the longest.
            longest[kind] = max(length, longest.get(kind, 0))
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
    if dynamic:  # transformers ignores original_max_position_embeddings here
        return [module.original_max_seq_len]
    settings = getattr(module.config, "rope_parameters", None) or {}
    nested = [values for values in settings.values() if isinstance(values, Mapping)] or [settings]
    lengths = [values.get("original_max_position_embeddings") for values in nested]
    finite = {length for length in lengths if length is not None}
    if not finite:
        finite = {getattr(module.config, "original_max_position_embeddings", None) or module.original_max_seq_len}
    return sorted(finite)


def _set_frequencies(module: Any, length: int, device: torch.device) -> None:
    """Set a module's dynamic frequencies to those of a length known on the host.

    transformers compares lengths on the device: the host would wait for it more than once per micro batch.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = module.rope_type.items() if isinstance(module.rope_type, Mapping) else [(None, module.rope_type)]
    for layer_type, kind in kinds:
        if DYNAMIC in kind:
            prefix, options = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=length, **options)
            setattr(module, f"{prefix}inv_freq", to_device(frequencies, device))
            setattr(module, f"{prefix}attention_scaling", scaling)


def _by_sample(
    owner: RotaryByLength, module: nn.Module, forward: Callable[..., Any], dynamic: bool
) -> Callable[..., Any]:
    # transformers' decorator would update dynamic frequencies from the device; _set_frequencies does it from the host.
    undecorated = functools.partial(inspect.unwrap(type(module).forward), module) if dynamic else forward

    def run(states: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        outputs = None
        for length, tokens in owner.groups(_borders(module, dynamic), dynamic):
            # Positions of padding lie beyond the length. A last position of length - 1 is appended, by which longrope
            # chooses its frequencies even if this rank holds only a part of the sample.
            positions = position_ids.masked_fill(~tokens, 0).clamp_max(length - 1)
            last = torch.full_like(positions[..., :1], length - 1)
            compute = forward
            if dynamic:
                _set_frequencies(module, length, states.device)
                compute = undecorated
            embeddings = compute(states, torch.cat([positions, last], dim=-1), *args, **options)
            outputs = _merge(embeddings, outputs, tokens)
        return outputs

    return run


def _merge(embeddings: Any, outputs: Any, tokens: Tensor) -> Any:
    """Replace ``outputs`` at ``tokens`` by ``embeddings`` [..., tokens + 1, d], a tensor or a tuple (cos, sin) of them."""
    if not isinstance(embeddings, Tensor):
        pairs = zip(embeddings, outputs or [None] * len(embeddings), strict=True)
        return tuple(_merge(part, output, tokens) for part, output in pairs)
    embeddings = embeddings[..., :-1, :]  # without the appended position
    return embeddings if outputs is None else torch.where(tokens[..., None], embeddings, outputs)
