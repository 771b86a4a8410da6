"""The Megatron engine: builds and owns model, DDP, schedule and optimizer, in that order."""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megascend.changes import patch
from megascend.config import CudaGraphs
from megascend.engines.base import (
    Engine,
    OnOutput,
    ScalarOutput,
    adapter_settings,
    seed_generators,
)
from megascend.engines.common.full_model import FullModel
from megascend.engines.common.heads import PlainOutput, fresh_weights, token_values
from megascend.engines.common.weight_settings import SettingsByWeight
from megascend.engines.context import EngineContext, EngineSpec
from megascend.engines.megatron import (
    attention_dropout,
    attention_mask,
    cached_attention,
    embedding_gradient,
    fused_qkv,
    grouped_experts,
    hf_slices,
    mtp,
    packed_sinks,
    replayed_routers,
    routers,
    shared_prefixes,
    state,
    vision,
    weights,
)
from megascend.engines.megatron.build import build_chunks
from megascend.engines.megatron.captured_step import CudaCapture
from megascend.engines.megatron.configuration import configure, overlaps_reduction
from megascend.engines.megatron.named_weights import named_weights, stored_weights
from megascend.engines.megatron.optimizer import MegatronOptimizer
from megascend.engines.megatron.output_head import OutputHead
from megascend.engines.megatron.quantised_base import QuantisedBase
from megascend.engines.megatron.replayed_routers import MegatronRouterReplay
from megascend.errors import CheckpointError, ConfigError
from megascend.models.selfcheck.check import log_warnings, require_agreement
from megascend.models.selfcheck.verdict import Verdict
from megascend.runtime.distributed.objects import gather_objects, raise_on_all_ranks
from megascend.runtime.topology.topology import Receivers
from megascend.training.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.training.checkpoint.hf_slices import HfSlice, HfSlices
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.lora.factors import merged

if TYPE_CHECKING:
    from megascend.engines.megatron.graphed_steps import GraphedSteps
    from megascend.models.selfcheck.process import Worker
    from megascend.training.lora.adapter_set import AdapterSet

LARGE_LAYER = 2**29
"""Parameters per layer above which an export gathers layers in host memory instead of on the device: 1 GiB in bf16, beside the
model and its optimizer."""


class MegatronEngine(Engine):
    """A model sharded over a topology by Megatron-Core; see :class:`megascend.engines.base.Engine`.

    Args:
        checker: process started for the self-check; on rank 0 only.

    Attributes:
        config: mcore-bridge's ModelConfig.
        chunks, bare_chunks: this rank's model chunks, with and without Megatron's DDP wrapper.
        decoders: their language models; the chunks themselves for a model of text.
        head: the output head on the last pipeline stage of a causal language model, else None.
        prediction: the head for multi-token prediction on the last pipeline stage, if it is trained; else None.
        adapters: adapters on a frozen model; None if the model itself is trained.
        optimizer: optimizer of the model's own parameters, or None.
        graphs: runs micro batches as CUDA graphs, or None.
    """

    kind = "megatron"

    def __init__(self, spec: EngineSpec, context: EngineContext, checker: Worker | None = None) -> None:
        super().__init__(spec, context)
        self.runtime, self.adam = context.runtime, spec.optimizer
        platform, info, graphs = self.runtime.platform, self.info, spec.batching.cuda_graphs
        self.adapters: AdapterSet | None = None
        self.graphs: GraphedSteps | None = None
        self.optimizer: MegatronOptimizer | None = None
        self._hf_slices: HfSlices | None = None
        self._cached: cached_attention.CachedAttention | None = None  # within caching()
        self._overlaps = overlaps_reduction(spec)
        self.layout = SequenceLayout(
            packing=spec.batching.packing,
            context_size=self.topology.context,
            context_rank=self.groups.coordinates.context,
            token_multiple=self.topology.sequence_shards,
            lengths_on_host=platform.packed_lengths_on_host,
        )
        # Megatron's layers draw from the random streams that this creates.
        seed_everything(spec.seed)
        self.config, groups_experts = configure(spec, platform, self.topology, info, self.device)
        self.groups.limit_timeouts()  # mcore-bridge has created a group with torch's timeout
        start = time.monotonic()
        self.self_check = self._check_slice(checker, enabled=spec.self_check)
        self.self_check_s = time.monotonic() - start
        # Before the build: providers choose classes and kernels by the model.
        self.runtime.configure_model(self.config, spec.provider_options)
        self._quantised = None if spec.base_weights == "unquantised" else QuantisedBase(spec.base_weights)
        self.bare_chunks = self._build_chunks(spec)
        self._weights = state.Weights(self.bare_chunks, self.groups)
        # Before DDP wraps the modules and takes over their parameters.
        token = None if info.image_layout is None else info.image_layout.token
        vision.install(self.bare_chunks, info.architecture.images, token, spec.vision_tower)
        self.decoders = [vision.language_model(chunk) for chunk in self.bare_chunks]
        self.routers = routers.Routers(self.decoders, self.config, spec.moe, self.groups)
        self._replay: MegatronRouterReplay | None = None
        self.replay_unsupported_reason = replayed_routers.unsupported_reason(self.config, graphs=graphs is not None)
        if spec.mtp == "train":
            self.replay_unsupported_reason = mtp.REPLAY_UNSUPPORTED_REASON
            self.mtp_loss_weight = spec.mtp_loss_weight
        layers = replayed_routers.expert_layers(self.config)
        if layers is not None and self.replay_unsupported_reason is None:
            self.router_replay = self._replay = MegatronRouterReplay(self.decoders, layers, self.groups)
        last = self.decoders[-1]
        self.head = None
        if last.post_process and info.scalar_head is None:
            self.head = OutputHead(last, info.shape.vocab_size, overlap_grad_reduce=self._overlaps)
        self.prediction = mtp.PredictionHead(last) if last.post_process and spec.mtp == "train" else None
        if platform.has_transformer_engine_kernels:
            self._use_kernels()
        expert_weights = []
        if groups_experts:
            required = spec.moe.experts == "grouped" or graphs is not None  # CUDA graphs need grouped experts
            expert_weights = grouped_experts.install(
                self.decoders, self.device, required=required, quantised=self._quantised or ()
            )
        grouped_experts.release_routing(self.decoders)
        self._prefixes: shared_prefixes.SharedPrefixes | None = None
        self.share_prefixes_unless(shared_prefixes.unshared_reason(self))
        if self.shares_prefixes:
            self._prefixes = shared_prefixes.SharedPrefixes(self.decoders, self.config)
        # A separate stream only under DDP, whose AccumulateGrad nodes belong to the stream that they were created on.
        capture = None if graphs is None else CudaCapture(own_stream=spec.adapters is None)
        if spec.adapters is not None:
            self._add_adapters(spec, expert_weights)
        else:
            with contextlib.nullcontext() if capture is None else capture.stream():
                self.chunks = [self._wrap(chunk, index) for index, chunk in enumerate(self.bare_chunks)]
            self._add_optimizer(spec, expert_weights)
        if graphs is not None and capture is not None:
            self.use_cuda_graphs(graphs, capture)

    # --- construction ---

    def _add_adapters(self, spec: EngineSpec, expert_weights: list[grouped_experts.ExpertWeights]) -> None:
        """Freeze the model, and add the set of adapters that are trained in its place."""
        from megascend.training.lora.megatron_layers import megatron_adapters
        from megascend.training.lora.transformers_targets import divided_tower, head_targets

        images = self.info.architecture.images
        towers = [tower for chunk in self.bare_chunks if (tower := vision.tower(chunk, images)) is not None]
        for tower in towers:
            tower.requires_grad_(False)  # megatron_adapters freezes the language models only
        last = self.decoders[-1]
        scalar_head = last.output_layer if last.post_process and self.info.scalar_head is not None else None
        self.trainable = self.adapters = megatron_adapters(
            self.decoders,
            self.config,
            self.topology,
            self.groups,
            self.info.tensor_names,
            adapter_settings(spec, self.info, self.device),
            vocab_size=self.info.shape.vocab_size,
            model_dir=self.model_dir,
            tower=divided_tower(towers[0] if towers else None, images, spec.vision_tower),
            head=head_targets(scalar_head),
            merge=None if self.info.image_layout is None else self.info.image_layout.merge,
        )
        # Pure data parallelism of a dense model: adapters communicate only in their step.
        self.independent_ranks = self.topology.data == self.topology.world_size and not self.topology.is_moe
        # No DDP: a frozen model has no gradients to reduce.
        self.chunks = [self._in_precision(chunk) for chunk in self.bare_chunks]
        grouped_experts.build_views(expert_weights, self.chunks)

    def _add_optimizer(self, spec: EngineSpec, expert_weights: list[grouped_experts.ExpertWeights]) -> None:
        """Add the optimizer of the DDP-wrapped chunks."""
        # After DDP, which has moved parameters and gradients into its buffers.
        grouped_experts.build_views(expert_weights, self.chunks)
        if self.runtime.platform.has_transformer_engine_kernels:
            fuse_weight_gradients(self.bare_chunks)
            if self.topology.tensor == 1 and not self._overlaps:
                embedding_gradient.install(self.bare_chunks)
        self.optimizer = MegatronOptimizer(
            self.chunks,
            self.adam,
            spec.schedule,
            spec.precision,
            self.groups,
            self.routers,
            page_locked=self.runtime.platform.page_locks_memory,
        )
        # Before settings by weight, which divide the parameter groups that main parameters are found by.
        weights.load_mains(
            self.bare_chunks,
            self.config.bridge,
            self.model_dir,
            self.info.tensors,
            self.info.rounded_tensors(spec.precision),
            self.groups,
            self.optimizer.main_values(),
            {} if spec.precision == "fp32" else self._fresh,
        )
        if self.adam.by_weight:
            self._set_by_weight(self.optimizer, spec)
        self._connect_schedule(self.optimizer)
        self.trainable = FullModel(self.optimizer, reduces_while_running=self.adam.overlap_grad_reduce)

    def _set_by_weight(self, optimizer: MegatronOptimizer, spec: EngineSpec) -> None:
        """Apply settings of single weights to the optimizer. Collective."""
        try:
            slices = self.hf_slices()
        except CheckpointError as error:
            setting = "optimizer.groups" if self.adam.kind == "adamw" else f"optimizer.kind: {self.adam.kind}"
            raise ConfigError(f"{setting}: the model's weights have no names: {error}") from error
        problem, parameters = None, []
        try:
            by_weight = SettingsByWeight(self.adam, self.info, spec.vision_tower)
            entries = list(state.entries(self.bare_chunks, self.groups))
            for parameter in state.main_parameters(entries, optimizer, slices):
                weights = {weight for weight, *_ in parameter.slices}
                parameters.append((parameter, by_weight.common(weights, self.kind)))
        except (CheckpointError, ConfigError) as error:  # on the ranks that hold such a parameter
            problem = error
        raise_on_all_ranks(problem, self.groups, "the optimizer's settings by weight")
        optimizer.set_by_weight(parameters, self.info, self.precision)

    def _build_chunks(self, spec: EngineSpec) -> list[Any]:
        """Build this rank's model chunks and fill them from the checkpoint. Collective."""
        platform, info = self.runtime.platform, self.info
        chunks = build_chunks(self.config, self.device, info.scalar_head, self._quantised)
        if platform.attention_draws_its_own_dropout:
            attention_dropout.use_own_stream(chunks, self.config)
        if platform.implicit_causal_masks:
            attention_mask.install(chunks, self.config)
        if self.config.bridge._get_need_transpose() != info.transposed_experts:
            reason = "experts are stored as the checkpoint's headers have them"
            patch(self.config.bridge, "_get_need_transpose", lambda: info.transposed_experts, reason)
        self._fresh = fresh_weights(info, spec.seed)
        weights.load(
            chunks, self.config.bridge, self.model_dir, info.tensors, self.groups, self._fresh, self._quantised
        )
        if self.groups.rank == 0:
            mtp.warn_of_different_copies(info, self.model_dir)
        return chunks

    def _use_kernels(self) -> None:
        """Install megascend's CUDA kernels in the layers that they fit."""
        from megascend.training.kernels import gated_silu, head_norm, qkv_rope, qkv_rope_plain

        head_norm.install(self.bare_chunks)
        fused_qkv.install(self.decoders, qkv_rope_plain.VerifiedKernel(qkv_rope.qkv_rope))
        gated_silu.install()
        if self.config.attention_dropout == 0:
            attention_dropout.skip_stream_switch(self.bare_chunks)
        if self.config.softmax_type != "vanilla":
            packed_sinks.install(self.decoders, self.config)

    def _check_slice(self, checker: Worker | None, *, enabled: bool) -> Verdict:
        """Compare a slice of the model with transformers before the full model is built; if not enabled, only log warnings."""
        # use_diff=False: a setting that equals its class's default matters to the slice, too.
        full = json.loads(self.config.hf_config.to_json_string(use_diff=False))  # type: ignore[reportOptionalMemberAccess]
        if not enabled:
            log_warnings(Verdict("off"), full, self.groups.rank)
            return Verdict("off")
        has_window = self.config.window_size is not None
        return require_agreement(self.model_dir, full, self.max_length, has_window, self.groups, checker)

    def use_cuda_graphs(self, settings: CudaGraphs, capture: CudaCapture) -> None:
        """Run micro batches as CUDA graphs from now on, where they can be captured."""
        assert self.head is not None

        from megascend.engines.megatron.graphed_steps import GraphedSteps, without_rotary_cache

        self.shares_prefixes = False  # a captured step has a sample's keys in its own rows

        def forward(batch: MicroBatch) -> torch.Tensor:
            return self._forward_chunk(self.chunks[0], batch)

        self.graphs = GraphedSteps(
            forward=forward,
            eager=lambda batch: self._output(batch, forward(batch)),
            head=self.head,
            adapters=self.adapters,
            monitor=self.groups.monitor,
            settings=settings,
            device=self.device,
            evaluating=self._evaluating,
            uncached=lambda: without_rotary_cache(self.bare_chunks[0]),
            drop_unfinished=self._drop_unfinished_gradients,
            capture=capture,
        )

    def _drop_unfinished_gradients(self) -> None:
        """Drop gradients that a failed backward pass has left in ``grad`` and not added to DDP's buffers."""
        for chunk in self.bare_chunks:
            for parameter in chunk.parameters():
                parameter.grad = None

    def _in_precision(self, chunk: Any) -> Any:
        """Cast a chunk to 16 bits as Megatron does, except the expert biases of routers, which must stay fp32."""
        if self.precision == "fp32":
            return chunk
        with routers.biases_in_fp32(chunk), vision.frequencies_in_fp32(chunk, self.info.architecture.images):
            return Float16Module(self.config, chunk)

    def _wrap(self, chunk: Any, index: int) -> DistributedDataParallel:
        overlap = self.adam.overlap_grad_reduce
        return CollectableDDP(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(
                # Sums over micro batches and ranks in bf16 would lose small gradients.
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=self.adam.overlap_param_gather,
                use_distributed_optimizer=self.adam.distributed,
                # Megatron-LM's default: large enough for full bandwidth, small enough to overlap.
                bucket_size=max(40_000_000, 1_000_000 * self.topology.data * self.topology.context)
                if overlap
                else None,
            ),
            module=self._in_precision(chunk),
            # Only the first chunk's bucket boundaries let its reduction start before the backward pass has ended.
            disable_bucketing=index > 0,
        )

    def _connect_schedule(self, optimizer: MegatronOptimizer) -> None:
        """Set the loss scaling and the gradient reduction of Megatron's schedules."""
        self.config.grad_scale_func = optimizer.scale_loss
        if self.adam.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = functions if len(functions) > 1 else functions[0]  # type: ignore[reportAttributeAccessIssue]
            monitor = self.groups.monitor

            def reduce(*args: Any, **kwargs: Any) -> None:  # a plain function: Megatron deep-copies its configuration
                monitor.call("grad reduce", finalize_model_grads, *args, **kwargs)

            self.config.finalize_model_grads_func = reduce
        else:
            # Reduced once, in optimizer_step, so that forward_backward may be called several times before it.
            self.config.finalize_model_grads_func = None

    # --- running micro batches ---

    def scales(self, micro_batches: int) -> tuple[float, float]:
        # Megatron divides by the micro batches and multiplies by CP; its DDP then divides by DP x CP, as adapters do.
        return micro_batches * self.topology.data, self.topology.context / micro_batches

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        # Steps with a KV cache are not captured: their shapes grow.
        if self.graphs is not None and self._cached is None:
            return self.graphs.run(batches, on_output, forward_only=forward_only)

        def forward_step(iterator: Iterator[MicroBatch], model: Any):
            batch = next(iterator)
            with self.groups.monitor.phase("forward"):
                hidden = self._forward_chunk(model, batch)
            return hidden, lambda hidden: on_output(batch, self._output(batch, hidden))

        iterators = [iter(batches) for _ in self.chunks]
        real_batches = sum(not batch.dummy for batch in batches)
        with contextlib.nullcontext() if forward_only else self.routers.training(real_batches):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks,  # type: ignore[reportArgumentType]
                num_microbatches=len(batches),
                # Shape of the first micro batch: required, and ignored because variable_seq_lengths is always set.
                seq_length=batches[0].input_ids.shape[1],
                micro_batch_size=batches[0].input_ids.shape[0],
                forward_only=forward_only,
            )

    def _output(self, batch: MicroBatch, hidden: torch.Tensor) -> PlainOutput | ScalarOutput:
        if self.info.scalar_head is not None:
            return ScalarOutput(token_values(hidden))
        assert self.head is not None, "the loss is computed on the last pipeline stage"
        if batch.mtp is not None:
            hidden, prediction_hidden = mtp.split(hidden)
            prediction = self.head.output(prediction_hidden, batch.mtp.targets)
            return self.head.output(hidden, batch.targets, temperature=batch.temperature, prediction=prediction)
        lora_delta = None if self.adapters is None else self.adapters.layers.lora_delta(batch.segments)
        return self.head.output(hidden, batch.targets, lora_delta, temperature=batch.temperature)

    def _forward_chunk(self, chunk: Any, batch: MicroBatch) -> torch.Tensor:
        """Run one model chunk on a micro batch. Masks stay implicit: every sequence is causal, padding comes last."""
        # Megatron's Float16Module would return hidden states in fp32 by default, twice the memory.
        options = {} if self.precision == "fp32" else {"fp32_output": False}
        if self.adapters is not None:
            self.adapters.layers.segments = batch.segments
        if self._cached is not None:
            self._cached.batch = batch
        if self.prediction is not None:
            self.prediction.targets = batch.mtp
        number = self.chunks.index(chunk)
        self.routers.enter(batch, number)
        if self._replay is not None:
            self._replay.enter(batch)
        output = chunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed if self._prefixes is None else self._prefixes.enter(batch),
            **vision.arguments(batch, self.bare_chunks[number], self.info.architecture.images),
            **options,
        )
        if self.prediction is not None:
            self.prediction.targets = None  # a forward pass without a micro batch must not run the head
        if self.adapters is not None:
            self.adapters.layers.watch(output)
        self.routers.leave(output, number)
        if self._replay is not None:
            self._replay.leave(output)
        return output

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        # A captured step keeps the mode it was captured in, and setting it on every module takes longer than a small replay.
        replaying = self.graphs is not None and self._cached is None
        return contextlib.nullcontext() if replaying else self._evaluating()

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.finish_param_gather()
        for chunk in self.chunks:
            chunk.eval()
        # Attention kernels that draw dropout themselves ignore module.training, so eval() does not switch it off.
        ignores_mode = self.bare_chunks if self.runtime.platform.attention_draws_its_own_dropout else []
        try:
            with attention_dropout.switched_off(ignores_mode):
                yield
        finally:
            for chunk in self.chunks:
                chunk.train()

    def cache_unsupported_reason(self) -> str | None:
        return cached_attention.unsupported_reason(self.decoders, self.config, self.topology, self.device.type)

    @contextlib.contextmanager
    def caching(self) -> Iterator[None]:
        """Activate the KV cache, without CUDA graphs; see :meth:`megascend.engines.base.Engine.caching`."""
        adapters = None if self.adapters is None else self.adapters.layers
        self._cached = cached_attention.CachedAttention(self.decoders, self.config, adapters)
        try:
            with self._cached.installed():
                yield
        finally:
            self._cached = None

    def finish_param_gather(self) -> None:
        """Wait for parameter gathers of ``overlap_param_gather``; a no-op otherwise."""
        if self.adam.overlap_param_gather and self.adapters is None:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    # --- checkpoints and weights ---

    def weights(self) -> dict[str, TensorSlices]:
        # Until a pending gather is done, some parameters still have their old values.
        self.finish_param_gather()
        return self._weights.slices()

    def training_state(self, *, loading: bool) -> dict[str, Any]:
        entries = list(state.entries(self.bare_chunks, self.groups))
        objects = state.layer_objects(entries, loading=loading)
        if self.optimizer is None:
            return objects
        return objects | state.optimizer_state(entries, self.optimizer, loading=loading)

    def hf_slices(self) -> HfSlices:
        """Compute the slices in the first call; see :meth:`megascend.engines.base.Engine.hf_slices`."""
        if self._hf_slices is not None:
            return self._hf_slices
        problem, local, coordinates = None, {}, self.groups.coordinates
        try:
            entries = list(state.entries(self.bare_chunks, self.groups))
            local = hf_slices.hf_slices(self.bare_chunks, self.config.bridge, entries, self.info.tensors)
        except CheckpointError as error:
            problem = error
        purpose = "the Hugging Face slices of the model's tensors"
        raise_on_all_ranks(problem, self.groups, purpose)
        # The other ranks' slices are replicas of these.
        first = coordinates.tensor == coordinates.data == coordinates.context == 0
        first_expert = coordinates.expert_tensor == coordinates.expert_data == 0
        merged: dict[str, list[HfSlice]] = {}
        for rank_slices in gather_objects(local if first or first_expert else {}, "world", self.groups, purpose):
            for name, slices in rank_slices.items():
                merged.setdefault(name, []).extend(slices)
        self._hf_slices = {name: list(dict.fromkeys(slices)) for name, slices in merged.items()}
        return self._hf_slices

    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.finish_param_gather()
        merge = None
        if adapter is not None:
            assert self.adapters is not None
            architecture = self.info.architecture
            fused = [
                name for name in self.info.tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
            ]
            merge = merged(
                self.adapters.unsharded(adapter, everywhere=receivers != "main"),
                transposed=fused if self.info.transposed_experts else (),
                model_name=architecture.model_name,
            )
        if self._quantised is not None:
            # Adapters are merged into the weights of the checkpoint, not into quantised ones.
            yield from stored_weights(
                self.groups,
                self.info.export_tensors,
                self._fresh,
                self.config.params_dtype,
                layers=self.info.shape.num_layers,
                merge=merge,
                receivers=receivers,
                device=self.device if device is None else device,
            )
            return
        yield from named_weights(
            self.bare_chunks,
            self.config.bridge,
            self.groups,
            self.info.export_tensors,
            copies=self.info.copies,
            merge=merge,
            receivers=receivers,
            device=device,
        )

    def export(self, path: Path, adapter: str | None = None, device: str | None = None) -> None:
        # mcore-bridge gathers a layer at a time: large layers are gathered in host memory, which is slower.
        parameters = sum(math.prod(header.shape) for header in self.info.tensors.values())
        large = parameters / self.info.shape.num_layers > LARGE_LAYER
        super().export(path, adapter, "cpu" if large else device)

    def random_streams(self) -> Any:
        return tensor_parallel.get_cuda_rng_tracker().get_states()  # type: ignore[reportOptionalMemberAccess]

    def restore_random_streams(self, state: Any) -> None:
        tensor_parallel.get_cuda_rng_tracker().set_states(state)  # type: ignore[reportOptionalMemberAccess]

    def release_memory(self) -> None:
        """Drop all CUDA graphs."""
        if self.graphs is not None:
            self.graphs.release_memory()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()
        # Megatron-Core's cache of rotary embeddings would keep their modules, with a process group and its threads.
        for module in (module for chunk in self.bare_chunks for module in chunk.modules()):
            if clear := getattr(type(module).forward, "cache_clear", None):
                clear()


class CollectableDDP(DistributedDataParallel):
    """Megatron's wrapper without the cycle through its autograd hooks, which Python's collector cannot see.

    With it the model, its process groups and their threads would stay until the process ends.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        wrapper, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: Any) -> None:
            chunk, trained = wrapper(), parameter()
            assert chunk is not None
            assert trained is not None
            DistributedDataParallel._make_backward_post_hook(chunk, trained)(*unused)

        return hook


def fuse_weight_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Make Transformer Engine accumulate weight gradients into Megatron's fp32 buffers inside its matrix products."""
    for chunk in chunks:
        for module in chunk.modules():
            # Megatron's own switch, gradient_accumulation_fusion, would require Apex in layers that are not Transformer Engine's.
            if hasattr(module, "fuse_wgrad_accumulation"):
                patch(
                    module, "fuse_wgrad_accumulation", True, "weight gradients go straight into Megatron's fp32 buffers"
                )
                # With the cache a module takes the first micro batch of a call as the first of the step, and overwrites the
                # buffer: gradients of an earlier forward_backward would be lost. In bf16 the cache saves nothing.
                patch(
                    module, "disable_parameter_transpose_cache", True, "no gradient of an earlier call is overwritten"
                )


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process; each tensor parallel rank gets its own dropout stream."""
    # As in Megatron-LM: pipeline stages have different dropout, too.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    seed_generators(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
