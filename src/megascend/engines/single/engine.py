"""The single-process engine: transformers' own model, a plain loop over micro batches, torch's AdamW."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open

from megascend.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.config import Adam, Adapters, Batching, Moe, Precision, Recompute, Schedule
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.base import OnOutput, ScalarOutput, Trainable
from megascend.engines.chunks import OPTIMIZER_KEY, Chunks
from megascend.engines.export import export
from megascend.engines.full_model import FullModel
from megascend.engines.hf_parts import HfParts
from megascend.engines.plain_head import HeadOutput
from megascend.engines.rotary import RotaryByLength
from megascend.engines.scalar_head import (
    check_tied,
    fresh_weights,
    model_class,
    output_layer,
    plain_slice,
    refuse_adapters,
    tie_embeddings,
    values_of,
    without_bias,
)
from megascend.engines.single import cached_attention, router_loss
from megascend.engines.single.adapters import PeftAdapters
from megascend.engines.single.named_weights import named_weights
from megascend.engines.single.optimizer import Optimizer
from megascend.engines.single.output_head import check_plain_head, hidden_states
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.architectures import make_known_to_transformers
from megascend.huggingface.exported import some
from megascend.huggingface.info import ModelInfo
from megascend.huggingface.padding_rows import restore_padding_rows
from megascend.huggingface.scalar_head import BIAS
from megascend.kernels.reductions import out_of_range
from megascend.lora.factors import merged
from megascend.selfcheck.check import require_agreement_here
from megascend.selfcheck.in_process import Subject
from megascend.topology.topology import Topology
from megascend.topology.weight_routes import Receivers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class SingleEngine:
    """A model of transformers in one process; see :class:`megascend.engines.base.Engine`.

    Micro batches are padded on the right, whatever ``batching.packing`` says: every architecture of transformers is causal
    over plain rows, while packed ones are exact with some attention implementations only.

    Attributes:
        model: transformers' causal language model, or its token classifier where there is a scalar head.
        self_check: the result of comparing a slice of the model, computed as here, with transformers alone.
        self_check_s: seconds that it took.
    """

    kind = "single"
    mixes_adapters = False

    def __init__(
        self,
        topology: Topology,
        groups: ProcessGroups,
        info: ModelInfo,
        model_dir: Path,
        *,
        precision: Precision,
        adam: Adam,
        schedule: Schedule,
        recompute: Recompute,
        moe: Moe,
        batching: Batching,
        adapters: Adapters | None,
        seed: int,
        self_check: bool,
    ) -> None:
        self.topology, self.groups, self.info, self.device = topology, groups, info, groups.device
        self.precision: Precision = precision
        self.batching, self.model_dir = batching, model_dir
        limits = [limit for limit in (batching.max_length, info.shape.max_position) if limit is not None]
        self.max_length = min(limits, default=sys.maxsize)
        self.layout = SequenceLayout(packing=False)
        check_settings(recompute, batching)
        seed_everything(seed)
        refuse_adapters(info.scalar_head, adapters)
        fresh = fresh_weights(info.scalar_head, info.shape.hidden_size, seed) if info.scalar_head else {}
        began = time.monotonic()
        config = model_config(model_dir)
        subject = SingleSubject(info.scalar_head)
        self.self_check = require_agreement_here(model_dir, config, self.max_length, groups, subject, wanted=self_check)
        self.self_check_s = time.monotonic() - began
        self.model = load_model(model_dir, DTYPES[precision], self.device, info, fresh)
        if info.scalar_head is None:
            check_plain_head(self.model, info.shape.vocab_size)
        self._rotary = RotaryByLength(self.model)
        frozen, recomputed = adapters is not None, recompute.granularity == "full"
        router_loss.check(self.model, moe, frozen=frozen, recomputed=recomputed)
        self._router_loss = moe.aux_loss_coefficient if moe.aux_loss != "none" else 0.0
        if recomputed:
            # transformers 5.11 and later have a new name for it.
            name = "activation_checkpointing_enable"
            enable = getattr(self.model, name if hasattr(self.model, name) else "gradient_checkpointing_enable")
            enable({"use_reentrant": False})
        self._hf_parts: HfParts | None = None
        self._cached: cached_attention.CachedAttention | None = None  # while keys and values are kept
        self.optimizer: Optimizer | None = None
        self.adapters: PeftAdapters | None = None
        if adapters is not None:
            self.adapters = PeftAdapters(
                self.model,
                topology,
                groups,
                adapters,
                adam=adam,
                schedule=schedule,
                seed=seed,
                dtype=DTYPES[precision],
                device=self.device,
                model_dir=model_dir,
            )
            self.trainable: Trainable = self.adapters
        else:
            self.optimizer = Optimizer(self.model, adam, schedule, precision)
            self.trainable = FullModel(self.optimizer)
        self.model.train()

    def scales(self, micro_batches: int) -> tuple[float, float]:
        return 1.0, 1.0  # nothing is averaged: gradients of micro batches add up

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        stored = []
        for batch in batches:
            if self.adapters is not None:
                self.adapters.put_on(batch)
            if self._cached is not None:
                self._cached.batch = batch
            self._rotary.enter(batch)
            with_router_loss = self._router_loss > 0 and not forward_only
            options = {"output_router_logits": True} if with_router_loss else {}
            with self.groups.monitor.phase("forward"):
                hidden, output = hidden_states(self.model, batch.input_ids, batch.position_ids, **options)
                total, found = on_output(batch, self._head_output(batch, hidden))
            stored.append(found)
            if forward_only:
                continue
            if with_router_loss:
                coefficient = self._router_loss / len(batches)
                total = total + coefficient * router_loss.router_loss(self.model, output, batch)
            scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
            with self.groups.monitor.phase("backward"):
                (total if scale == 1 else total * scale).backward()
                if self.adapters is not None:
                    self.adapters.take_gradients()
        return stored

    def _head_output(self, batch: MicroBatch, hidden: torch.Tensor) -> HeadOutput | ScalarOutput:
        layer = output_layer(self.model)
        if self.info.scalar_head is not None:
            return ScalarOutput(values_of(layer, self.model.dropout(hidden)))
        return HeadOutput(hidden.flatten(0, 1), layer.weight, batch.targets, self.info.shape.vocab_size)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off until the block ends."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def why_no_cache(self) -> str | None:
        return cached_attention.why_not(self.model)

    @contextlib.contextmanager
    def caching(self) -> Iterator[None]:
        """See :class:`megascend.engines.base.CachingEngine`."""
        self._cached = cached_attention.CachedAttention(self.model)
        try:
            with self._cached.installed():
                yield
        finally:
            self._cached = None

    def state(self, *, everything: bool) -> dict[str, Any]:
        """See :class:`megascend.engines.base.Engine`; names are those of transformers' parameters."""
        if self.optimizer is None:
            return {}
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, kind, values in self.optimizer.tensors():
            found[OPTIMIZER_KEY.format(state=kind, key=name)] = values
        return {name: _whole(values) for name, values in found.items()}

    def hf_parts(self) -> HfParts:
        """See :class:`megascend.engines.base.Engine`; asked of transformers as the FSDP engine does."""
        if self._hf_parts is None:
            from megascend.engines.fsdp import sources

            try:
                found = sources.pieces(self.model, self.info.tensors)
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                raise CheckpointError(
                    f"transformers converts this architecture in a way of its own ({error})"
                ) from error
            self._hf_parts = sources.hf_parts(found, self.info.tensors)
        return self._hf_parts

    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        merge = None
        if adapter is not None:
            assert self.adapters is not None
            merge = merged(self.adapters.factors(adapter))
        for name, tensor in named_weights(self.model, self.info.tensors, merge, device):
            if problem := out_of_range(name, tensor, tensor.dtype):
                raise CheckpointError(f"named_weights: {problem}")
            yield name, tensor

    def export(self, path: Path, adapter: str | None) -> None:
        dtype = str(DTYPES[self.precision]).removeprefix("torch.")
        export(self.named_weights(adapter), self.model_dir, path, dtype, self.groups, self.info)

    def random_streams(self) -> None:
        """There are none."""

    def restore_random_streams(self, state: Any) -> None:
        """There are none."""

    def close(self) -> None:
        """The groups, which the backend closes, are all that is left in the process."""


class SingleSubject(Subject):
    """A small model as this engine computes it."""

    engine = "single"
    packing = False

    def plain(self, config: Any) -> Any:
        return plain_slice(config, self.scalar_head)

    def build(self, config: Any) -> Any:
        head = self.scalar_head
        model = model_class(config, head, config.vocab_size).from_config(config, dtype=torch.float32).eval()
        without_bias(model, head)
        if head is None:
            check_plain_head(model, config.vocab_size)
        self._rotary = RotaryByLength(model)
        return model

    def logits(self, model: Any, samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(ids) for ids in samples]
        rows = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        self._rotary.enter_samples(torch.arange(len(rows))[:, None].expand(rows.shape), lengths)
        hidden, _ = hidden_states(model, rows, torch.arange(rows.shape[1]).expand(rows.shape))
        layer = output_layer(model)
        logits = torch.nn.functional.linear(hidden, layer.weight, layer.bias)
        return [row[:length].float() for row, length in zip(logits, lengths, strict=True)]


def model_config(model_dir: Path) -> Any:
    """Return the configuration of a directory, in transformers' class.

    Raises:
        CheckpointError: transformers does not know it.
    """
    from transformers import AutoConfig

    make_known_to_transformers(model_dir)
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {model_dir}: {error}") from error


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    info: ModelInfo,
    fresh: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """transformers' model of a directory, complete.

    Args:
        info: of the directory: the model's scalar head, if it has one, and whether its embeddings are tied.
        fresh: the head's weights that are not in the directory.

    Raises:
        CheckpointError: transformers cannot load it, would draw some of its weights at random, or passes over some of them; or a
            number is beyond fp16's range.
    """
    head = info.scalar_head
    config = model_config(model_dir)
    try:
        if head is None:
            tie_embeddings(config, info.shape.tied)
        loader = model_class(config, head)
        with _no_progress_bars(known_differences=head is not None):
            model, report = loader.from_pretrained(
                model_dir, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"model: transformers cannot load {model_dir}: {error}") from error
    for what in ("missing_keys", "mismatched_keys"):
        own = set() if head is None else {BIAS, *(fresh or {})} - (set() if head.fresh else {*head.names})
        if found := set(report[what]) - own:
            raise CheckpointError(
                f"model: {model_dir}: {what.replace('_', ' ')}: {sorted(found)[:3]}: correct config.json, or "
                "fetch the files again"
            )
    if unused := sorted(set(report["unexpected_keys"]) & set(info.tensors)):
        raise CheckpointError(
            f"{model_dir} holds tensors that transformers has no place for in the {type(model).__name__} that config.json "
            f"describes: {some(unused)}: correct config.json, or remove the tensors from the files"
        )
    restore_padding_rows(model, info.tensors)
    if head is None:
        check_tied(model, info.shape.tied)
    without_bias(model, head)
    with torch.no_grad():
        for name, values in (fresh or {}).items():
            model.get_parameter(name).copy_(values)
    if dtype == torch.float16:
        _check_range(info)
    return model.to(device)


def _check_range(info: ModelInfo) -> None:
    """Raise CheckpointError for a stored number that has become infinite in fp16."""
    by_file = sorted((header.file, name) for name, header in info.tensors.items() if header.file is not None)
    for file, names in groupby(by_file, key=lambda entry: entry[0]):
        with safe_open(file, "pt") as opened:
            for _, name in names:
                if problem := out_of_range(name, opened.get_tensor(name)):
                    raise CheckpointError(f"model: {file}: {problem}")


@contextlib.contextmanager
def _no_progress_bars(*, known_differences: bool = False) -> Iterator[None]:
    """transformers loads without a bar, and with ``known_differences`` without a report of them."""
    from transformers.utils import logging

    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if known_differences:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _whole(values: torch.Tensor) -> Chunks:
    chunks = Chunks(tuple(values.shape), values.dtype)
    chunks.add((0,) * values.dim(), values)
    return chunks


def check_settings(recompute: Recompute, batching: Batching) -> None:
    """Raise ConfigError for settings that this engine does not have."""
    if batching.cuda_graphs is not None:
        raise ConfigError("engine single: batching.cuda_graphs is a setting of engine megatron; leave it out")
    if recompute.granularity == "selective":
        raise ConfigError("engine single: recompute.granularity=selective is not known here; set full or none")
    if recompute.granularity == "full" and recompute.layers != 1:
        raise ConfigError(
            f"engine single: recompute.layers={recompute.layers}; only whole single layers are recomputed, set 1"
        )
