"""Adapters side by side: what the layers would compute with a stage's copies is W x + scaling * B A x of each adapter."""

import pytest
import torch

from megascend.config import Adam, Adapters, Lora, Schedule
from megascend.lora.layout import families
from megascend.lora.registry import AdapterRegistry
from megascend.lora.stacked_adapters import Stage, common_rank
from megascend.lora.target_modules import Part, Site

IN, OUT, EXPERTS = 5, 9, 2
ROWS = {"q_proj": [0, 1, 4, 5], "k_proj": [2, 6], "v_proj": [3, 7, 8]}
"""A fused layer whose parts' rows are scattered, as Megatron's are."""


def sites():
    found = []
    for layer in range(2):
        name = f"model.layers.{layer}"
        parts = tuple(
            Part(f"{name}.self_attn.{part}", len(rows), torch.tensor(rows), torch.arange(len(rows)))
            for part, rows in ROWS.items()
        )
        found.append(Site(None, "column", parts, IN, OUT, 0, IN))
        down = Part(f"{name}.mlp.experts.down_proj", OUT, torch.arange(OUT), torch.arange(OUT))
        found.append(Site(None, "row", (down,), IN, OUT, 0, IN, experts=EXPERTS, expert_total=EXPERTS))
    return families(found)


def make_registry(of):
    names = [part.name for family in of for site in family.sites for part in site.parts]
    return AdapterRegistry(
        Adapters(), of, names, adam=Adam(), schedule=Schedule(), seed=0, scales_loss=False, device=torch.device("cpu")
    )


def adapter(registry, name, lora):
    """With every value drawn, where the adapter has a target."""
    made = registry.create(name, lora)
    generator = torch.Generator().manual_seed(len(name))
    for span, values in made.views(made.values.detach()):
        if span.factor == "a":
            continue
        for layer, site in enumerate(registry.families[span.family].sites):
            for part in site.parts:
                if lora.targets == "all-linear" or part.name.endswith(tuple(lora.targets)):
                    shape = values[layer][..., part.local_rows].shape
                    values[layer][..., part.local_rows] = torch.randn(shape, generator=generator)
    return made


def by_hand(registry, made, family, layer, expert):
    """(A, B) of every part, as tensors that autograd follows, and the delta's matrix [in, out]."""
    site = registry.families[family].sites[layer]
    a_values = next(v for s, v in made.views(made.values.detach()) if (s.family, s.factor) == (family, "a"))
    b_values = next(v for s, v in made.views(made.values.detach()) if (s.family, s.factor) == (family, "b"))
    leaves, delta = [], torch.zeros(IN, OUT)
    for number, part in enumerate(site.parts):
        a = a_values[layer, expert, number].clone().requires_grad_()
        b = b_values[layer, expert][:, part.local_rows].clone().requires_grad_()
        delta = delta.index_add(1, part.local_rows, made.lora.scaling * a.T @ b)
        leaves.append((a, b))
    return leaves, delta


LORAS = {
    "wide": Lora(rank=3, alpha=7.0),
    "narrow": Lora(rank=1, alpha=2.0, targets=("q_proj", "v_proj")),
    "stable": Lora(rank=2, alpha=4.0, rslora=True, targets=("down_proj",)),
}


@pytest.mark.parametrize("names", [["wide"], ["narrow"], ["wide", "", "narrow", "stable"]])
def test_values_and_gradients_round_trip(names):
    of = sites()
    registry = make_registry(of)
    adapters = [adapter(registry, name, LORAS[name]) if name else None for name in names]
    stage = Stage(adapters, of, torch.float32, torch.device("cpu"))
    stage.fill()
    upstream = {}
    for family, group in enumerate(of):
        for layer in range(2):
            a, a_grads, b, b_grads = stage.factors(family, layer, None)
            # What a layer's backward pass leaves there if the loss is sum(upstream * (A B)).
            upstream[family, layer] = torch.randn(len(a), IN, OUT)
            a_grads += upstream[family, layer] @ b.transpose(1, 2)
            b_grads += a.transpose(1, 2) @ upstream[family, layer]
            if len(adapters) > 1 and group.one.is_expert is False:
                one = stage.factors(family, layer, 2)
                assert all(torch.equal(x, whole[2:3]) for x, whole in zip(one, (a, a_grads, b, b_grads), strict=True))
    for made in filter(None, adapters):
        made.grads.fill_(1.0)  # of an earlier call
    stage.collect()

    for slot, made in enumerate(adapters):
        if made is None:
            continue
        assert made.accumulated
        for family, group in enumerate(of):
            found = {s.factor: v - 1.0 for s, v in made.views(made.grads) if s.family == family}
            for layer, site in enumerate(group.sites):
                for expert in range(site.experts):
                    leaves, delta = by_hand(registry, made, family, layer, expert)
                    row = slot * site.experts + expert
                    a, _, b, _ = stage.factors(family, layer, None)
                    torch.testing.assert_close(a[row] @ b[row], delta.detach())
                    (delta * upstream[family, layer][row]).sum().backward()
                    for number, (part, (of_a, of_b)) in enumerate(zip(site.parts, leaves, strict=True)):
                        torch.testing.assert_close(found["a"][layer, expert, number], of_a.grad)
                        torch.testing.assert_close(found["b"][layer, expert][:, part.local_rows], of_b.grad)


def test_what_an_adapter_does_not_target_has_no_values_and_gets_no_gradient():
    of = sites()
    registry = make_registry(of)
    made = adapter(registry, "narrow", LORAS["narrow"])
    stage = Stage([made, None], of, torch.float32, torch.device("cpu"))
    stage.fill()
    a, a_grads, b, b_grads = stage.factors(0, 0, 0)
    rank, k_rows = stage.rank, ROWS["k_proj"]
    assert not a[0, :, rank : 2 * rank].any(), "k_proj is the second part"
    assert not b[0, :, k_rows].any()
    upstream = torch.randn(IN, OUT)
    a_grads[0] += upstream @ b[0].T
    b_grads[0] += a[0].T @ upstream
    stage.collect()
    for span, grads in made.views(made.grads):
        if span.family != 0:
            assert not grads.any()
        elif span.factor == "a":
            assert not grads[:, :, 1].any()
            assert grads[0, :, [0, 2]].abs().sum() > 0
        else:
            assert not grads[..., k_rows].any()


def test_another_set_of_adapters_finds_nothing_of_the_last_one():
    """A stage is reused for adapters of lower ranks and other targets: bit for bit what a new stage would be."""
    of = sites()
    registry = make_registry(of)
    first = [adapter(registry, "wide", LORAS["wide"]), adapter(registry, "wider", Lora(rank=8))]
    first[0].values.detach().fill_(torch.nan)
    used = Stage(first, of, torch.float32, torch.device("cpu"))
    used.fill()
    for stack in used.stacks:
        stack.a_grads.fill_(torch.nan)
        stack.b_grads.fill_(torch.inf)
    second = [adapter(registry, "narrow", LORAS["narrow"]), None]
    assert used.take(second)
    new = Stage(second, of, torch.float32, torch.device("cpu"))
    for stage in (used, new):
        stage.fill()
    for mine, other in zip(used.stacks, new.stacks, strict=True):
        for name in ("a", "a_grads", "b", "b_grads"):
            assert torch.equal(getattr(mine, name), getattr(other, name))
    assert not used.take([second[0]]), "fewer adapters need memory of another shape"
    assert not used.take([adapter(registry, "broad", Lora(rank=9)), None]), "so does a higher rank"
    assert used.adapters == tuple(second)


def test_the_common_rank_is_a_multiple_of_eight_only_where_several_share_a_product():
    registry = make_registry(sites())
    three, nine = (registry.create(name, Lora(rank=rank)) for name, rank in (("three", 3), ("nine", 9)))
    assert common_rank([three]) == 3
    assert common_rank([three, None]) == 8
    assert common_rank([three, nine]) == 16
    assert common_rank([None]) == 1
