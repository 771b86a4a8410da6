"""Stacked adapters: products of the stacked copies equal scaling * B A x of each adapter."""

import pytest
import torch

from megascend.config import Adam, Adapters, Lora, Schedule
from megascend.training.lora.layout import shape_groups
from megascend.training.lora.registry import AdapterRegistry, AdapterSettings
from megascend.training.lora.stacked_adapters import StackedAdapters, StackPool
from megascend.training.lora.target_modules import FusedSlice, TargetModule

IN, OUT, EXPERTS = 5, 9, 2
ROWS = {"q_proj": [0, 1, 4, 5], "k_proj": [2, 6], "v_proj": [3, 7, 8]}
"""A fused layer whose slices' rows are scattered, as Megatron's are."""


def target_modules():
    targets = []
    for layer in range(2):
        name = f"model.layers.{layer}"
        parts = tuple(
            FusedSlice(f"{name}.self_attn.{part}", len(rows), torch.tensor(rows), torch.arange(len(rows)))
            for part, rows in ROWS.items()
        )
        targets.append(TargetModule(None, "column", parts, IN, OUT, 0, IN))
        down = FusedSlice(f"{name}.mlp.experts.down_proj", OUT, torch.arange(OUT), torch.arange(OUT))
        targets.append(TargetModule(None, "row", (down,), IN, OUT, 0, IN, experts=EXPERTS, expert_total=EXPERTS))
    return shape_groups(targets)


def make_registry(groups):
    names = [part.name for group in groups for target in group.target_modules for part in target.slices]
    settings = AdapterSettings(Adapters(), Adam(), Schedule(), 0, torch.float32, torch.device("cpu"))
    return AdapterRegistry(settings, groups, names)


def adapter(registry, name, lora):
    """Create an adapter with random values in all of its targets."""
    result = registry.create(name, lora)
    generator = torch.Generator().manual_seed(len(name))
    for span, values in result.views(result.values.detach()):
        if span.factor == "a":
            continue
        for layer, target in enumerate(registry.shape_groups[span.shape_group].target_modules):
            for part in target.slices:
                if lora.targets == "all-linear" or part.name.endswith(tuple(lora.targets)):
                    shape = values[layer][..., part.local_rows].shape
                    values[layer][..., part.local_rows] = torch.randn(shape, generator=generator)
    return result


def by_hand(registry, owner, shape_group, layer, expert):
    """Return (A, B) of every slice as autograd leaves, and the delta's matrix [in, out]."""
    target = registry.shape_groups[shape_group].target_modules[layer]
    a_values = next(v for s, v in owner.views(owner.values.detach()) if (s.shape_group, s.factor) == (shape_group, "a"))
    b_values = next(v for s, v in owner.views(owner.values.detach()) if (s.shape_group, s.factor) == (shape_group, "b"))
    leaves, delta = [], torch.zeros(IN, OUT)
    for number, part in enumerate(target.slices):
        a = a_values[layer, expert, number].clone().requires_grad_()
        b = b_values[layer, expert][:, part.local_rows].clone().requires_grad_()
        delta = delta.index_add(1, part.local_rows, owner.lora.scaling * a.T @ b)
        leaves.append((a, b))
    return leaves, delta


LORAS = {
    "wide": Lora(rank=3, alpha=7.0),
    "narrow": Lora(rank=1, alpha=2.0, targets=("q_proj", "v_proj")),
    "stable": Lora(rank=2, alpha=4.0, rslora=True, targets=("down_proj",)),
}


@pytest.mark.parametrize("names", [["wide"], ["narrow"], ["wide", "", "narrow", "stable"]])
def test_values_and_gradients_round_trip(names):
    groups = target_modules()
    registry = make_registry(groups)
    adapters = [adapter(registry, name, LORAS[name]) if name else None for name in names]
    stacked = StackedAdapters(adapters, groups, torch.float32, torch.device("cpu"))
    stacked.fill()
    grad = {}
    for shape_group, group in enumerate(groups):
        for layer in range(2):
            a, a_grads, b, b_grads = stacked.factors(shape_group, layer, None)
            # What a layer's backward pass leaves there if the loss is sum(grad * (A B)).
            grad[shape_group, layer] = torch.randn(len(a), IN, OUT)
            a_grads += grad[shape_group, layer] @ b.transpose(1, 2)
            b_grads += a.transpose(1, 2) @ grad[shape_group, layer]
            if len(adapters) > 1 and group.first.is_expert is False:
                single = stacked.factors(shape_group, layer, 2)
                assert all(
                    torch.equal(x, stacked_tensor[2:3])
                    for x, stacked_tensor in zip(single, (a, a_grads, b, b_grads), strict=True)
                )
    for member in filter(None, adapters):
        member.grads.fill_(1.0)  # of an earlier call
    stacked.collect()

    for index, member in enumerate(adapters):
        if member is None:
            continue
        assert member.accumulated
        for shape_group, group in enumerate(groups):
            gradients = {s.factor: v - 1.0 for s, v in member.views(member.grads) if s.shape_group == shape_group}
            for layer, target in enumerate(group.target_modules):
                for expert in range(target.experts):
                    leaves, delta = by_hand(registry, member, shape_group, layer, expert)
                    row = index * target.experts + expert
                    a, _, b, _ = stacked.factors(shape_group, layer, None)
                    torch.testing.assert_close(a[row] @ b[row], delta.detach())
                    (delta * grad[shape_group, layer][row]).sum().backward()
                    for number, (part, (leaf_a, leaf_b)) in enumerate(zip(target.slices, leaves, strict=True)):
                        torch.testing.assert_close(gradients["a"][layer, expert, number], leaf_a.grad)
                        torch.testing.assert_close(gradients["b"][layer, expert][:, part.local_rows], leaf_b.grad)


def test_another_set_of_adapters_finds_nothing_of_the_last_one():
    """Reuse the memory for adapters of lower ranks and other targets: it equals new memory bit for bit."""
    groups = target_modules()
    registry = make_registry(groups)
    first = [adapter(registry, "wide", LORAS["wide"]), adapter(registry, "wider", Lora(rank=8))]
    first[0].values.detach().fill_(torch.nan)
    pool = StackPool(groups, torch.float32, torch.device("cpu"))
    used = pool.fill(first)
    for stack in used.stacks:
        stack.a_grads.fill_(torch.nan)
        stack.b_grads.fill_(torch.inf)
    second = [adapter(registry, "narrow", LORAS["narrow"]), None]
    assert pool.fill(second) is used
    new = StackedAdapters(second, groups, torch.float32, torch.device("cpu"))
    new.fill()
    for reused, fresh in zip(used.stacks, new.stacks, strict=True):
        for name in ("a", "a_grads", "b", "b_grads"):
            assert torch.equal(getattr(reused, name), getattr(fresh, name))
    assert used.adapters == tuple(second)
    assert pool.fill([second[0]]) is not used, "fewer adapters need memory of another shape"
    eight = pool.fill(first)
    assert pool.fill([adapter(registry, "broad", Lora(rank=9)), None]) is not eight, "so does a higher rank"


def test_a_removed_adapter_leaves_no_stack():
    groups = target_modules()
    registry = make_registry(groups)
    adapters = [adapter(registry, "wide", LORAS["wide"]), None]
    pool = StackPool(groups, torch.float32, torch.device("cpu"))
    assert pool.fill(adapters).bytes == pool.bytes > 0
    pool.forget(adapters[0])
    assert pool.bytes == 0
