"""The Megatron strategy: world, model, DDP and optimizer, built in that order and owned here."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import Sample
from megascend.bootstrap import Runtime
from megascend.config import Adam, Adapters, Batching, Moe, Precision, Recompute, Schedule
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.megatron import attention_dropout, attention_mask, routers, weights
from megascend.engines.megatron.build import DTYPES, build_chunks, build_config, check_window
from megascend.engines.megatron.optimizer import Optimizer
from megascend.engines.megatron.output_head import OutputHead
from megascend.errors import ConfigError, DataError
from megascend.huggingface.model_shape import ModelShape
from megascend.selfcheck.check import require_agreement, tell
from megascend.selfcheck.verdict import Verdict
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from megascend.lora.manager import AdapterManager


class MegatronStrategy:
    """A model sharded over a topology, ready to train.

    Attributes:
        chunks: this rank's model chunks, wrapped in Megatron's DDP.
        config: mcore-bridge's ModelConfig.
        head: the output head on the last pipeline stage, else None.
        adapters: the adapters on a frozen model, or None if the model itself is trained.
    """

    def __init__(
        self,
        runtime: Runtime,
        topology: Topology,
        groups: ProcessGroups,
        shape: ModelShape,
        model_dir: Path,
        tensor_names: list[str],
        *,
        precision: Precision,
        adam: Adam,
        schedule: Schedule,
        recompute: Recompute,
        moe: Moe,
        batching: Batching,
        adapters: Adapters | None,
        provider_options: Mapping[str, Any],
        seed: int,
        device: torch.device,
        self_check: bool,
    ) -> None:
        self.runtime, self.topology, self.groups, self.shape = runtime, topology, groups, shape
        self.precision, self.batching, self.device, self.adam = precision, batching, device, adam
        self.max_length = longest_sample(batching.max_length, shape.max_position)
        seed_everything(seed)
        self.config = build_config(model_dir, topology, precision, recompute, runtime.platform)
        routers.check(self.config, moe, topology.pipeline, frozen=adapters is not None)
        check_window(self.config, self.max_length)
        groups.limit_timeouts()  # mcore-bridge has made a group of its own
        self.self_check = self._check(model_dir, self_check)
        runtime.configure_model(self.config, provider_options)
        self.bare_chunks = build_chunks(self.config, device)
        if runtime.platform.attention_draws_its_own_dropout:
            attention_dropout.use_own_stream(self.bare_chunks, self.config)
        if runtime.platform.implicit_causal_masks:
            attention_mask.install(self.bare_chunks, self.config)
        weights.load(self.bare_chunks, self.config.bridge, model_dir, tensor_names, groups)
        self.routers = routers.Routers(self.bare_chunks, self.config, moe, groups)
        last = self.bare_chunks[-1]
        overlap = adam.overlap_grad_reduce and adapters is None
        self.head = OutputHead(last, shape.vocab_size, overlap_grad_reduce=overlap) if last.post_process else None
        if runtime.platform.has_transformer_engine_kernels:
            from megascend.kernels import head_norm

            head_norm.install(self.bare_chunks)
        self.adapters: AdapterManager | None = None
        self._optimizer: Optimizer | None = None
        if adapters is not None:
            self.adapters = self._host(adapters, schedule, seed, tensor_names, model_dir)
            self.chunks = [self._precise(chunk) for chunk in self.bare_chunks]
        else:
            self.chunks = [self._wrap(chunk, index) for index, chunk in enumerate(self.bare_chunks)]
            if runtime.platform.has_transformer_engine_kernels:
                fuse_weight_gradients(self.bare_chunks)
            self._optimizer = Optimizer(self.chunks, adam, schedule, precision, groups, self.routers)
            self._connect_schedule(self._optimizer)

    def _check(self, model_dir: Path, self_check: bool) -> Verdict:
        """Hold a slice of the model against transformers, before anything large is built; or only say what is unproven."""
        full = json.loads(self.config.hf_config.to_json_string(use_diff=False))  # type: ignore[reportOptionalMemberAccess]
        if not self_check:
            tell(Verdict("off"), full, self.groups.rank)
            return Verdict("off")
        window_in_force = self.config.window_size is not None
        return require_agreement(model_dir, full, self.max_length, window_in_force, self.groups)

    @property
    def optimizer(self) -> Optimizer:
        """Steps all chunks.

        Raises:
            ConfigError: the model is frozen and adapters are trained.
        """
        if self._optimizer is None:
            raise ConfigError("the model is frozen: this backend trains adapters")
        return self._optimizer

    def _host(
        self, adapters: Adapters, schedule: Schedule, seed: int, tensor_names: list[str], model_dir: Path
    ) -> AdapterManager:
        from megascend.lora.manager import AdapterManager

        return AdapterManager(
            self.bare_chunks,
            self.config,
            self.topology,
            self.groups,
            tensor_names,
            adapters,
            adam=self.adam,
            schedule=schedule,
            seed=seed,
            dtype=DTYPES[self.precision],
            device=self.device,
            vocab_size=self.shape.vocab_size,
            model_dir=model_dir,
        )

    def _precise(self, chunk: Any) -> Any:
        if self.precision == "fp32":
            return chunk
        with routers.biases_in_fp32(chunk):
            return Float16Module(self.config, chunk)

    def _wrap(self, chunk: Any, index: int) -> DistributedDataParallel:
        overlap = self.adam.overlap_grad_reduce
        return DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=self.adam.overlap_param_gather,
                use_distributed_optimizer=self.adam.distributed,
                # Megatron-LM's default: large enough for full bandwidth, small enough to overlap.
                bucket_size=max(40_000_000, 1_000_000 * self.topology.data * self.topology.context)
                if overlap
                else None,
            ),
            module=self._precise(chunk),
            # Only the first chunk's bucket boundaries let its reduction start before the backward pass has ended.
            disable_bucketing=index > 0,
        )

    def _connect_schedule(self, optimizer: Optimizer) -> None:
        """Tell Megatron's schedules how to scale the loss and when to reduce gradients."""
        self.config.grad_scale_func = optimizer.scale_loss
        if self.adam.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = functions if len(functions) > 1 else functions[0]  # type: ignore[reportAttributeAccessIssue]
            monitor = self.groups.monitor

            def reduce(*args: Any, **kwargs: Any) -> None:  # a plain function: upstream copies configurations deeply
                monitor.call("grad reduce", finalize_model_grads, *args, **kwargs)

            self.config.finalize_model_grads_func = reduce
        else:
            # Reduced once, in optimizer_step, so that forward_backward may be called several times before it.
            self.config.finalize_model_grads_func = None

    @property
    def reduces_while_running(self) -> bool:
        """True if a forward_backward leaves gradients that are reduced over data parallel ranks already."""
        return self.adam.overlap_grad_reduce and self.adapters is None

    def forward_chunk(self, chunk: Any, batch: MicroBatch) -> torch.Tensor:
        """Run one model chunk on a micro batch. Masks stay implicit: every sequence is causal, padding comes last."""
        options = {} if self.precision == "fp32" else {"fp32_output": False}
        if self.adapters is not None:
            self.adapters.layers.enter(batch.segments)
        number = self.chunks.index(chunk)
        self.routers.enter(batch, number)
        output = chunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed,
            **options,
        )
        if self.adapters is not None:
            self.adapters.layers.watch(output)
        self.routers.leave(output, number)
        return output

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off, parameters complete, until the block ends."""
        self.finish_param_gather()
        for chunk in self.chunks:
            chunk.eval()
        by_hand = self.bare_chunks if self.runtime.platform.attention_draws_its_own_dropout else []
        try:
            with attention_dropout.switched_off(by_hand):
                yield
        finally:
            for chunk in self.chunks:
                chunk.train()

    def finish_param_gather(self) -> None:
        """Wait for parameters that ``overlap_param_gather`` is still bringing in; a no-op otherwise."""
        if self.adam.overlap_param_gather and self.adapters is None:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise DataError for samples that the model cannot take."""
        for index, sample in enumerate(samples):
            if len(sample) > self.max_length:
                raise DataError(
                    f"sample {index} has {len(sample)} tokens, over the limit of {self.max_length} (the model's "
                    f"max_position_embeddings is {self.shape.max_position}; batching.max_length="
                    f"{self.batching.max_length}); shorten or split it"
                )
            for name in ("input_ids", "target_ids"):
                ids = getattr(sample, name)
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= self.shape.vocab_size:
                    raise DataError(
                        f"sample {index} has {name} {low if low < 0 else high}, outside the vocabulary "
                        f"[0, {self.shape.vocab_size}); does the tokenizer belong to this model?"
                    )


def longest_sample(setting: int | None, of_model: int | None) -> int:
    """The smaller of the two limits that are known."""
    return min([limit for limit in (setting, of_model) if limit is not None], default=sys.maxsize)


def fuse_weight_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Let Transformer Engine add weight gradients to Megatron's fp32 buffers inside its matrix products.

    Megatron's own switch (``gradient_accumulation_fusion``) would also ask for Apex in layers that are not Transformer
    Engine's. With its parameter cache on, a module takes the first micro batch of a call as the first of the step and
    overwrites the buffer, which would drop the gradients of an earlier ``forward_backward``; it saves nothing in bf16.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[reportArgumentType]
                module.disable_parameter_transpose_cache = True  # type: ignore[assignment]


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process; tensor parallel ranks get their own dropout stream."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
