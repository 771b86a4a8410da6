"""Names, limits and targets that are refused without changes; and initial values that do not depend on the layout."""

import math

import pytest
import torch

from megascend.config import Adam, Adapters, Lora, Schedule
from megascend.errors import CheckpointError, ConfigError
from megascend.training.lora.adapter_io import COUNTERS
from megascend.training.lora.factors import UnshardedAdapter
from megascend.training.lora.layout import shape_groups
from megascend.training.lora.optimizer import update
from megascend.training.lora.registry import AdapterRegistry, AdapterSettings
from megascend.training.lora.target_modules import FusedSlice, TargetModule

ODD_NAMES = [
    "", "../x", "..", ".", "a/b", "a\\b", ".hidden", "a..b", "x.", "-x", "_x", "a b", "a\n", "a\0b", "ä", "名", "x²",
    "a:b", "~", "a" * 101, "a" * 200, None, 7, b"a", ("a",), ["a"],
]  # fmt: skip


def make_target(layer=0, experts=1, start=0, count=None, in_start=0, in_features=6, in_total=6):
    kind = "mlp.experts" if count else "mlp"
    part = FusedSlice(f"model.layers.{layer}.{kind}.down_proj", 4, torch.arange(4), torch.arange(4))
    return TargetModule(None, "row", (part,), in_features, 4, in_start, in_total, experts, start, count)


def embedding(in_start=0, in_features=9):
    rows = torch.arange(400)
    return TargetModule(
        None, "row", (FusedSlice("model.embed_tokens", 400, rows, rows),), in_features, 400, in_start, 9
    )


def make_registry(limits=None, target_modules=None, **options):
    groups = shape_groups(target_modules or [make_target(0), make_target(1)])
    names = [part.name for group in groups for target in group.target_modules for part in target.slices]
    settings = {"adam": Adam(), "schedule": Schedule(), "seed": 3, "dtype": torch.float32} | options
    settings = AdapterSettings(limits or Adapters(), device=torch.device("cpu"), **settings)
    return AdapterRegistry(settings, groups, names)


def add(registry, name, lora=None):
    registry.add(registry.create(name, lora or Lora(rank=2)))


@pytest.mark.parametrize("name", ODD_NAMES, ids=repr)
def test_odd_names_are_refused(name):
    registry = make_registry()
    add(registry, "a")
    with pytest.raises(ConfigError, match=r"adapter name .* is not allowed"):
        add(registry, name)
    assert list(registry) == ["a"]


@pytest.mark.parametrize(
    ("labels", "problem_type", "message"),
    [
        (("a", "b"), "single_label_classification", None),
        (("LABEL_0", "LABEL_1"), None, None),
        (("b", "a"), "single_label_classification", "its head are b, a, and the model's labels are a, b"),
        (("a", "b", "c"), None, "its head are a, b, c"),
        (("a", "b"), "regression", "trained for problem_type regression, and the model is for single_label"),
    ],
)
def test_adapter_of_other_labels_is_refused(labels, problem_type, message):
    settings = make_registry(labels=("a", "b"), problem_type="single_label_classification").settings
    if message is None:
        settings.check_labels(labels, problem_type)
    else:
        with pytest.raises(CheckpointError, match=message):
            settings.check_labels(labels, problem_type)


def test_refusals_name_the_setting_and_change_nothing():
    registry = make_registry(Adapters(max_count=2, max_rank=8))
    add(registry, "a")
    first = registry["a"]
    before = first.values.detach().clone()
    for name, lora, message in [
        ("a", Lora(rank=2), r"adapter 'a' exists"),
        ("b", Lora(rank=9), r"rank 9 exceeds adapters\.max_rank \(8\)"),
        ("b", Lora(rank=2, targets=("q_proj",)), r"adapter 'b' targets 'q_proj'.*those are down_proj"),
        ("b", Lora(rank=2, targets=("down_proj", "lm_head")), r"targets 'lm_head'"),
        ("b", Lora(rank=2, targets=("own_proj",)), r"targets 'own_proj'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            add(registry, name, lora)
        assert list(registry) == ["a"]
        assert registry["a"] is first
    add(registry, "b", Lora(rank=8))
    with pytest.raises(ConfigError, match=r"exceeds adapters\.max_count \(2\)"):
        add(registry, "c")
    for name in ("c", "A", ""):
        with pytest.raises(ConfigError, match=r"unknown adapter .*; adapters: a, b"):
            registry.remove(name)
    assert list(registry) == ["a", "b"]
    assert torch.equal(first.values, before)
    registry.remove("a")
    with pytest.raises(ConfigError, match="adapters: b"):
        registry["a"]
    add(registry, "c")


def test_dropout_on_experts_is_refused():
    registry = make_registry(target_modules=[make_target(0), make_target(1, experts=2, count=2)])
    with pytest.raises(ConfigError, match=r"dropout 0\.1 on experts.*set dropout: 0"):
        add(registry, "a", Lora(dropout=0.1))
    add(registry, "a", Lora(dropout=0.1, targets=("mlp.down_proj",)))
    add(registry, "b", Lora())


def test_first_values_are_pefts_and_the_same_in_every_layout():
    registry = make_registry()
    reference = registry.create("a", Lora(rank=64))
    views = {span.factor: values for span, values in reference.views(reference.values.detach())}
    assert not views["b"].any()
    bound = 1 / math.sqrt(6)
    assert views["a"].abs().max() <= bound
    assert views["a"].std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert not torch.equal(views["a"][0], views["a"][1]), "two layers draw differently"
    other = registry.create("b", Lora(rank=64, seed=4))
    assert not torch.equal(other.values, reference.values)
    assert torch.equal(registry.create("c", Lora(rank=64, seed=3)).values, reference.values)

    for rank in range(2):  # the input's columns divided over two ranks; only layer 1 on this pipeline stage
        part = make_registry(target_modules=[make_target(1, in_start=3 * rank, in_features=3)]).create(
            "a", Lora(rank=64)
        )
        shard = next(values for span, values in part.views(part.values.detach()) if span.factor == "a")
        assert torch.equal(shard[0], views["a"][1, ..., 3 * rank : 3 * rank + 3])


def test_experts_draw_by_their_number_in_the_model():
    full = make_registry(target_modules=[make_target(experts=4, count=4)]).create("a", Lora(rank=2))
    half = make_registry(target_modules=[make_target(experts=2, start=2, count=4)]).create("a", Lora(rank=2))
    values = [next(v for s, v in x.views(x.values.detach()) if s.factor == "a") for x in (full, half)]
    assert torch.equal(values[0][0, 2:], values[1][0])
    assert len({tuple(expert.flatten().tolist()) for expert in values[0][0]}) == 4


def test_adapter_overrides_the_backends_optimizer_and_schedule():
    registry = make_registry(adam=Adam(lr=0.5), schedule=Schedule(warmup_steps=4))
    custom = registry.create("own", Lora(rank=2, optimizer=Adam(lr=2.0, max_grad_norm=0.0), schedule=Schedule()))
    plain = registry.create("plain", Lora(rank=2))
    lrs = {}
    for adapter in (custom, plain):
        adapter.grads.fill_(3.0)
        lrs[adapter.name] = [update([adapter], [3.0], {})[adapter.name].lr for _ in range(3)]
    assert lrs == {"own": [2.0, 2.0, 2.0], "plain": pytest.approx([0.125, 0.25, 0.375])}


def test_joint_adapter_steps_equal_separate_adamw():
    registry = make_registry(adam=Adam(lr=0.1, max_grad_norm=0.5), schedule=Schedule())
    settings = {
        "as-all": None,
        "also": None,
        "slow": Adam(lr=1e-4, max_grad_norm=0.5),
        "decayed": Adam(lr=0.1, weight_decay=0.3, max_grad_norm=0.0),
        "other-moments": Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3, max_grad_norm=0.5),
        "not-finite": None,
    }
    adapters = [
        registry.create(name, Lora(rank=number + 1, optimizer=adam))
        for number, (name, adam) in enumerate(settings.items())
    ]
    references = {}
    for adapter in adapters:
        adam = settings[adapter.name] or Adam(lr=0.1, max_grad_norm=0.5)
        parameter = torch.nn.Parameter(adapter.values.detach().clone())
        references[adapter.name] = (
            parameter,
            adam,
            torch.optim.AdamW([parameter], lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay),
        )
    for number in range(3):
        norms = []
        for adapter in adapters:
            adapter.grads.normal_(generator=torch.Generator().manual_seed(number))
            parameter, adam, adamw = references[adapter.name]
            parameter.grad = adapter.grads.clone()
            norms.append(float(parameter.grad.norm()))
            if adapter.name == "not-finite" and number == 1:
                norms[-1] = math.inf
                continue
            if adam.max_grad_norm:
                parameter.grad.mul_(min(1.0, adam.max_grad_norm / (norms[-1] + 1e-6)))
            adamw.step()
        results = update(adapters, norms, {})
        assert [name for name, result in results.items() if result.skipped] == (["not-finite"] if number == 1 else [])
    for adapter in adapters:
        assert torch.equal(adapter.values, references[adapter.name][0]), adapter.name
        assert adapter.taken == (2 if adapter.name == "not-finite" else 3)
        assert not adapter.grads.any()


def test_restored_adapter_continues_after_a_skipped_step():
    """Count a skipped step in the schedule, and not in AdamW's bias correction."""
    adam, schedule = Adam(lr=0.1), Schedule(kind="linear", total_steps=9)
    first, second = (make_registry(adam=adam, schedule=schedule).create("a", Lora(rank=2)) for _ in range(2))

    def step(adapter, number, norm=1.0):
        adapter.grads.copy_(torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(number)))
        return update([adapter], [norm], {})["a"]

    step(first, 0)
    assert step(first, 1, math.inf).skipped
    counters = {name: getattr(first, name) for name in COUNTERS}
    second.values.detach().copy_(first.values)
    second.restore(*(moment.clone() for moment in first.moments()), UnshardedAdapter(first.lora, {}, **counters))
    assert [step(second, number) for number in (2, 3)] == [step(first, number) for number in (2, 3)]
    assert torch.equal(second.values, first.values)


def test_steps_clip_skip_and_scale_like_adamw_on_the_true_gradient():
    registry = make_registry(adam=Adam(lr=0.1, weight_decay=0.2, max_grad_norm=1.0), dtype=torch.float16)
    adapter = registry.create("a", Lora(rank=2))
    reference = torch.nn.Parameter(adapter.values.detach().clone())
    adamw = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.2)
    scales = []
    for number, finite in enumerate([True, False, False, True, True]):
        gradient = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(number))
        adapter.grads.copy_(gradient * adapter.loss_scale)
        adapter.accumulated = True
        norm = float(gradient.norm())
        result = update([adapter], [norm * adapter.loss_scale if finite else math.nan], {})["a"]
        scales.append((result.loss_scale, result.skipped, result.skipped_in_a_row))
        if finite:
            reference.grad = gradient * min(1.0, 1 / (norm + 1e-6))
            adamw.step()
            assert result.grad_norm == pytest.approx(norm)
        else:
            assert result.grad_norm == math.inf
        torch.testing.assert_close(adapter.values, reference)
        assert not adapter.grads.any()
        assert not adapter.accumulated
    assert scales == [
        (2.0**16, False, 0),
        (2.0**16, True, 1),
        (2.0**15, True, 2),
        (2.0**14, False, 0),
        (2.0**14, False, 0),
    ]
    assert (adapter.step_count, adapter.taken) == (5, 3)


def test_an_embedding_starts_with_a_zero_and_b_normal_as_in_peft():
    lora = Lora(rank=5, targets=("embed_tokens",))
    limits = Adapters(targets=("embed_tokens", "down_proj"))
    adapter = make_registry(limits, [embedding(), make_target(0)]).create("a", lora)
    values_by_span = {
        (span.shape_group, span.factor): values for span, values in adapter.views(adapter.values.detach())
    }
    b = values_by_span[0, "b"]
    assert (float(b.mean()), float(b.std())) == (pytest.approx(0, abs=0.1), pytest.approx(1, abs=0.1))
    assert not any(values.any() for span_key, values in values_by_span.items() if span_key != (0, "b"))
    shard = make_registry(limits, [embedding(5, 4), make_target(0)]).create("a", lora)
    assert torch.equal(next(v for s, v in shard.views(shard.values) if (s.shape_group, s.factor) == (0, "b")), b)
