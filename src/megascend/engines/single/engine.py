"""The single-process engine: transformers' own model, a plain loop over micro batches, torch's AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megascend.engines.base import (
    OnOutput,
    ScalarOutput,
    longest_sample,
    seed_generators,
)
from megascend.engines.common import linear_attention, vision
from megascend.engines.common.adamw import ModelAdamW
from megascend.engines.common.full_model import FullModel
from megascend.engines.common.heads import (
    PlainOutput,
    fresh_weights,
    model_class,
    output_layer,
    tie_embeddings,
    values_of,
    without_bias,
)
from megascend.engines.common.replayed_blocks import BlockReplay
from megascend.engines.common.rotary import RotaryByLength
from megascend.engines.common.transformers_engine import (
    TransformersEngine,
    TransformersSubject,
    refuse_megatron_settings,
)
from megascend.engines.common.transformers_names import check_rows, persistent_tensors, tensor_slices
from megascend.engines.context import EngineContext, EngineSpec
from megascend.engines.single import cached_attention
from megascend.engines.single.adapters import PeftAdapters, adapter_targets
from megascend.engines.single.model import (
    check_plain_head,
    check_router_loss,
    hidden_states,
    load_model,
    model_config,
    named_weights,
    plain_head,
    router_loss,
)
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.selfcheck import in_process
from megascend.models.selfcheck.trial_inputs import ImageTokens
from megascend.reference.reductions import out_of_range
from megascend.runtime.topology.topology import Receivers
from megascend.training.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.training.checkpoint.hf_slices import HfSlices
from megascend.training.checkpoint.slices import OPTIMIZER_KEY, TensorSlices
from megascend.training.lora.factors import merged
from megascend.training.lora.registry import check_limits


class SingleEngine(TransformersEngine):
    """A model of transformers in one process; see :class:`megascend.engines.base.Engine`.

    Micro batches are padded on the right, whatever ``batching.packing`` is: every architecture of transformers is causal over
    plain rows, while packed rows are exact only with some attention implementations.

    Attributes:
        adapters: adapters on a frozen model; None if the model itself is trained.
    """

    kind = "single"
    mixes_adapters = False

    def __init__(self, spec: EngineSpec, context: EngineContext) -> None:
        super().__init__(spec, context)
        self.layout = SequenceLayout(packing=False)
        seed_generators(spec.seed)
        info = self.info
        fresh = fresh_weights(info, spec.seed)
        self.check_slice(model_config(self.model_dir), SingleSubject(info.scalar_head), enabled=spec.self_check)
        self.model = load_model(self.model_dir, self.dtype, self.device, info, fresh)
        linear_attention.compute_fp32_exactly(self.model)
        linear_attention.correct_steps(self.model)
        if info.scalar_head is None:
            check_plain_head(self.model, info.shape.vocab_size)
        self._rotary = RotaryByLength(self.model)
        check_support(self.model, spec, info)
        vision.freeze_tower(self.model, info.architecture.images, spec.vision_tower)
        self._router_loss = spec.moe.aux_loss_coefficient if spec.moe.aux_loss != "none" else 0.0
        if spec.recompute.granularity == "full":
            # transformers 5.11 renamed gradient_checkpointing_enable.
            name = "activation_checkpointing_enable"
            enable = getattr(self.model, name if hasattr(self.model, name) else "gradient_checkpointing_enable")
            # Reentrant checkpointing needs an input that requires a gradient, which a frozen embedding does not give.
            enable({"use_reentrant": False})
        self._hf_slices: HfSlices | None = None
        self._cached: cached_attention.CachedAttentionFunction | None = None  # within caching()
        self.adapters: PeftAdapters | None = None
        if spec.adapters is not None:
            self.trainable = self.adapters = PeftAdapters(self.model, spec, context)
        else:
            weights = self.weight_map(spec)
            self.optimizer = ModelAdamW(self.model, spec.optimizer, spec.schedule, spec.precision, weights)
            if info.rounded_tensors(spec.precision) or (fresh and spec.precision != "fp32"):
                # Main parameters begin with the numbers of the files; the fp32 copy in host memory is dropped at once.
                self.optimizer.start_from(load_model(self.model_dir, torch.float32, torch.device("cpu"), info, fresh))
            self.trainable = FullModel(self.optimizer)
        # from_pretrained returns a model in evaluation mode.
        self.model.train()
        self._replay = self.router_replay = BlockReplay.of(self.model, self.device)

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        results = []
        for batch in batches:
            if self.adapters is not None:
                self.adapters.activate(batch)
            if self._cached is not None:
                self._cached.batch = batch
            self._rotary.enter(batch)
            with_router_loss = self._router_loss > 0 and not forward_only
            options: dict[str, Any] = {"output_router_logits": True} if with_router_loss else {}
            options |= vision.arguments(batch)
            replaying = contextlib.nullcontext() if self._replay is None else self._replay.replaying(batch)
            with self.groups.monitor.phase("forward"), replaying:
                hidden, output = hidden_states(self.model, batch.input_ids, batch.position_ids, **options)
                loss, result = on_output(batch, self._head_output(batch, hidden))
            results.append(result)
            if forward_only:
                continue
            if with_router_loss:
                # transformers defines the loss for one forward pass: the mean over micro batches.
                coefficient = self._router_loss / len(batches)
                loss = loss + coefficient * router_loss(self.model, output, batch)
            self.backward(loss)
            if self.adapters is not None:
                self.adapters.take_gradients()
        return results

    def _head_output(self, batch: MicroBatch, hidden: torch.Tensor) -> PlainOutput | ScalarOutput:
        layer = output_layer(self.model)
        if self.info.scalar_head is not None:
            return ScalarOutput(values_of(layer, self.model.dropout(hidden)))
        vocab_size, temperature = self.info.shape.vocab_size, batch.temperature
        return PlainOutput(hidden.flatten(0, 1), layer.weight, batch.targets, vocab_size, temperature=temperature)

    def cache_unsupported_reason(self) -> str | None:
        return cached_attention.unsupported_reason(self.model)

    @contextlib.contextmanager
    def caching(self) -> Iterator[None]:
        images = self.info.architecture.images
        tower = None if images is None else vision.tower(self.model, images)
        self._cached = cached_attention.CachedAttentionFunction(self.model, tower)
        try:
            with self._cached.installed():
                yield
        finally:
            self._cached = None

    def state(self, *, include_replicas: bool) -> dict[str, Any]:
        """Implement :meth:`megascend.engines.base.Engine.state`; names are those of transformers' parameters."""
        state: dict[str, Any] = dict(self.weight_state())
        for name, kind, values in () if self.optimizer is None else self.optimizer.tensors(loading=include_replicas):
            state[OPTIMIZER_KEY.format(state=kind, key=name)] = TensorSlices.whole(values)
        return state

    def weight_state(self) -> dict[str, TensorSlices]:
        if self.optimizer is None:
            return {}
        # Buffers, too: the biases of a router are among the weights of its checkpoint.
        return {name: TensorSlices.whole(tensor.detach()) for name, tensor in persistent_tensors(self.model).items()}

    def hf_slices(self) -> HfSlices:
        if self._hf_slices is None:
            try:
                slices = tensor_slices(self.model, self.info.tensors)
                check_rows(slices, self.info.tensors)
                self._hf_slices = slices
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                raise CheckpointError(
                    f"transformers' conversion of this architecture is not supported here ({error})"
                ) from error
        return self._hf_slices

    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        merge = None
        if adapter is not None:
            assert self.adapters is not None
            merge = merged(self.adapters.factors(adapter))
        for name, tensor in named_weights(self.model, self.info.tensors, merge, device):
            # An engine would load the infinity that fp16 makes of the value without a word.
            if problem := out_of_range(name, tensor, tensor.dtype):
                raise CheckpointError(f"named_weights: {problem}")
            yield name, tensor


class SingleSubject(TransformersSubject):
    """Self-check subject: a small model as the single-process engine computes it."""

    engine = "single"
    packing = False

    def build(self, config: Any) -> Any:
        head = self.scalar_head
        vocabulary = config.get_text_config().vocab_size
        model = model_class(config, head, vocabulary).from_config(config, dtype=torch.float32).eval()
        without_bias(model, head)
        if head is None:
            check_plain_head(model, vocabulary)
        self._rotary = RotaryByLength(model)
        return model

    def logits(
        self, model: Any, samples: Sequence[torch.Tensor], images: ImageTokens | None = None
    ) -> list[torch.Tensor]:
        lengths = [len(ids) for ids in samples]
        # On the right, as micro batches of this engine: in causal layers nothing depends on tokens after a sample's last one.
        rows = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        self._rotary.enter_samples(torch.arange(len(rows))[:, None].expand(rows.shape), lengths)
        arguments = {"position_ids": torch.arange(rows.shape[1]).expand(rows.shape)}
        if images is not None:
            arguments = self.image_arguments(samples, rows, images, packed=False)
        hidden, _ = hidden_states(model, rows, **arguments)
        layer = output_layer(model)
        logits = torch.nn.functional.linear(hidden, layer.weight, layer.bias)
        return [row[:length].float() for row, length in zip(logits, lengths, strict=True)]


def check_settings(spec: EngineSpec) -> None:
    """Raise ConfigError for settings that this engine does not have."""
    refuse_megatron_settings(spec, "single")
    if spec.recompute.granularity == "selective":
        raise ConfigError("engine single: recompute.granularity=selective is not supported; set full or none")


def check_support(model: Any, spec: EngineSpec, info: ModelInfo) -> list[str]:
    """Check a model, which may be on ``meta``, against the settings; return the names of adapter targets."""
    if info.scalar_head is None:
        plain_head(model)
    frozen, recomputed = spec.adapters is not None, spec.recompute.granularity == "full"
    check_router_loss(model, spec.moe, frozen=frozen, recomputed=recomputed)
    if spec.adapters is None:
        return []
    modules, refused_targets = adapter_targets(model, info.architecture.images, spec.vision_tower)
    targets = [target.slices[0].name for target in modules]
    check_limits(spec.adapters, targets, refused_targets)
    return targets


def check_model(spec: EngineSpec, info: ModelInfo) -> list[str]:
    """Raise the errors that the constructor would raise before it reads weights; return the names of adapter targets."""
    config = model_config(spec.model)
    if info.scalar_head is None:
        tie_embeddings(config, info.shape.tied)
    loader = model_class(config, info.scalar_head)
    try:
        with torch.device("meta"):
            model = loader.from_config(config)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {spec.model}: {error}") from error
    targets = check_support(model, spec, info)
    in_process.check_first_pass(
        spec.model,
        model.config,
        longest_sample(spec, info),
        SingleSubject(info.scalar_head),
        runs_forward=spec.self_check,
    )
    return targets
