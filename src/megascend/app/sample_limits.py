"""What a sample of a run may be, known before its model is built."""

from __future__ import annotations

from megascend.batch.micro_batch import SequenceLayout
from megascend.config import TrainerConfig
from megascend.data.samples import Limits
from megascend.errors import ConfigError
from megascend.huggingface.info import inspect_checkpoint
from megascend.topology.topology import Topology, plan


def sample_limits(config: TrainerConfig, world_size: int) -> Limits:
    """The smallest of the limits that the settings and the model give, and which one it is.

    Raises:
        TopologyError: the layout fits neither the world size nor the model.
        CheckpointError: the model is missing or damaged, as far as file headers tell.
    """
    shape = inspect_checkpoint(config.model).shape
    layout = layout_of_run(config, world_size)
    batching = config.batching
    multiple = layout.padded_length(1)
    budget = None if batching.micro_batch_tokens == "auto" else batching.budget
    known = [
        (
            None if budget is None else budget // multiple * multiple,
            f"batching.micro_batch_tokens: {budget}, padding included",
        ),
        (batching.max_length, f"batching.max_length: {batching.max_length}"),
        (shape.max_position, f"the model's context; max_position_embeddings: {shape.max_position}"),
    ]
    if all(limit is None for limit, _ in known):
        raise ConfigError(
            "batching.micro_batch_tokens: auto, and the model does not say how long samples may be: set batching.max_length"
        )
    length, setting = min(((limit, setting) for limit, setting in known if limit is not None), key=lambda each: each[0])
    return Limits(length, setting, shape.vocab_size, budget, multiple, layout.packing)


def layout_of_run(config: TrainerConfig, world_size: int) -> SequenceLayout:
    """:func:`sequence_layout` of so many ranks.

    Raises:
        TopologyError, CheckpointError: as :func:`sample_limits`.
    """
    return sequence_layout(config, plan(config.parallel, world_size, inspect_checkpoint(config.model).shape))


def sequence_layout(config: TrainerConfig, topology: Topology) -> SequenceLayout:
    """How the run's samples lie on the ranks; of context parallel ranks, the first."""
    return SequenceLayout(
        packing=config.batching.packing and config.engine != "single",  # whose batches are always padded
        context_size=topology.context,
        token_multiple=topology.tensor if topology.sequence_parallel else 1,
        contiguous=config.engine == "fsdp",
    )
