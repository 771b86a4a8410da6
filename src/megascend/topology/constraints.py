"""What Megatron-Core requires of a layout, each requirement as an error that says what to change. Pure.

Sources: ``parallel_state.initialize_model_parallel``, ``ModelParallelConfig``, ``TransformerConfig``, ``Attention`` and
``MoELayer`` of megatron-core 0.15.3 and 0.16.1. Where the two differ, the narrower one counts.
"""

from __future__ import annotations

from megascend.config import Parallel
from megascend.errors import TopologyError
from megascend.huggingface.model_shape import ModelShape


def check_grid(parallel: Parallel, expert_tensor: int, world_size: int) -> None:
    """Requirements that do not depend on the model.

    Raises:
        TopologyError: the ranks cannot be laid out, or expert gradients would be wrong.
    """
    p = parallel
    if world_size < 1:
        raise TopologyError(f"the world has {world_size} ranks; there must be at least one")
    attention = p.tensor * p.pipeline * p.context
    if world_size % attention:
        raise TopologyError(
            f"world size {world_size} is not a multiple of parallel.tensor={p.tensor} x "
            f"parallel.pipeline={p.pipeline} x parallel.context={p.context} = {attention}; "
            f"start {_nearby(world_size, attention)} processes (--nproc), or lower one of them"
        )
    experts = expert_tensor * p.expert * p.pipeline
    if world_size % experts:
        raise TopologyError(
            f"world size {world_size} is not a multiple of parallel.expert_tensor={expert_tensor} x "
            f"parallel.expert={p.expert} x parallel.pipeline={p.pipeline} = {experts}; "
            f"start {_nearby(world_size, experts)} processes (--nproc), or lower one of them"
            + (" (expert_tensor defaults to tensor)" if p.expert_tensor is None and expert_tensor > 1 else "")
        )
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        raise TopologyError(
            f"parallel.virtual_pipeline={p.virtual_pipeline} interleaves the chunks of pipeline ranks, but "
            "parallel.pipeline=1; set pipeline to 2 or more, or virtual_pipeline to 1"
        )
    if p.expert == 1 and expert_tensor != p.tensor:
        # Megatron marks expert weights for the expert data parallel group only if EP > 1; else their gradients are
        # reduced with those of all other weights, over DP x CP, whose ranks hold the same expert shards only if
        # ETP == TP. Smaller ETP: replicas within the TP group are never summed. Larger: different shards are.
        raise TopologyError(
            f"parallel.expert_tensor={expert_tensor} differs from parallel.tensor={p.tensor} while parallel.expert=1: "
            "Megatron-Core would reduce the experts' gradients over the wrong ranks and diverge without an error; "
            f"set expert_tensor to {p.tensor} (or leave it out), or expert to 2 or more"
        )


def check_model(parallel: Parallel, expert_tensor: int, model: ModelShape) -> None:
    """Requirements that the model's sizes put on the layout.

    Raises:
        TopologyError: something does not divide, or a dense model is given expert parallelism.
    """
    p = parallel
    _divides("parallel.tensor", p.tensor, model.num_heads, "attention heads")
    _divides(
        "parallel.tensor",
        p.tensor,
        model.num_query_groups,
        "query groups (key/value heads)",
        common=(model.num_heads,),
    )
    _divides("parallel.tensor", p.tensor, model.ffn_hidden_size, "columns of the MLP (intermediate_size)")
    _divides("parallel.tensor", p.tensor, model.shared_expert_ffn_hidden_size, "columns of the shared experts")
    stages = p.pipeline * p.virtual_pipeline
    if model.num_layers % stages:
        raise TopologyError(
            f"{model.num_layers} layers cannot be divided evenly over parallel.pipeline={p.pipeline}"
            + (f" x parallel.virtual_pipeline={p.virtual_pipeline} = {stages}" if p.virtual_pipeline > 1 else "")
            + f" stages; the product must be one of {_listed(_divisors(model.num_layers))}"
        )
    if not model.is_moe:
        for name, value, default in (("expert", p.expert, 1), ("expert_tensor", p.expert_tensor, None)):
            if value is not default and value != default:
                raise TopologyError(
                    f"parallel.{name}={value}, but the model has no experts; leave {name} at its default"
                )
        return
    _divides("parallel.expert", p.expert, model.num_experts, "experts")
    _divides("parallel.expert_tensor", expert_tensor, model.moe_ffn_hidden_size, "columns of an expert's MLP")


def resolve_sequence_parallel(parallel: Parallel, is_moe: bool) -> tuple[bool, list[str]]:
    """Whether sequence parallelism is on, and a note where that was not what the setting said.

    Raises:
        TopologyError: it is switched off where Megatron cannot train without it.
    """
    if parallel.tensor == 1:
        if parallel.sequence:
            return False, ["parallel.sequence has nothing to divide at parallel.tensor=1: sequence parallelism is off"]
        return False, []
    if is_moe and parallel.sequence is False:
        raise TopologyError(
            f"parallel.sequence=false with experts and parallel.tensor={parallel.tensor}: Megatron-Core trains MoE "
            "layers under tensor parallelism only with sequence parallelism; remove the setting, or set tensor to 1"
        )
    if is_moe and parallel.sequence is None:
        return True, [f"sequence parallelism is on: a model with experts needs it at parallel.tensor={parallel.tensor}"]
    return bool(parallel.sequence), []


def _divides(setting: str, value: int, count: int | None, what: str, common: tuple[int, ...] = ()) -> None:
    if count is not None and count % value:
        usable = [size for size in _divisors(count) if all(other % size == 0 for other in common)]
        raise TopologyError(f"{setting}={value} does not divide the {count} {what}; use {_listed(usable)}")


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _listed(sizes: list[int], most: int = 8) -> str:
    shown = [str(size) for size in sizes[:most]]
    if len(sizes) > most:
        return ", ".join(shown) + ", ..."
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _nearby(world_size: int, multiple: int) -> str:
    below = world_size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)
