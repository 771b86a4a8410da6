"""Saved adapters: training resumes exactly, any layout reads them, and damaged files are refused on every rank."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adam, Adapters, CheckpointError, ConfigError, Lora, Parallel, Schedule
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from megascend.training.lora.adapter_io import OPTIMIZER, STATE, read, write
from megascend.training.lora.factors import Factors, UnshardedAdapter
from support.adapter_runs import make_backend
from support.lora_parity import ALL

LENGTHS = (9, 14, 7, 12)
LAYOUTS = {
    "single": (1, Parallel()),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
    "EP2": (2, Parallel(expert=2)),
    "ETP2": (2, Parallel(tensor=2)),
    "PP2 x EP2": (4, Parallel(pipeline=2, expert=2)),
}
FILES = ("adapter_config.json", "adapter_model.safetensors", OPTIMIZER, STATE)


@pytest.fixture(scope="module")
def odd(parity_folder, megatron_imported):
    """Write a model whose vocabulary tensor parallel ranks do not divide evenly, with adapted embedding and head."""
    return case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, vocab_size=301)


def train(backend, steps, names="ab"):
    samples = causal_samples(token_lists(lengths=LENGTHS))
    stamped = [replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(samples)]
    rows = []
    for _ in range(steps):
        result = backend.forward_backward(backend.shard(stamped))
        outcome = backend.optimizer_step()
        rows.append({n: (result.adapters[n].loss, o.grad_norm, o.lr) for n, o in outcome.adapters.items()})
    return rows


# --- on one process, without a model


def saved_adapter(**changes):
    names = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj")]

    def factors(seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            name: Factors(torch.randn(2, 6, generator=generator), torch.randn(4, 2, generator=generator))
            for name in names
        }

    lora = Lora(rank=2, alpha=3.0, targets=("q_proj", "v_proj"), seed=5, optimizer=Adam(lr=0.5, betas=(0.8, 0.9)))
    fields = {"taken": 3, "step_count": 5, "skipped_in_a_row": 1, "loss_scale": 1024.0, "good_steps": 2} | changes
    return UnshardedAdapter(lora, factors(0), (factors(1), factors(2)), **fields)


def equal(first, second):
    def same(left, right):
        return left.keys() == right.keys() and all(
            torch.equal(left[n].a, right[n].a) and torch.equal(left[n].b, right[n].b) for n in left
        )

    if (first.moments is None) != (second.moments is None) or not same(first.values, second.values):
        return False
    return first.moments is None or all(same(*pair) for pair in zip(first.moments, second.moments, strict=True))


def test_adapter_survives_writing_and_reading(tmp_path):
    saved = saved_adapter()
    write(tmp_path / "a", saved, "base", list(saved.values))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(FILES)
    loaded = read(tmp_path / "a", optimizer=True)
    assert equal(loaded, saved)
    assert replace(loaded, values={}, moments=None) == replace(saved, values={}, moments=None)
    bare = read(tmp_path / "a", optimizer=False)
    assert (bare.lora, bare.moments, bare.step_count) == (saved.lora, None, 0)
    write(tmp_path / "a", replace(saved, moments=None), "base", list(saved.values))
    assert not (tmp_path / "a" / OPTIMIZER).exists(), "the old directory is replaced as a whole"
    assert read(tmp_path / "a", optimizer=True).moments is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_flipped_bit_of_a_tensor_file_raises_checkpoint_error(tmp_path, name):
    saved = saved_adapter()
    write(tmp_path / "a", saved, "base", list(saved.values))
    path = tmp_path / "a" / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 64)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read(tmp_path / "a", optimizer=True)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (STATE, {"format": 2}, "format 2"),
        (STATE, {"taken": "3"}, "counts"),
        (STATE, {"step_count": -1}, "counts"),
        (STATE, {"loss_scale": None}, "counts"),
        (STATE, {"lora": {"rank": 3, "alpha": 3.0}}, "rank 3"),
        (STATE, {"lora": {"rank": 2, "alpha": 6.0}}, "alpha 6"),
        (STATE, {"lora": {"rank": 2, "alpha": 3.0, "color": "red"}}, "color"),
        (STATE, {"lora": []}, "damaged"),
        ("adapter_config.json", {"lora_alpha": 8}, "not the file that was saved"),
        ("adapter_config.json", {"r": 4}, "rank is 4"),
        ("adapter_config.json", {"use_dora": True}, "DoRA"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, file, change, message):
    saved = saved_adapter()
    write(tmp_path / "a", saved, "base", list(saved.values))
    content = json.loads((tmp_path / "a" / file).read_text(encoding="utf-8"))
    (tmp_path / "a" / file).write_text(json.dumps(content | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "a", optimizer=True)


def test_moments_of_another_adapter_are_refused(tmp_path):
    saved = saved_adapter()
    write(tmp_path / "a", saved, "base", list(saved.values))
    tensors = load_file(tmp_path / "a" / OPTIMIZER)
    for wrong in (
        {name: tensor for name, tensor in tensors.items() if "v_proj" not in name},
        {name: tensor for name, tensor in tensors.items() if not name.startswith("exp_avg_sq")},
        {name: tensor[..., :1].contiguous() for name, tensor in tensors.items()},
        {name: tensor for name, tensor in tensors.items() if not name.endswith(".a")},
    ):
        save_file(wrong, tmp_path / "a" / OPTIMIZER)
        with pytest.raises(CheckpointError):
            read(tmp_path / "a", optimizer=True)


def test_other_peoples_directories_are_not_replaced(tmp_path):
    saved = saved_adapter()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work", encoding="utf-8")
    for target in (tmp_path / "thesis", tmp_path / "thesis" / "thesis.txt"):
        with pytest.raises(CheckpointError, match="is not an adapter"):
            write(target, saved, "base", [])
    for target in (tmp_path / "thesis" / "thesis.txt" / "x", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match="could not be written"):
            write(target, saved, "base", [])
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "thesis.txt"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", saved, "base", [])
    assert equal(read(tmp_path / "empty", optimizer=True), saved)


# --- with a model


@pytest.mark.parametrize(("layout", "precision"), [("DP2", "fp32"), ("TP2 + SP", "fp16")])
def test_two_tenants_resume_bit_for_bit(dense, tmp_path, layout, precision):
    world_size, parallel = LAYOUTS[layout]
    schedule = Schedule(kind="cosine", warmup_steps=2, total_steps=8)
    loras = {"a": Lora(rank=3, dropout=0.2, seed=1), "b": Lora(rank=8, optimizer=Adam(lr=3e-2), targets=("q_proj",))}

    def uninterrupted():
        backend = make_backend(dense, parallel, schedule=schedule, precision=precision)
        for name, lora in loras.items():
            backend.add_adapter(name, lora)
        train(backend, 3)
        for name in loras:
            backend.save_adapter(name, tmp_path / name)
        return train(backend, 3), [adapter.values.detach().clone() for adapter in backend.adapters.values()]

    def continued():
        backend = make_backend(dense, parallel, schedule=schedule, precision=precision)
        for name in loras:
            backend.load_adapter(name, tmp_path / name)
        assert {name: adapter.lora for name, adapter in backend.adapters.items()} == loras
        return train(backend, 3), [adapter.values.detach().clone() for adapter in backend.adapters.values()]

    runs = [run_distributed(run, world_size, init=False) for run in (uninterrupted, continued)]
    for (rows, values), (other_rows, other_values) in zip(*runs, strict=True):
        assert other_rows == rows
        assert all(torch.equal(*pair) for pair in zip(values, other_values, strict=True))


@pytest.mark.parametrize(
    ("arch", "layouts"),
    [
        ("moe", ["ETP2", "PP2 x EP2"]),
        ("odd", ["TP2 + SP", "PP2"]),
        # Covered: the pairs above.
        pytest.param("moe", ["ETP2", "EP2", "single", "PP2 x EP2"], marks=pytest.mark.nightly),
        pytest.param("odd", ["TP2 + SP", "PP2", "TP2 + SP"], marks=pytest.mark.nightly),
    ],
)
def test_files_of_one_layout_are_those_of_every_other(request, tmp_path, arch, layouts):
    """Train and save in the first layout, then load and save again in each: the tensors are always equal."""
    checkpoint = request.getfixturevalue(arch)
    targets = ALL if arch == "odd" else "all-linear"
    loras = {
        "a": Lora(rank=3, alpha=5.0, targets=targets),
        "b": Lora(rank=4, targets=("v_proj", "o_proj", "1.self_attn.k_proj")),
    }

    def first():
        backend = make_backend(checkpoint, LAYOUTS[layouts[0]][1], Adapters(targets=targets))
        for name, lora in loras.items():
            backend.add_adapter(name, lora)
        train(backend, 2)
        for name in loras:
            backend.save_adapter(name, tmp_path / layouts[0] / name)
        return train(backend, 1)

    def through(before, layout):
        backend = make_backend(checkpoint, LAYOUTS[layout][1], Adapters(targets=targets))
        for name in loras:
            backend.load_adapter(name, tmp_path / before / name)
            backend.save_adapter(name, tmp_path / layout / name)
        return train(backend, 1)

    expected = run_distributed(first, LAYOUTS[layouts[0]][0], init=False)[0]
    for before, layout in itertools.pairwise(layouts):
        rows = run_distributed(through, LAYOUTS[layout][0], before, layout, init=False)[0]
        for name in loras:
            old, new = tmp_path / before / name, tmp_path / layout / name
            for file in ("adapter_model.safetensors", OPTIMIZER):
                saved, resaved = load_file(old / file), load_file(new / file)
                assert saved.keys() == resaved.keys()
                assert all(torch.equal(saved[key], resaved[key]) for key in saved), (layout, file)
            for file in ("adapter_config.json", STATE):
                assert (old / file).read_text(encoding="utf-8") == (new / file).read_text(encoding="utf-8")
            # The next step is the same one too, to rounding.
            loss, norm, lr = rows[0][name]
            assert (loss, norm) == pytest.approx(expected[0][name][:2], rel=2e-5)
            assert lr == expected[0][name][2]
    tensors = load_file(tmp_path / layouts[0] / "b" / OPTIMIZER)
    adapted = {name.removeprefix("exp_avg.").removesuffix(".a") for name in tensors if name.startswith("exp_avg.")}
    assert {name for name in adapted if not name.endswith(".b")} == {
        *(f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("v_proj", "o_proj")),
        "model.layers.1.self_attn.k_proj",
    }
    assert all(bool(tensor.any()) for tensor in tensors.values()), "every factor has been trained"


def test_unsuitable_files_raise_on_every_rank_and_add_no_adapter(dense, parity_folder, tmp_path):
    wider = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, intermediate_size=192)

    def make_files(checkpoint, path):
        backend = make_backend(checkpoint)
        backend.add_adapter("a", Lora(rank=4))
        train(backend, 1, "a")
        backend.save_adapter("a", path)

    run_distributed(make_files, 1, dense, tmp_path / "whole", init=False)
    run_distributed(make_files, 1, wider, tmp_path / "wide", init=False)
    for file in FILES:
        for kind in ("gone", "short"):
            damaged = shutil.copytree(tmp_path / "whole", tmp_path / f"{kind}-{file}")
            if kind == "gone":
                (damaged / file).unlink()
            else:
                (damaged / file).write_bytes((damaged / file).read_bytes()[:-40])

    def on_rank(parallel):
        backend = make_backend(dense, parallel, Adapters(max_rank=8))
        backend.add_adapter("b", Lora(rank=2))
        train(backend, 1, "b")
        before = backend.adapters["b"].values.detach().clone()
        for damaged in sorted(tmp_path.glob("gone-*")) + sorted(tmp_path.glob("short-*")):
            with pytest.raises(CheckpointError):
                backend.load_adapter("a", damaged)
        for missing in (tmp_path / "nothing", tmp_path / ("x" * 300)):
            with pytest.raises(CheckpointError, match=r"adapter_config|too long"):
                backend.load_adapter("a", missing)
        with pytest.raises(CheckpointError, match=r"mlp\.\w+ have shapes .*192"):
            backend.load_adapter("a", tmp_path / "wide")
        with pytest.raises(ConfigError, match="'b' exists"):
            backend.load_adapter("b", tmp_path / "whole")
        with pytest.raises(ConfigError, match="rank 4 and scaling 8; the settings passed have 2 and 16"):
            backend.load_adapter("a", tmp_path / "whole", Lora(rank=2))
        with pytest.raises(ConfigError, match=r"adapts model\.layers\.0\.mlp\.down_proj, unlike the targets passed"):
            backend.load_adapter("a", tmp_path / "whole", Lora(rank=4, targets=("q_proj",)))
        assert list(backend.adapters) == ["b"]
        assert torch.equal(backend.adapters["b"].values, before)
        backend.load_adapter("a", tmp_path / "whole", Lora(rank=4, alpha=32.0, optimizer=Adam(lr=0.5)), optimizer=False)
        fresh = backend.adapters["a"]
        assert (fresh.adam.lr, fresh.taken, fresh.step_count) == (0.5, 0, 0)
        assert not any(moment.any() for moment in fresh.moments())
        train(backend, 1)
        return fresh.taken

    for layout in ("PP2", "TP2 + SP"):
        assert run_distributed(on_rank, 2, LAYOUTS[layout][1], init=False) == [1, 1]


def test_layers_without_factors_are_no_targets_of_a_loaded_adapter(dense, tmp_path):
    """Save with only q_proj adaptable: "all-linear" means q_proj, and keeps meaning it after loading elsewhere."""

    def narrow():
        backend = make_backend(dense, adapters=Adapters(targets=("q_proj",)))
        backend.add_adapter("a", Lora(rank=4))
        train(backend, 2, "a")
        backend.save_adapter("a", tmp_path / "narrow")
        return train(backend, 1, "a")

    def broad():
        backend = make_backend(dense)
        backend.load_adapter("a", tmp_path / "narrow")
        backend.save_adapter("a", tmp_path / "broad")
        return train(backend, 1, "a"), backend.adapters["a"].lora.targets

    expected = run_distributed(narrow, 1, init=False)[0]
    rows, targets = run_distributed(broad, 1, init=False)[0]
    assert targets == tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
    assert rows[0]["a"] == pytest.approx(expected[0]["a"], rel=1e-6)
    for file in ("adapter_model.safetensors", OPTIMIZER):
        first, second = load_file(tmp_path / "narrow" / file), load_file(tmp_path / "broad" / file)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [("odd", "TP2 + SP"), ("dense", "PP2"), ("moe", "EP2"), ("moe", "ETP2")],
)
@pytest.mark.nightly_cases("moe-EP2")  # covered: moe-ETP2
def test_exported_weights_are_the_bases_plus_the_product_of_the_saved_factors(request, tmp_path, arch, layout):
    checkpoint = request.getfixturevalue(arch)
    world_size, parallel = LAYOUTS[layout]

    def on_rank():
        targets = ALL if arch == "odd" else "all-linear"
        backend = make_backend(checkpoint, parallel, Adapters(targets=targets))
        backend.add_adapter("a", Lora(rank=3, alpha=5.0, targets=targets))
        backend.add_adapter("b", Lora(rank=2, targets=("o_proj",)))
        train(backend, 2)
        before = [p.detach().clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        backend.save_adapter("a", tmp_path / "a")
        backend.export_hf(tmp_path / "merged", adapter="a")
        backend.export_hf(tmp_path / "base")
        if backend.rank == 0:
            (tmp_path / "file").write_text("in the way", encoding="utf-8")
        with pytest.raises(CheckpointError):
            backend.export_hf(tmp_path / "file" / "below", adapter="a")
        after = [p.detach() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return train(backend, 1)

    run_distributed(on_rank, world_size, init=False)
    base, merged, exported = (
        {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        for folder in (checkpoint, tmp_path / "merged", tmp_path / "base")
    )
    adapter = {k.removeprefix("base_model.model."): v for k, v in load_file(tmp_path / "a" / FILES[1]).items()}
    assert base.keys() == merged.keys() == exported.keys()
    assert all(torch.equal(base[name], exported[name]) for name in base)
    adapted = 0
    for name, weight in base.items():
        delta = by_hand(name.removesuffix(".weight"), adapter, rank=3)
        if delta is None:
            assert torch.equal(merged[name], weight), name
        else:
            torch.testing.assert_close(merged[name], weight + 5 / 3 * delta.view(weight.shape), atol=1e-6, rtol=1e-6)
            assert not torch.equal(merged[name], weight)
            adapted += 1
    assert adapted == {"dense": 2 * 7, "odd": 2 * 7 + 2, "moe": 2 * (4 + 4 * 3)}[arch]


def by_hand(module, adapter, rank):
    """Compute B A from peft's tensors: experts as peft/tuners/lora/layer.py, ParamWrapper, has them."""
    if f"{module}.lora_A.weight" in adapter:
        return adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
    if f"{module}.lora_embedding_A" in adapter:
        return (adapter[f"{module}.lora_embedding_B"] @ adapter[f"{module}.lora_embedding_A"]).T
    if ".experts." not in module:
        return None
    experts, rest = module.split(".experts.")
    number, projection = rest.split(".")
    # Of two adapted parameters, the first declared one, gate_up_proj, is the inner one.
    inner = "" if projection == "down_proj" else ".base_layer"
    a = adapter[f"{experts}.experts{inner}.lora_A.weight"].unflatten(0, (-1, rank))[int(number)]
    b = adapter[f"{experts}.experts{inner}.lora_B.weight"].unflatten(1, (rank, -1))[..., int(number)]
    product = b @ a
    return {"down_proj": product, "gate_proj": product[: len(product) // 2], "up_proj": product[len(product) // 2 :]}[
        projection
    ]
