"""LoRA adapters on a frozen transformers model, applied by peft, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megascend.changes import patched
from megascend.config import Lora, VisionTower
from megascend.engines.base import adapter_settings
from megascend.engines.common.vision import tower
from megascend.engines.context import EngineContext, EngineSpec
from megascend.models import Images
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.sample import Sample
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.factors import Factors, head_factors, head_weight
from megascend.training.lora.peft_tensors import is_expert_parameter
from megascend.training.lora.registry import AdapterRegistry
from megascend.training.lora.target_modules import HEAD, RefusedTargets, TargetModule
from megascend.training.lora.transfer import scatter
from megascend.training.lora.transformers_targets import divided_tower, head_targets, is_transposed, layer_targets

ACTIVE = "active"
"""peft's name of the one adapter that the model has at a time."""


class PeftAdapters(AdapterSet):
    """Adapters on a frozen model. Each micro batch is of one adapter, which is activated for it."""

    def __init__(self, model: Any, spec: EngineSpec, context: EngineContext) -> None:
        # peft imports Transformer Engine if it is installed. That must happen before the first cuDNN kernel is loaded: on a
        # machine with two versions of cuDNN, the loader would mix them.
        import peft  # noqa: F401

        model.requires_grad_(False)
        targets, refused_targets = adapter_targets(model, context.info.architecture.images, spec.vision_tower)
        names = sorted(target.slices[0].name for target in targets)
        settings = adapter_settings(spec, context.info, context.groups.device)
        registry = AdapterRegistry.for_model(targets, names, settings, refused_targets)
        super().__init__(registry, context.topology, context.groups, context.model_dir)
        self._model = model
        self._names: list[str] = []
        self._active: tuple[str, ActiveAdapter] | None = None
        # Gradients of the current call: if it fails, those of earlier calls must be unchanged.
        self._pending: dict[str, Tensor] = {}

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Do nothing: micro batches are padded, and those hold samples of one adapter each."""

    @contextlib.contextmanager
    def applying(self, names: Sequence[str]) -> Iterator[None]:
        """Let :meth:`activate` choose from ``names`` within the context; the model is the base model afterwards."""
        self._names, self._pending = list(names), {}
        try:
            yield
        finally:
            self._deactivate()
            self._names = []

    def activate(self, batch: MicroBatch) -> None:
        """Apply the batch's adapter to the model."""
        name = self._names[batch.adapter_index[0]]
        if self._active is not None and self._active[0] == name:
            return
        self._deactivate()
        if name:
            saved = self.collect_unsharded(name, optimizer=False)
            assert saved is not None, "a world of one"
            self._active = name, ActiveAdapter(self._model, saved.lora, saved.values)

    def take_gradients(self) -> None:
        """Add the gradients of the last backward pass to this call's pending gradients, in float32."""
        if self._active is None:
            return
        name, active = self._active
        adapter = self.registry[name]
        vector = torch.zeros_like(adapter.grads)
        scatter(active.take_gradients(), adapter, vector, self._shape_groups)
        self._pending[name] = vector if name not in self._pending else self._pending[name].add_(vector)

    def collect(self) -> None:
        """Add the pending gradients of the last call to its adapters' accumulated ones."""
        for name, vector in self._pending.items():
            adapter = self.registry[name]
            adapter.grads.add_(vector)
            adapter.accumulated = True
        self._pending = {}

    def abandon(self) -> None:
        """Drop the pending gradients of the last call; those of earlier calls are kept."""
        self._pending = {}

    def _deactivate(self) -> None:
        if self._active is not None:
            self._active[1].deactivate()
            self._active = None


def adapter_targets(
    model: Any, images: Images | None = None, trained: VisionTower = "frozen"
) -> tuple[list[TargetModule], RefusedTargets | None]:
    """Return every layer of a model, which may be on ``meta``, that adapters could act on; and those that peft could.

    Args:
        images: declaration of a model's images; None: it takes none.
        trained: ``train`` if adapters may act on its vision tower.
    """
    tower_layers, refused_targets = divided_tower(None if images is None else tower(model, images), images, trained)
    # peft before 0.20 swaps the dimensions of transposed experts.
    targets = [target for target in layer_targets(model) if not is_transposed(target)]
    return targets + tower_layers + head_targets(getattr(model, HEAD, None)), refused_targets


class ActiveAdapter:
    """An adapter that is applied to a transformers model until :meth:`deactivate`.

    Args:
        factors: factors of every adapted projection; copied, in the model's dtype.
    """

    def __init__(self, model: Any, lora: Lora, factors: Mapping[str, Factors]) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        self._model, self._base_head = model, None if HEAD not in factors else model.get_submodule(HEAD).weight
        head = factors.get(HEAD)
        factors = {name: pair for name, pair in factors.items() if name != HEAD}
        parameters = sorted(name for name in factors if is_expert_parameter(name))
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[reportArgumentType]
            use_rslora=lora.rslora,
            lora_dropout=lora.dropout,
            target_modules=sorted(name for name in factors if name not in parameters),
            target_parameters=parameters or None,
            bias="none",
        )
        # peft's new modules are in training mode, regardless of the model's mode.
        training = model.training
        with _literal_names():
            self._tuner, self._rank = LoraModel(model, config, ACTIVE), lora.rank
        model.train(training)
        self._weights = {name: _weights(model, name) for name in factors}
        for name, (a, b) in self._weights.items():
            pair = factors[name]
            with torch.no_grad():
                a.copy_(pair.a.reshape(a.shape))
                b.copy_(pair.b if pair.b.ndim == 2 else pair.b.permute(1, 2, 0).reshape(b.shape))
        if head is not None and self._base_head is not None:
            # After peft, which freezes all parameters but its own.
            model.get_submodule(HEAD).weight = torch.nn.Parameter(head_weight(head).to(self._base_head))

    def take_gradients(self) -> dict[str, Factors]:
        """Return and clear the gradients since the last call, float32; experts as [experts, ...]."""
        gradients = {}
        for name, (a, b) in self._weights.items():
            grad_a, grad_b = _take_gradient(a), _take_gradient(b)
            if is_expert_parameter(name):
                grad_a = grad_a.view(-1, self._rank, grad_a.shape[1])
                grad_b = grad_b.view(grad_b.shape[0], self._rank, -1).permute(2, 0, 1)
            gradients[name] = Factors(grad_a, grad_b)
        if self._base_head is not None:
            gradients[HEAD] = head_factors(_take_gradient(self._model.get_submodule(HEAD).weight), self._rank)
        return gradients

    def deactivate(self) -> None:
        """Make the model the base model again."""
        self._tuner.unload()
        if self._base_head is not None:
            self._model.get_submodule(HEAD).weight = self._base_head


@contextlib.contextmanager
def _literal_names() -> Iterator[None]:
    """Stop peft from taking gate_proj and others of shared experts and dense layers for experts of transformers 4."""
    module = import_module("peft.utils.transformers_weight_conversion")
    name = "convert_peft_config_for_transformers"
    if not hasattr(module, name):
        yield
        return
    with patched(module, name, lambda *args, **options: None, "names of adapted layers are those of transformers 5"):
        yield


def _weights(model: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return peft's A and B of one projection."""
    if not is_expert_parameter(name):
        layer = model.get_submodule(name)
    else:  # peft nests one wrapper for each adapted parameter of the module
        experts, _, parameter = name.rpartition(".")
        layer = model.get_submodule(experts)
        while layer.parameter_name != parameter:
            layer = layer.base_layer
    return layer.lora_A[ACTIVE].weight, layer.lora_B[ACTIVE].weight


def _take_gradient(weight: Tensor) -> Tensor:
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    weight.grad = None
    return grad.float()
