"""Router replay in transformers models, for the engines that train them.

Models score experts in ways of their own, in the router or in the block around it, and all of them choose by one ``torch.topk``
over the experts. Within a block that call is answered with the experts to replay, and the scores of those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megascend.changes import patch
from megascend.engines.common.router_replay import ExpertLayers, ReplayedPass, RouterReplay
from megascend.errors import MegascendError
from megascend.models import architecture_of
from megascend.training.batch.micro_batch import MicroBatch

BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:[^.]+\.)*experts$")
"""Name of the experts in a mixture-of-experts block of a layer."""


class BlockReplay(RouterReplay):
    """Router replay of a transformers model's mixture-of-experts blocks."""

    def __init__(self, layers: ExpertLayers, blocks: dict[int, nn.Module], device: torch.device) -> None:
        super().__init__(layers, device)
        for column, number in enumerate(layers.numbers):
            block = blocks[number]
            patch(
                block,
                "forward",
                partial(self._forward, column, block.forward),
                "samples may carry the experts to choose",
            )

    @classmethod
    def of(cls, model: Any, device: torch.device, shares: int = 1) -> BlockReplay | None:
        """Build the replay of a model; None if it has no mixture-of-experts blocks, or does not name the experts of a token.

        ``shares``: ranks that each hold a part of a layer's experts.
        """
        config = model.config.get_text_config()
        full = architecture_of(config.to_dict()).normalise(config.to_dict())
        modules = dict(model.named_modules())
        blocks: dict[int, nn.Module] = {}
        experts = 0
        for name, module in modules.items():
            match = BLOCK.search(name)
            if match is not None and hasattr(module, "num_experts"):
                blocks[int(match[1])] = modules[name.rpartition(".")[0]]
                experts = module.num_experts * shares
        # transformers maps this name to an architecture's own.
        topk = full.get("num_experts_per_tok") or getattr(config, "num_experts_per_tok", None)
        if not blocks or not topk:
            return None
        layers = ExpertLayers(config.num_hidden_layers, tuple(sorted(blocks)), experts, topk)
        return cls(layers, blocks, device)

    @contextmanager
    def replaying(self, batch: MicroBatch) -> Iterator[None]:
        """Replay a micro batch's experts in the forward pass within the context, and in its later recomputation."""
        routed = None if batch.routed_experts is None else self.layers.columns(batch.routed_experts)
        self._pass = ReplayedPass(routed, batch.real)
        yield
        # Not in a finally block: after an error nothing is recomputed, and the next micro batch replaces this pass.
        self._pass.complete = True

    def _forward(self, column: int, forward: Any, *args: Any, **options: Any) -> Any:
        current = self._pass
        if current is None or current.routed is None:
            return forward(*args, **options)
        choice = _Choice(self, current.routed[:, column], None if current.complete else current.real)
        with choice:
            result = forward(*args, **options)
        # Without a call the model has chosen experts elsewhere, and has silently ignored the recorded ones.
        if choice.calls != 1:
            raise MegascendError(
                f"router replay: the block of layer {self.layers.numbers[column]} called torch.topk ({self.layers.topk} of "
                f"{self.layers.experts} experts) {choice.calls} times, not once; leave routed_experts out for this model"
            )
        return result


class _Choice(TorchFunctionMode):
    """Mode in which the choice of a block's experts is a replayed one."""

    def __init__(self, replay: BlockReplay, replayed: Tensor, real: Tensor | None) -> None:
        super().__init__()
        self._replay, self._replayed, self._real = replay, replayed, real
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The model's own choice is computed in any case: rows without replay keep it, and differences from it are counted.
        result = func(*args, **(kwargs or {}))
        layers = self._replay.layers
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != layers.experts or result.indices.shape[-1] != layers.topk:
            return result  # a choice among groups of experts (DeepSeek-V3), which precedes the one of experts
        self.calls += 1
        indices = result.indices.reshape(-1, layers.topk)
        chosen = self._replay.choose(indices, self._replayed, self._real).view_as(result.indices)
        # The model's own scores of the replayed experts, so that gradients reach the router; a named tuple, as of torch.topk.
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
