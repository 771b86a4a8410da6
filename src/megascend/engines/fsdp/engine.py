"""The FSDP2 engine: transformers' own model sharded by torch, a plain loop over micro batches, torch's AdamW on the shards.

Engine ``single`` is this engine on one rank, with one sample a row and an unsharded model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from megascend.engines.base import DTYPES, Engine, OnOutput, longest_sample, seed_generators
from megascend.engines.common import linear_attention, vision
from megascend.engines.common.adamw import MainAdamW, ModelAdamW, WeightMap
from megascend.engines.common.full_model import FullModel
from megascend.engines.common.heads import fresh_weights
from megascend.engines.common.key_values import DecodeStep, Prefill, other_attention
from megascend.engines.common.replayed_blocks import BlockReplay
from megascend.engines.common.rotary import RotaryByLength
from megascend.engines.common.transformers_names import check_rows, tensor_slices
from megascend.engines.context import EngineContext, EngineSpec
from megascend.engines.fsdp import attention, compilation, recomputation, shards, transformers_api
from megascend.engines.fsdp.adapters import adapter_targets, sharded_adapters
from megascend.engines.fsdp.attention import HeadExchange, check_heads
from megascend.engines.fsdp.expert_parallel import ExpertShare, keep_local_experts
from megascend.engines.fsdp.named_weights import named_weights
from megascend.engines.fsdp.output_head import LossHead, check_product
from megascend.engines.fsdp.router_loss import RouterLoss, router_recorder
from megascend.engines.fsdp.self_check import FsdpSubject, engine_name
from megascend.engines.fsdp.sharding import FsdpGroups, freeze, reshard, shard
from megascend.engines.fsdp.token_mixing import carries_state, check_layers, pass_borders
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.selfcheck import in_process
from megascend.models.selfcheck.check import require_agreement_in_process
from megascend.runtime.distributed.objects import raise_on_all_ranks
from megascend.runtime.topology.topology import Receivers, Topology
from megascend.training.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.training.checkpoint.hf_slices import HfSlices
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.kernels.prefix_attention import PrefixLayout
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.factors import merged
from megascend.training.lora.target_modules import RefusedTargets, TargetModule
from megascend.training.lora.transformers_targets import is_transposed


class FsdpEngine(Engine):
    """A transformers model, sharded by torch; see :class:`megascend.engines.base.Engine`.

    Its parameters are sharded between calls.

    Args:
        context: engine context with :class:`FsdpGroups` as its factory.
        sharded: False for engine ``single``. On one rank ``fully_shard`` would only copy: small steps took 1.5 times as long in
            fp32 and 1.6 times in bf16, to the same bits. One sample a row needs no attention of ours: any architecture works.

    Attributes:
        model: transformers' causal language model, or its token classifier for a scalar head.
        optimizer: optimizer of the model's own parameters; None if adapters are trained.
        bytes_read: bytes of the checkpoint that this rank has read.
        adapters: adapters on a frozen model; None if the model itself is trained.
    """

    def __init__(self, spec: EngineSpec, context: EngineContext, *, sharded: bool = True) -> None:
        self.kind = engine_name(sharded)
        super().__init__(spec, context)
        topology, groups, info = self.topology, self.groups, self.info
        self._fsdp, self._sharded = spec.fsdp, sharded
        packing = spec.batching.packing and sharded
        self.layout = SequenceLayout(
            packing=packing,
            context_size=topology.context,
            context_rank=groups.coordinates.context,
            for_megatron=False,
            # Ulysses exchanges heads for whole samples: every rank then computes all positions, and chunks need no balancing.
            contiguous=True,
        )
        self._exchange = HeadExchange(groups.device_group("cp")) if topology.context > 1 else None
        seed_generators(spec.seed + groups.rank)  # ranks have different samples, and so different dropout
        checked = CheckedModel.build(spec, info, topology, sharded=sharded)
        self.model, layers, self._hf_slices = checked.model, checked.layers, checked.hf_slices
        npu = self.device.type == "npu"
        subject = FsdpSubject(
            info.scalar_head, packing=spec.batching.packing, context=topology.context, npu=npu, sharded=sharded
        )
        start = time.monotonic()
        self.self_check = require_agreement_in_process(
            self.model_dir, self.model.config, self.max_length, groups, subject, enabled=spec.self_check
        )
        self.self_check_s = time.monotonic() - start
        self._rotary = RotaryByLength(self.model)
        self._cached: Prefill | DecodeStep | None = None  # of the micro batch that runs
        if packing:
            pass_borders(self.model)
        self._dummy_image: vision.DummyImage | None = None
        vision.freeze_tower(self.model, info.architecture.images, spec.vision_tower)
        if info.architecture.images is not None and sharded:
            self._dummy_image = vision.DummyImage(self.model, info.architecture.images)
        # Recomputation, then compilation, then fully_shard's hooks: each wraps the one before.
        recomputation.recompute(layers, spec.recompute.granularity)
        if spec.fsdp.compile:
            compilation.compile_layers(layers, transformers_api.is_fused_experts)
        self._share = None
        if topology.expert > 1:
            self._share = ExpertShare(groups.device_group("ep"), topology.expert, groups.coordinates.expert)
        self.optimizer: MainAdamW | None = None
        self.adapters: AdapterSet | None = None
        if spec.adapters is not None:
            self.adapters = sharded_adapters(
                self.model, spec, context, checked.adapter_targets, self._share, checked.refused_targets
            )
            if sharded:  # before sharding, which takes the dtype of the shards from the parameters
                freeze(self.model, self.dtype)
            self.model.requires_grad_(False)
            self._transposed = {target.slices[0].name for target in checked.adapter_targets if is_transposed(target)}
        self._router_loss: RouterLoss | None = None
        if spec.moe.aux_loss != "none":
            self._router_loss = RouterLoss(self.model, spec.moe, groups, frozen=spec.adapters is not None)
        self._units = self._shard(spec, context) if sharded else []
        # Memory is allocated only now, for the shards alone. to_empty leaves buffers uninitialised too: they are computed again.
        if sharded:
            self.model.to_empty(device="cpu" if spec.fsdp.offload else self.device)
        else:
            transformers_api.allocate_parameters(self.model, self.device)
        transformers_api.compute_buffers(self.model, self.device)
        self._shards = list(shards.shards(self.model, self._share))
        if self.adapters is not None:
            self.trainable = self.adapters
        else:
            self.optimizer = self._make_optimizer(spec)
            self.trainable = FullModel(self.optimizer)
        self._load(spec)
        self._head = self._make_head()
        self.model.train()
        self._replay = self.router_replay = BlockReplay.of(self.model, self.device, self.topology.expert)
        self.replay_unsupported_reason = "fsdp.compile compiles the routers" if spec.fsdp.compile else None
        self.share_prefixes_unless(self._unshared_reason())

    def _shard(self, spec: EngineSpec, context: EngineContext) -> list[FSDPModule]:
        """Divide the model, which is on ``meta``, over the ranks; return the FSDP units."""
        axes, groups = context.factory, self.groups
        assert isinstance(axes, FsdpGroups)
        # Before sharding, so that only this rank's experts are sharded, over the ranks that hold the same ones.
        expert_mesh = None
        if self._share is not None:
            transformers_api.divide_experts(self.model, self._share)
            expert_mesh = axes.expert_mesh(self.topology, groups)
        mesh = axes.mesh(self.topology.world_size, self.device.type)
        page_locked = context.runtime.platform.page_locks_memory
        return shard(self.model, mesh, spec.fsdp, self.dtype, page_locked=page_locked, expert_mesh=expert_mesh)

    def _make_optimizer(self, spec: EngineSpec) -> shards.ShardAdamW | ModelAdamW:
        settings = spec.optimizer, spec.schedule, spec.precision
        weights = WeightMap(self.info, spec.vision_tower, self.groups, self.hf_slices, self.kind)
        if not self._sharded:
            return ModelAdamW(self.model, *settings, weights)
        trained = [local_shard for local_shard in self._shards if local_shard.trained]
        return shards.ShardAdamW(trained, *settings, self.groups, spec.fsdp.replicate, weights)

    def _make_head(self) -> LossHead:
        """Return the head; check on the loaded model itself that it is a plain product, if no part of it is sharded."""
        scalar = self.info.scalar_head is not None
        if not (self._sharded or scalar):  # otherwise a slice is compared, and only with self_check
            tokens = torch.arange(2, device=self.device)[None]
            self._rotary.enter_samples(torch.zeros_like(tokens), [2])
            with torch.no_grad():
                check_product(self.model, sharded=False, input_ids=tokens)
        layers = None if self.adapters is None else self.adapters.layers
        return LossHead(self.model, self.info.shape.vocab_size, layers, scalar=scalar, sharded=self._sharded)

    def _load(self, spec: EngineSpec) -> None:
        """Fill this rank's shards from the checkpoint. Collective."""
        fresh = fresh_weights(self.info, spec.seed)
        # Into the fp32 main parameters, from which 16-bit ones are rounded.
        mains = {} if self.optimizer is None else self.optimizer.mains
        targets = [replace(target, local=mains.get(target.name, target.local)) for target in self._shards]
        problem, self.bytes_read = None, 0
        try:
            if isinstance(self._hf_slices, CheckpointError):
                tensors = transformers_api.converted_tensors(self.model_dir, self.info, fresh)
                shards.copy(targets, tensors, self.dtype)
            else:
                self.bytes_read = shards.load(targets, self._hf_slices, self.info.tensors, fresh, self.dtype)
        except CheckpointError as error:
            problem = error
        raise_on_all_ranks(problem, self.groups, f"the load of {self.model_dir}")
        if self.optimizer is not None:
            self.optimizer.round_parameters()

    def scales(self, micro_batches: int) -> tuple[float, float]:
        # Gradients of micro batches are summed; fully_shard averages over all ranks, and so do adapters.
        return float(self.topology.world_size), 1.0

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        results = []
        router_loss = None if forward_only else self._router_loss
        if router_loss is not None:
            router_loss.begin(batches)
        try:
            for number, batch in enumerate(batches, 1):
                if not self._fsdp.reshard_after_forward:
                    # Parameters stay gathered until the last micro batch of the call.
                    self.model.set_reshard_after_backward(number == len(batches))
                if self.adapters is not None:
                    self.adapters.layers.segments = batch.segments
                self._rotary.enter(batch)
                self._cached = batch.cached
                if self._dummy_image is not None:
                    self._dummy_image.enter(batch)
                # transformers passes unknown keywords on to the attention function, its only way to learn the samples' borders.
                options = {attention.KEYWORD: self._sample_lengths(batch)} if self._sharded else {}
                watching = contextlib.nullcontext() if router_loss is None else router_loss.watching()
                replaying = contextlib.nullcontext() if self._replay is None else self._replay.replaying(batch)
                with self.groups.monitor.phase("forward"), watching, replaying:
                    loss, result = self._head.run(batch, on_output, **options)
                if router_loss is not None:
                    loss = loss + router_loss.loss(batch)
                if self.adapters is not None:
                    self.adapters.layers.require_called()
                results.append(result)
                if not forward_only:
                    scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
                    with self.groups.monitor.phase("backward"):
                        (loss if scale == 1 else loss * scale).backward()
        except ConfigError:  # raised on all ranks, so that all leave FSDP's state machine at the same point
            if hasattr(self.model, "reset_iter_state"):  # torch 2.13
                self.model.reset_iter_state()
            raise
        finally:
            self._cached = None
            # Also after an error: exports, checkpoints and the next call expect sharded parameters.
            reshard(self._units)
        return results

    def _sample_lengths(self, batch: MicroBatch) -> attention.SampleLengths:
        if isinstance(batch.packed, PrefixLayout):
            return attention.SampleLengths(None, prefixes=batch.packed)
        packed = None if batch.packed is None else batch.packed.lengths
        return attention.sample_lengths(
            packed, self._exchange, self.device, self.dtype, compiled=self._fsdp.compile, cached=batch.cached
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def _unshared_reason(self) -> str | None:
        text = self.model.config.get_text_config()
        reasons = {
            "samples are not packed": not self.layout.packing,
            f"parallel.context={self.topology.context}": self._exchange is not None,
            "fsdp.compile": self._fsdp.compile,
            "layers that carry a state from token to token": carries_state(self.model),
            "attention that selects its keys": self.info.architecture.context_algorithms is not None,
            "dropout of the model": any(
                value for name, value in vars(text).items() if name.endswith(("dropout", "pdrop"))
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), other_attention(self.model.config))

    def cache_unsupported_reason(self) -> str | None:
        if self._exchange is not None:
            return f"parallel.context={self.topology.context}"
        if self._fsdp.compile:
            return "fsdp.compile"
        if not self._sharded and (reason := attention.uncached_reason(self.model)) is not None:
            return reason
        return other_attention(self.model.config, linear_attention.covered_kinds(self.model))

    @contextlib.contextmanager
    def caching(self) -> Iterator[None]:
        rows: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._sharded:
            images = self.info.architecture.images
            tower = None if images is None else vision.tower(self.model, images)
            rows = attention.caching_rows(self.model, tower, lambda: self._cached)
        with rows, linear_attention.cached_delta_rules(self.model, lambda: self._cached):
            yield

    def weights(self) -> dict[str, TensorSlices]:
        # Replicas hold the same shards: the ranks of the first one write them.
        ranks_per_replica = self.topology.world_size // self._fsdp.replicate
        rank = self.groups.rank
        return shards.slices_of(self._shards, first_copy=rank < ranks_per_replica, first_rank=rank == 0)

    def training_state(self, *, loading: bool) -> dict[str, Any]:
        return {} if self.optimizer is None else self.optimizer.state(self.weights(), loading=loading)

    def hf_slices(self) -> HfSlices:
        if isinstance(self._hf_slices, CheckpointError):
            raise CheckpointError(str(self._hf_slices))
        check_rows(self._hf_slices, self.info.tensors)
        return self._hf_slices

    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        merge = None
        if adapter is not None:
            assert self.adapters is not None
            merge = merged(self.adapters.unsharded(adapter, everywhere=receivers != "main"), self._transposed)
        yield from named_weights(
            self.model,
            self.groups,
            self.info.tensors,
            self.dtype,
            merge=merge,
            receivers=receivers,
            device=device,
            share=self._share,
        )


@dataclass(frozen=True)
class CheckedModel:
    """A model on ``meta`` that this engine supports with the settings of a run.

    Attributes:
        layers: its decoder layers.
        hf_slices: origin of its parameters in the checkpoint; computed before sharding, while they have their full shapes. For
            a model on one rank perhaps the reason why they are not slices of it.
        adapter_targets: every layer that adapters could act on; none without adapters.
        refused_targets: other modules that peft could adapt, or None.
    """

    model: Any
    layers: list[torch.nn.Module]
    hf_slices: HfSlices | CheckpointError
    adapter_targets: list[TargetModule]
    refused_targets: RefusedTargets | None

    @classmethod
    def build(cls, spec: EngineSpec, info: ModelInfo, topology: Topology, *, sharded: bool) -> CheckedModel:
        """Build the model and check it against settings and layout. Local: a dry run does it without process groups."""
        if info.image_layout is not None and topology.context > 1:
            raise ConfigError(
                f"engine fsdp: parallel.context: {topology.context} with {info.architecture.model_type}, whose images are not "
                "divided over context parallel ranks: set 1"
            )
        algorithms = info.architecture.context_algorithms
        if topology.context > 1 and algorithms is not None and "ulysses" not in algorithms:
            raise ConfigError(
                f"engine fsdp: parallel.context: {topology.context} with {info.architecture.model_type}, whose sparse attention "
                "chooses among keys of whole samples: set 1"
            )
        context, unsharded = topology.context, None if sharded else DTYPES[spec.precision]
        model = transformers_api.meta_model(spec.model, info.shape.tied, info.scalar_head, unsharded)
        if context > 1:
            text = model.config.get_text_config()
            heads = text.num_attention_heads
            check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, context)
        layers: list[torch.nn.Module] = []
        if sharded or spec.recompute.granularity != "none":
            layers = transformers_api.layers(model)
        if sharded:
            longest = longest_sample(spec, info)
            check_layers(model, layers, packing=spec.batching.packing, context=context, longest=longest)
        if spec.moe.aux_loss != "none":
            router_recorder(model, spec.moe, frozen=spec.adapters is not None)
        targets, refused_targets = [], None
        if spec.adapters is not None:
            images, trained = info.architecture.images, spec.vision_tower
            targets, refused_targets = adapter_targets(model, spec.adapters, images, trained, tied=info.shape.tied)
        slices: HfSlices | CheckpointError
        try:
            slices = tensor_slices(model, info.tensors)
        except CheckpointError as error:
            # A model on one rank can be read as transformers converts it, and whatever else is wrong is found there.
            if sharded:
                raise
            slices = error
        return cls(model, layers, slices, targets, refused_targets)


def check_model(
    spec: EngineSpec, info: ModelInfo, topology: Topology, platform: str, *, sharded: bool = True
) -> list[str]:
    """Raise the errors that the constructor would raise before it reads weights; return the names of adapter targets."""
    checked = CheckedModel.build(spec, info, topology, sharded=sharded)
    packing, npu = spec.batching.packing, platform == "npu"
    subject = FsdpSubject(info.scalar_head, packing=packing, context=topology.context, npu=npu, sharded=sharded)
    in_process.check_first_pass(
        spec.model, checked.model.config, longest_sample(spec, info), subject, runs_forward=spec.self_check
    )
    if topology.expert > 1:
        keep_local_experts(checked.model, topology.expert, transformers_api.is_fused_experts)
    return [target.slices[0].name for target in checked.adapter_targets]
