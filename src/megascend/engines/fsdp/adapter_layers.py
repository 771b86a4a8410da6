"""Adapters inside the layers of a transformers model, whose parameters are gathered while they run: nothing is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megascend.engines.fsdp.experts import ExpertRows, frozen_experts
from megascend.engines.fsdp.transformers_api import compute_experts_by, experts_products
from megascend.errors import ConfigError
from megascend.lora.applied_adapters import AppliedAdapters, start_graph
from megascend.lora.layout import ShapeGroup
from megascend.lora.segments import ExpertAdapterRows, by_expert_and_adapter
from megascend.lora.target_modules import TargetModule

Place = tuple[int, int, TargetModule]
"""Number of the shape group, number in it, target module."""


class AdapterLayers(AppliedAdapters):
    """Hooks on a model's adapted layers, and which adapters they apply at the moment.

    Args:
        divided: ranks hold different experts, and tokens are sent to them.
    """

    def __init__(self, model: Any, shape_groups: Sequence[ShapeGroup], *, divided: bool = False) -> None:
        super().__init__()
        self._divided = divided
        self._not_called: dict[int, str] = {}
        of_experts: dict[int, tuple[Any, dict[str, Place]]] = {}
        for number, shape_group in enumerate(shape_groups):
            for layer, target in enumerate(shape_group.target_modules):
                name, module = target.slices[0].name, target.module
                if target.is_output:
                    self._output = number, target  # which the loss's head computes
                    continue
                self._not_called[id(module)] = name
                if target.is_expert:
                    places = of_experts.setdefault(id(module), (module, {}))[1]
                    places[name.rsplit(".", 1)[-1]] = number, layer, target
                elif target.is_embedding:
                    module.register_forward_hook(partial(self._after_embedding, number, target))
                else:
                    module.register_forward_hook(partial(self._after, number, layer, target))
        for module, places in of_experts.values():
            compute_experts_by(module, partial(self._experts, places), self._adapters_of_tokens)
        model.get_input_embeddings().register_forward_hook(start_graph)

    def require_called(self) -> None:
        """After a forward pass with adapters.

        Raises:
            ConfigError: the model computes an adapted layer's product without calling the layer, so its adapters are not applied.
        """
        if self.stacked is not None and self._not_called:
            raise ConfigError(
                f"engine fsdp: the model does not call its layer {next(iter(self._not_called.values()))}, so adapters of it "
                "would have no effect; leave it out of adapters.targets"
            )

    def _after(
        self, shape_group: int, layer: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
    ) -> Tensor:
        if self.stacked is None:
            return out
        self._note(module, target, inputs[0])
        return self.to_linear(shape_group, layer, target, inputs[0], out)

    def _after_embedding(
        self, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
    ) -> Tensor:
        if self.stacked is None:
            return out
        self._note(module, target, out)
        return self.to_embedding(shape_group, target, inputs[0], out)

    def _adapters_of_tokens(self) -> Tensor | None:
        """int64 [n], if there are several."""
        return None if self.mixed is None else self.mixed.adapter_index

    def _experts(
        self,
        places: dict[str, Place],
        module: Any,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        along: Tensor | None = None,
    ) -> Tensor:
        """See :func:`megascend.engines.fsdp.experts.frozen_experts`.

        Args:
            along: int64 [n], each row's adapter; None: they are of one.
        """
        if self.stacked is None:
            return experts_products()(module, hidden, index, weights)
        if self._divided:  # rows have come from other ranks
            self._not_called.pop(id(module), None)
        else:
            self._note(module, next(iter(places.values()))[2], hidden)
        adapters = len(self.stacked.adapters)
        grouped: ExpertAdapterRows | None = None

        def add(parameter: str, rows: ExpertRows, x: Tensor, out: Tensor) -> Tensor:
            nonlocal grouped
            if parameter not in places:
                return out
            shape_group, layer, target = places[parameter]
            if grouped is None:
                grouped = (
                    ExpertAdapterRows(rows.segments)
                    if along is None
                    else by_expert_and_adapter(rows.expert, along[rows.token], target.experts, adapters, in_order=False)
                )
            return self.to_experts(shape_group, layer, grouped, x, out)

        return frozen_experts(module, hidden, index, weights, add)

    def _note(self, module: Any, target: TargetModule, states: Tensor) -> None:
        """A layer was called with ``states`` [..., features], which must be of the micro batch's tokens."""
        self._not_called.pop(id(module), None)
        assert self.segments is not None, "a micro batch was begun without its segments"
        tokens, rows = len(self.segments.adapter_index), states.shape[:-1].numel()
        if rows != tokens:
            raise ConfigError(
                f"engine fsdp: {target.slices[0].name} computes {rows} rows in a micro batch of {tokens} tokens, so it is not "
                "known whose they are; leave it out of adapters.targets"
            )
