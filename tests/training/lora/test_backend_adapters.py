"""Adapters on a real model: fresh ones change nothing, and results do not depend on other tenants in the batch."""

from dataclasses import replace

import pytest
import torch

from megascend import (
    Adam,
    AdapterQueue,
    Adapters,
    Batching,
    CheckpointError,
    ConfigError,
    DataError,
    Lora,
    Parallel,
    Recompute,
    Sample,
)
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from support.adapter_runs import make_backend
from support.lora_parity import ALL

pytestmark = pytest.mark.usefixtures("megatron_imported")

LENGTHS = (9, 14, 7, 12, 11, 8)
LAYOUTS = {
    "single": (1, Parallel()),
    "TP2": (2, Parallel(tensor=2)),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "PP2": (2, Parallel(pipeline=2)),
    "CP2": (2, Parallel(context=2)),
    "DP2": (2, Parallel()),
}


@pytest.fixture(scope="module")
def deep(parity_folder):
    return case_checkpoint(parity_folder, "qwen3")


def samples_of(names, lengths=LENGTHS):
    """Build one sample per length, for the adapters in turn; None for the base model."""
    samples = causal_samples(token_lists(lengths=lengths))
    return [replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(samples)]


def train(backend, samples, steps=2, loss="cross_entropy"):
    """Train and return every step's {adapter: (loss, grad norm)}."""
    rows = []
    for _ in range(steps):
        result = backend.forward_backward(backend.shard(samples), loss)
        outcome = backend.optimizer_step()
        rows.append({name: (result.adapters[name].loss, step.grad_norm) for name, step in outcome.adapters.items()})
    return rows


def only(rows, name):
    return [row[name] for row in rows]


def assert_close(rows, expected, tolerance=1e-5):
    """Compare two lists of (loss, grad norm)."""
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance)


# --- forward


@pytest.mark.parametrize("layout", ["TP2 + SP", "PP2", "CP2"])
@pytest.mark.nightly_cases("CP2")  # covered: TP2 + SP; PP2
def test_a_fresh_adapter_changes_nothing_and_the_reference_never_changes(moe, layout):
    world_size, parallel = LAYOUTS[layout]
    plain = [replace(sample, adapter=None) for sample in samples_of([None])]

    def without_adapters():
        from megascend.backends import MegatronBackend

        options = {"precision": "fp32", "batching": Batching(micro_batch_tokens=48), "timeout_s": 60}
        backend = MegatronBackend(moe, parallel, **options)
        for chunk in backend.engine.bare_chunks:
            chunk.requires_grad_(False)  # torch.matmul picks its kernel, and with it the last bit, by this
        return backend.forward(plain, entropy=True)

    def with_adapters():
        backend = make_backend(moe, parallel)
        for name, rank in (("a", 3), ("b", 8)):
            backend.add_adapter(name, Lora(rank=rank))
        mixed = samples_of(["a", None, "b"])
        results = {
            "no adapter": backend.forward(plain, entropy=True),
            "fresh": backend.forward(plain, entropy=True, adapter="b"),
            "reference": backend.forward(mixed, entropy=True, reference=True),
            "fresh, mixed": backend.forward(mixed, entropy=True),
        }
        train(backend, samples_of(["a", "b"]))
        results["reference after training"] = backend.forward(mixed, entropy=True, reference=True)
        results["none after training"] = backend.forward(plain, entropy=True)
        return results, backend.forward(mixed, entropy=True), backend.forward(plain, adapter="a")

    expected = run_distributed(without_adapters, world_size, init=False)[0]
    for results, trained, with_a in run_distributed(with_adapters, world_size, init=False):
        for label, result in results.items():
            for field in ("logprobs", "entropy"):
                for values, expected_values in zip(getattr(result, field), getattr(expected, field), strict=True):
                    if label == "fresh, mixed":  # the batch has other samples in another order
                        torch.testing.assert_close(values, expected_values, atol=2e-6, rtol=0)
                    else:
                        assert torch.equal(values, expected_values), label
        for index in range(len(LENGTHS)):
            difference = (trained.logprobs[index] - expected.logprobs[index]).abs().max()
            if index % 3 == 1:
                assert difference < 2e-6, "a sample without adapter beside two trained ones"
            else:
                assert difference > 1e-3
            if index % 3 == 0:
                torch.testing.assert_close(with_a.logprobs[index], trained.logprobs[index], atol=1e-5, rtol=0)


# --- what must not matter


@pytest.mark.parametrize("layout", ["TP2 + SP", "CP2"])
def test_dropout_does_not_depend_on_the_layout(dense, layout):
    """Recompute there as well: masks depend on the token, the layer and the feature."""

    def on_rank(parallel, recompute):
        backend = make_backend(dense, parallel, Adapters(targets=ALL), recompute=recompute)
        backend.add_adapter("a", Lora(rank=3, dropout=0.4, seed=1, targets=ALL))
        backend.add_adapter("b", Lora(rank=8, seed=2))
        return train(backend, samples_of(["a", "b"]))

    expected = run_distributed(on_rank, 1, Parallel(), Recompute(), init=False)[0]
    world_size, parallel = LAYOUTS[layout]
    for recompute in (Recompute(), Recompute(granularity="full")):
        for rows in run_distributed(on_rank, world_size, parallel, recompute, init=False):
            for name in "ab":
                assert_close(only(rows, name), only(expected, name))


def test_dropout_drops_the_right_share_and_differs_by_step_seed_and_layer(dense):
    """Measure through B: with B = 1 and A = 1 on one feature, A x is 0 exactly where that feature is dropped."""

    def on_rank():
        import megascend.training.lora.adapter_layers as layers

        backend = make_backend(dense)
        for name, seed, rate in (("a", 1, 0.25), ("b", 1, 0.25), ("c", 2, 0.25), ("d", 1, 0.75)):
            backend.add_adapter(name, Lora(rank=2, dropout=rate, seed=seed))
        observed = []
        original = layers.drop

        def recording(x, stacked, segments, target, *, local):
            out = original(x, stacked, segments, target, local=local)
            observed.append((target.slices[0].name, (out != 0) | (x == 0), (out / x)[out != 0]))
            return out

        layers.drop = recording
        sample = samples_of([None], lengths=(33,))
        records = {}
        for label, name, steps in (("a", "a", 0), ("b", "b", 0), ("c", "c", 0), ("d", "d", 0), ("later", "a", 1)):
            if steps:
                backend.optimizer_step()
            observed.clear()
            backend.forward_backward(sample, adapter=name)
            records[label] = list(observed)
        observed.clear()
        backend.forward(sample, adapter="d")
        return records, [bool(mask.all()) for _, mask, _ in observed]

    records, evaluated = run_distributed(on_rank, 1, init=False)[0]
    assert evaluated
    assert all(evaluated), "no dropout in forward()"
    for label, rate in (("a", 0.25), ("d", 0.75)):
        share = torch.cat([mask.flatten() for _, mask, _ in records[label]]).float().mean()
        assert share == pytest.approx(1 - rate, abs=0.01)
        for _, mask, factor in records[label]:
            assert mask.float().mean() == pytest.approx(1 - rate, abs=0.06)
            torch.testing.assert_close(factor, torch.full_like(factor, 1 / (1 - rate)))
            columns, rows = mask.flatten(0, -2).float().mean(0), mask.flatten(0, -2).float().mean(1)
            assert columns.std() < 0.15, "no feature is always kept"
            assert rows.std() < 0.15, "no token is always kept"

    def masks(label):
        return [mask for _, mask, _ in records[label]]

    def agreement(left, right):
        return torch.stack([(x == y).float().mean() for x, y in zip(left, right, strict=True)]).mean()

    independent = 0.75**2 + 0.25**2
    assert agreement(masks("a"), masks("b")) == 1.0, "the same seed, step and sample"
    assert agreement(masks("a"), masks("c")) == pytest.approx(independent, abs=0.02)
    assert agreement(masks("a"), masks("later")) == pytest.approx(independent, abs=0.02)
    first, second = [[mask for name, mask, _ in records["a"] if f"layers.{layer}." in name] for layer in range(2)]
    assert agreement(first, second) == pytest.approx(independent, abs=0.02)


# --- which tenants are where


def test_calls_with_other_tenants_add_up_until_each_ones_step(dense):
    """Sum gradients of several calls per tenant, across other tenants' calls, steps and forward passes."""
    lists = {name: [s for s in samples_of(["a", "b", "c"]) if s.adapter == name] for name in "abc"}

    def on_rank():
        backend = make_backend(dense)

        def gradients(name):
            return backend.adapters[name].grads.clone()

        def accumulate(*names):
            backend.forward_backward([s for name in names for s in lists[name]])

        for name, rank in (("a", 3), ("b", 8), ("c", 12)):
            backend.add_adapter(name, Lora(rank=rank, seed=rank))
        separate = {}
        for name in "abc":
            accumulate(name)
            separate[name] = gradients(name)
        backend.discard_gradients("abc"[:1])
        backend.discard_gradients(["b", "c"])
        accumulate("a", "b")
        accumulate("b", "c")
        backend.forward([*lists["c"], *lists["a"]])
        accumulate("c")
        before = {name: gradients(name) for name in "ab"}
        backend.optimizer_step("c")
        unchanged = all(torch.equal(gradients(name), before[name]) for name in "ab")
        accumulate("a")
        sums = {name: gradients(name) for name in "ab"}
        norms = backend.optimizer_step(["b", "a", "b"]).adapters
        counts = [backend.adapters[name].step_count for name in "abc"]
        return separate, sums, unchanged, {name: step.grad_norm for name, step in norms.items()}, counts

    separate, sums, unchanged, norms, counts = run_distributed(on_rank, 1, init=False)[0]
    assert unchanged
    assert counts == [1, 1, 1], "named twice, stepped once"
    for name in "ab":
        torch.testing.assert_close(sums[name], 2 * separate[name], atol=1e-6, rtol=1e-5)
        assert norms[name] == pytest.approx(float(2 * separate[name].norm()), rel=1e-5)


def test_settings_of_a_step_replacement_and_the_queues_log_probabilities(dense, tmp_path):
    """Compare a step with settings with the step of a backend that has them; a replaced adapter equals the saved one."""
    other = Adam(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.05)

    def on_rank():
        samples = samples_of(["a"])
        with make_backend(dense, optimizer=other) as backend:
            backend.add_adapter("a", Lora(rank=4, seed=3))
            backend.forward_backward(backend.shard(samples))
            expected, vector = backend.optimizer_step(), backend.adapters["a"].values.detach().clone()
        backend = make_backend(dense)
        backend.add_adapter("a", Lora(rank=4, seed=3))
        backend.forward_backward(backend.shard(samples))
        step = backend.optimizer_step("a", adam={"a": other})
        assert step == expected
        assert step.lr == other.lr
        values = backend.adapters["a"].values
        assert torch.equal(values, vector)

        backend.save_adapter("a", tmp_path / "saved")
        queue, saved = AdapterQueue(backend), values.detach().clone()
        before = queue.forward("a", samples)
        loss = queue.forward_backward("a", samples, logprobs=True)
        queue.optimizer_step("a", other)
        queue.drain()
        for first, second in zip(before.result(), loss.result().logprobs, strict=True):
            assert torch.allclose(first, second, atol=1e-6)
        assert backend.adapters["a"].step_count == 2
        assert not torch.equal(values, saved)

        (tmp_path / "broken").mkdir(exist_ok=True)
        moved = values.detach().clone()
        with pytest.raises(CheckpointError, match="adapter_config"):
            backend.load_adapter("a", tmp_path / "broken", replace=True)
        assert torch.equal(backend.adapters["a"].values, moved)
        with pytest.raises(ConfigError, match="adapter 'a' exists; remove it first"):
            backend.load_adapter("a", tmp_path / "saved")
        backend.load_adapter("a", tmp_path / "saved", replace=True)
        assert torch.equal(backend.adapters["a"].values, saved)
        assert backend.adapters["a"].step_count == 1
        backend.forward_backward(backend.shard(samples))
        with pytest.raises(ConfigError, match=r"adam has settings for 'b', but the step is for \['a'\]"):
            backend.optimizer_step("a", adam={"b": other})
        with pytest.raises(ConfigError, match="adam has a learning rate already"):
            backend.optimizer_step("a", adam={"a": other}, lr=0.5)
        before = backend.adapters["a"].values.detach().clone()
        assert backend.optimizer_step(lr=0.0).lr == 0.0  # a learning rate of 0 leaves the values unchanged
        assert torch.equal(backend.adapters["a"].values, before)
        backend.forward_backward(backend.shard(samples))
        backend.discard_gradients()
        with pytest.raises(ConfigError, match="no adapter has gradients"):
            backend.optimizer_step()

    run_distributed(on_rank, 2, init=False)


@pytest.mark.parametrize(
    ("limits", "targets"),
    [
        (("3.self_attn.q_proj", "3.mlp.up_proj"), "all-linear"),
        # Covered: targets of the backend.
        pytest.param("all-linear", ("1.mlp.down_proj", "2.self_attn.o_proj"), marks=pytest.mark.nightly),
    ],
)
def test_targets_on_some_pipeline_stages_only(deep, tmp_path, limits, targets):
    """Restrict targets of the backend, leaving a pipeline stage without adapted layers, or of the adapter."""

    def on_rank(parallel, path):
        backend = make_backend(deep, parallel, Adapters(targets=limits))
        backend.add_adapter("a", Lora(rank=3, targets=targets))
        backend.add_adapter("b", Lora(rank=8))
        rows = train(backend, samples_of(["a", "b"]))
        backend.save_adapter("a", path)
        backend.load_adapter("c", path)
        states = [
            [*(moment.clone() for moment in x.moments()), x.values.detach()] for x in map(backend.adapters.get, "ac")
        ]
        assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
        return rows

    expected = run_distributed(on_rank, 1, Parallel(), tmp_path / "single", init=False)[0]
    for parallel in (Parallel(pipeline=2), Parallel(pipeline=2, virtual_pipeline=2)):
        for rows in run_distributed(on_rank, 2, parallel, tmp_path / "pipeline", init=False):
            for name in "ab":
                assert_close(only(rows, name), only(expected, name), 2e-5)


# --- losses


def policy_samples(names):
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, sample in enumerate(samples_of([None], lengths=(9, 14, 7, 12, 11, 8, 10, 13))):
        size = len(sample)
        samples.append(
            replace(
                sample,
                adapter=names[index // 2 % len(names)],
                pair=index // 2,
                chosen=index % 2 == 0,
                advantages=torch.randn(size, generator=generator),
                old_logprobs=-4 + torch.randn(size, generator=generator),
                ref_logprobs=-5 + torch.randn(size, generator=generator),
            )
        )
    return samples


def squared(logprobs, inputs):
    return logprobs**2, {"twice": 2 * logprobs.detach()}


def test_metrics_of_a_tenant_equal_a_separate_run(dense):
    def on_rank():
        backend = make_backend(dense, Parallel(tensor=2, sequence=True))
        results_by_loss = []
        for loss in ("dpo", "ppo", "importance_sampling", squared):
            results = {}
            for names in ("a", "b", "ab"):
                for name, rank in (("a", 3), ("b", 8)):
                    backend.add_adapter(name, Lora(rank=rank, seed=rank))
                samples = backend.shard([s for s in policy_samples("ab") if s.adapter in names])
                for _ in range(2):
                    result = backend.forward_backward(samples, loss)
                    outcome = backend.optimizer_step().adapters
                for name in names:
                    outcome_of_adapter = result.adapters[name]
                    figures = {
                        **outcome_of_adapter.metrics,
                        "loss": outcome_of_adapter.loss,
                        "grad_norm": outcome[name].grad_norm,
                    }
                    results[names, name] = figures, (outcome_of_adapter.tokens, outcome_of_adapter.total_tokens)
                for name in "ab":
                    backend.remove_adapter(name)
            results_by_loss.append(results)
        return results_by_loss

    for results in run_distributed(on_rank, 2, init=False)[0]:
        for name in "ab":
            figures, counts = results["ab", name]
            expected, expected_counts = results[name, name]
            assert figures == pytest.approx(expected, rel=3e-5, abs=3e-6)
            assert len(figures) > 2
            assert counts == expected_counts
        assert results["ab", "a"][0] != pytest.approx(results["ab", "b"][0], rel=1e-2)


# --- misuse


def test_misuse_raises_with_the_remedy(dense):
    def on_rank():
        backend = make_backend(dense)
        samples = samples_of([None])
        for call in (lambda: backend.optimizer_step(), lambda: backend.optimizer_step([])):
            with pytest.raises(ConfigError, match="no adapter has gradients; call forward_backward first"):
                call()
        with pytest.raises(DataError, match=r"pass adapter=\.\.\. or set Sample\.adapter"):
            backend.forward_backward(samples)
        with pytest.raises(DataError, match="is for unknown adapter 'a'; adapters: none"):
            backend.forward_backward(samples, adapter="a")
        for name, seed in (("a", 1), ("b", 2), ("ab", 3)):
            backend.add_adapter(name, Lora(rank=2, seed=seed))
        with pytest.raises(DataError, match=r"is for unknown adapter 'z'; adapters: a, ab, b"):
            backend.forward(samples, adapter="z")
        with pytest.raises(DataError, match="all targets have weight 0 in the global batch of adapter 'b'"):
            backend.forward_backward([*samples_of(["a"]), Sample([1, 2], [2, 3], [0.0, 0.0], adapter="b")])
        assert not any(adapter.accumulated for adapter in backend.adapters.values())

        pair = policy_samples("a")[:2]
        torn = [pair[0], replace(pair[1], adapter="b")]
        with pytest.raises(DataError, match=r"pair 0 has samples of adapters 'a' and 'b'"):
            backend.forward_backward(torn, "dpo")
        with pytest.raises(DataError, match=r"pair 0 has samples of adapters 'a' and 'b'"):
            backend.forward_backward([*pair, *(replace(s, adapter="b") for s in pair)], "dpo")
        backend.forward_backward(torn, "ppo")  # no loss of pairs
        backend.discard_gradients("ab")
        assert [name for name, x in backend.adapters.items() if x.accumulated] == ["a", "b"], (
            "one name, not two letters"
        )
        with pytest.raises(ConfigError, match="adapter 'ab' has gradients"):
            backend.optimizer_step(["a", "ab"])
        with pytest.raises(ConfigError, match="unknown adapter 'z'"):
            backend.optimizer_step(["a", "z"])
        assert [adapter.step_count for adapter in backend.adapters.values()] == [0, 0, 0]
        assert list(backend.optimizer_step().adapters) == ["a", "b"]
        backend.forward_backward(samples, adapter="b")
        with pytest.raises(ConfigError, match=r"save: call optimizer_step\(\) first for adapter 'b'"):
            backend.save("x")

    run_distributed(on_rank, 1, init=False)


def test_targets_that_the_model_or_the_backend_does_not_adapt_are_refused(dense, parity_folder):
    def on_rank():
        tied = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, tie_word_embeddings=True)
        for end in ("lm_head", "embed_tokens"):
            with pytest.raises(ConfigError, match=rf"{end}'.*one weight for embed_tokens and lm_head"):
                make_backend(tied, adapters=Adapters(targets=("q_proj", end)))
        with pytest.raises(ConfigError, match=r"adapters\.targets names 'nothing', which is not a layer"):
            make_backend(dense, adapters=Adapters(targets=("nothing",)))
        backend = make_backend(dense, adapters=Adapters(targets=("q_proj", "down_proj")))
        with pytest.raises(ConfigError, match=r"targets 'k_proj'.*adapters\.targets allows.*down_proj, q_proj"):
            backend.add_adapter("a", Lora(targets=("q_proj", "k_proj")))
        backend.close()

    run_distributed(on_rank, 1, init=False)
