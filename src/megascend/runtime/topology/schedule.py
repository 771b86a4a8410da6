"""The order in which Megatron's pipeline schedules run micro batches on a stage, and how much of the model they keep.

``forward_backward_pipelining_without_interleaving`` and ``..._with_interleaving`` of megatron-core 0.15.3 and 0.16.1: the engine
runs the latter if ``parallel.virtual_pipeline`` is above 1.
"""

from __future__ import annotations

from functools import lru_cache

Task = tuple[bool, int, int]
"""A pass of one stage: forward or not, model chunk, micro batch."""


@lru_cache(maxsize=4096)
def stage_order(stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[Task, ...]:
    """Return the passes of a stage in the order in which Megatron runs them."""
    if chunks == 1:
        forwards = [(True, 0, index) for index in range(micro_batches)]
        backwards = [(False, 0, index) for index in range(micro_batches)]
        warmup = min(stages - stage - 1, micro_batches)
    else:
        # Rounds of as many micro batches as there are stages; each round passes all chunks before the next one begins.
        table = [
            (chunk, index)
            for first in range(0, micro_batches, stages)
            for chunk in range(chunks)
            for index in range(first, min(first + stages, micro_batches))
        ]
        forwards = [(True, chunk, index) for chunk, index in table]
        backwards = [(False, chunks - 1 - chunk, index) for chunk, index in table]
        warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(table))
    order = forwards[:warmup]
    for number, task in enumerate(forwards[warmup:]):
        order += [task, backwards[number]]
    return tuple(order + backwards[len(forwards) - warmup :])


@lru_cache(maxsize=4096)
def layers_in_flight(stage: int, stages: int, chunk_layers: tuple[int, ...], micro_batches: int) -> int:
    """Return the most layers, counted once for each micro batch, whose backward pass a stage has still to do at one time.

    Args:
        chunk_layers: layers of each chunk of the stage.
    """
    chunks = len(chunk_layers)
    # Every round of the steady state keeps as much as the one before.
    rounds = min(micro_batches, 4 * stages)
    rounds += -rounds % stages if chunks > 1 else 0
    load = peak = 0
    for forward, chunk, _ in stage_order(stage, stages, chunks, rounds):
        load += chunk_layers[chunk] if forward else -chunk_layers[chunk]
        peak = max(peak, load)
    return peak
