"""peft loads written adapters, and adapters of peft are read; everything that is not plain LoRA is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.config import Lora
from megascend.errors import CheckpointError
from megascend.testing.parity import case_checkpoint, token_lists
from megascend.testing.reference import run_reference
from megascend.training.lora import peft_format, peft_tensors
from megascend.training.lora.adapter_io import check_base_weights
from megascend.training.lora.factors import Factors

TOKENS = token_lists(lengths=(12, 7))
PREFIX = "base_model.model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")
MOE = {"mlp_only_layers": [0]}  # layer 0 has one MLP, the others have experts
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"

WORKER = """
import json, sys, torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from support.peft_reference import load

torch.set_num_threads(1)
job, result = json.load(sys.stdin), {}

def logits(model):
    with torch.no_grad():
        found = [model.eval()(input_ids=torch.tensor([ids])).logits[0].float() for ids in job["tokens"]]
    return torch.cat(found).contiguous()

def base(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")

for name, case in job["load"].items():
    model = base(case["checkpoint"])
    result[f"{name}/logits/base"] = logits(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter, delta in load_file(case["deltas"]).items():
            parameters[parameter].add_(delta)
    result[f"{name}/logits/merged"] = logits(model)
    model = load(case["checkpoint"], case["adapter"])
    result[f"{name}/logits/peft"] = logits(model)
    for key, tensor in get_peft_model_state_dict(model).items():
        result[f"{name}/adapter/{key}"] = tensor.detach().contiguous()

for name, case in job["save"].items():
    torch.manual_seed(5)
    model = get_peft_model(base(case["checkpoint"]), LoraConfig(**case["config"]))
    for key, parameter in model.named_parameters():
        if "lora_B" in key or "lora_embedding_A" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(case["folder"])
    for key, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            parameter = getattr(module, "parameter_name", "weight")
            delta = module.get_delta_weight("default").detach().contiguous()
            result[f"{name}/delta/{key.replace('.base_layer', '')}.{parameter}"] = delta

save_file(result, job["result"])
"""


@dataclass(frozen=True)
class WriteCase:
    """Case of an adapter that we write and peft loads: model, layers and settings."""

    arch: str
    lora: Lora
    chosen: Callable[[str], bool]
    know_model: bool = True
    target_modules: list[str] | None = None  # expected in the configuration
    target_parameters: list[str] | None = None


def with_suffix(*ends: str) -> Callable[[str], bool]:
    """Return a predicate for layers by the last components of their names."""
    return lambda name: f".{name}".endswith(tuple(f".{end}" for end in ends))


WRITE_CASES = {
    "qwen3, all layers": WriteCase(
        "qwen3",
        Lora(rank=4, alpha=6.5, dropout=0.1),
        with_suffix(*ATTENTION, *MLP),
        target_modules=sorted(ATTENTION + MLP),
    ),
    "qwen3, two layers, rslora": WriteCase(
        "qwen3",
        Lora(rank=3, alpha=6, rslora=True),
        with_suffix("1.self_attn.q_proj", "2.mlp.down_proj"),
        target_modules=["model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"],
    ),
    "qwen2, model not known": WriteCase(
        "qwen2",
        Lora(rank=2, alpha=4),
        with_suffix("v_proj"),
        know_model=False,
        target_modules=[f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)],
    ),
    "experts, attention and a dense layer": WriteCase(
        "qwen3_moe",
        Lora(rank=3, alpha=6, dropout=0.1),
        with_suffix(*ATTENTION, *MLP, *EXPERTS),
        target_modules=sorted(ATTENTION),
        target_parameters=[
            *("experts.down_proj", "experts.gate_up_proj"),
            *("mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ],
    ),
    "embedding and head": WriteCase(
        "qwen3",
        Lora(rank=3, alpha=4.5),
        with_suffix("q_proj", "lm_head", "embed_tokens"),
        target_modules=["embed_tokens", "lm_head", "q_proj"],
    ),
    "only gate_up_proj": WriteCase(
        "qwen3_moe",
        Lora(rank=2, alpha=2),
        with_suffix("experts.gate_up_proj"),
        target_modules=[],
        target_parameters=["experts.gate_up_proj"],
    ),
    "only down_proj, of one layer": WriteCase(
        "qwen3_moe",
        Lora(rank=5, alpha=5, rslora=True),
        with_suffix("2.mlp.experts.down_proj"),
        target_modules=[],
        target_parameters=["model.layers.2.mlp.experts.down_proj"],
    ),
    "other experts in every layer": WriteCase(
        "qwen3_moe",
        Lora(rank=3, alpha=3),
        with_suffix("1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj", "2.mlp.experts.down_proj", "k_proj"),
        know_model=False,
        target_modules=[f"model.layers.{layer}.self_attn.k_proj" for layer in range(4)],
        target_parameters=[DOWN, GATE_UP, "model.layers.2.mlp.experts.down_proj"],
    ),
}

SAVED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # model, peft's settings, the targets we read
    "short names": (
        "qwen3",
        {"target_modules": ["q_proj", "mlp.up_proj"], "use_rslora": True, "lora_dropout": 0.25},
        ("mlp.up_proj", "q_proj"),
    ),
    "embedding and head": (
        "qwen3",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        ("embed_tokens", "lm_head", "q_proj"),
    ),
    "a pattern": (
        "qwen3",
        {"target_modules": r".*layers\.[01]\.self_attn\.v_proj"},
        ("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"),
    ),
    "some layers": (
        "qwen2",
        {"target_modules": ["o_proj"], "layers_to_transform": [3]},
        ("model.layers.3.self_attn.o_proj",),
    ),
    "both expert parameters": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
        ("mlp.experts.down_proj", "mlp.experts.gate_up_proj", "q_proj"),
    ),
    "only gate_up_proj": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": ["gate_up_proj"]},
        ("experts.gate_up_proj",),
    ),
    "only down_proj, of one layer": ("qwen3_moe", {"target_modules": [], "target_parameters": [DOWN]}, (DOWN,)),
}


def projections(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every layer by name, of fused experts as in transformers 5, and of the embedding [h, v]."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    experts = {key.split(".")[5] for key in shapes if ".experts." in key}
    for key, (out, *rest) in shapes.items():
        name = key.removesuffix(".weight")
        if ".experts." in key:
            stem, _, projection = name.partition(".experts.0.")
            if projection in ("gate_proj", "down_proj"):
                fused = "gate_up_proj" if projection == "gate_proj" else projection
                shapes_by_name[f"{stem}.experts.{fused}"] = (
                    len(experts),
                    out * (1 + (projection == "gate_proj")),
                    *rest,
                )
        elif name.endswith(("_proj", "lm_head")):
            shapes_by_name[name] = (out, *rest)
        elif name.endswith("embed_tokens"):
            shapes_by_name[name] = (*rest, out)
    return shapes_by_name


def random_factors(shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, Factors]:
    """Build factors whose product changes the logits by about a tenth."""
    generator = torch.Generator().manual_seed(11)
    factors = {}
    for name, (*experts, out, inputs) in shapes.items():
        a = torch.randn(*experts, rank, inputs, generator=generator) / inputs**0.5
        factors[name] = Factors(a, 0.1 * torch.randn(*experts, out, rank, generator=generator))
    return factors


def parameter(name: str) -> str:
    """Return the name of a projection's Hugging Face parameter."""
    return name if ".experts." in name else f"{name}.weight"


def product(name: str, pair: Factors) -> Tensor:
    """Compute B A in the shape of the parameter."""
    delta = pair.b @ pair.a
    return delta.T.contiguous() if name.endswith("embed_tokens") else delta


def arch_checkpoint(folder: Path, arch: str) -> Path:
    return case_checkpoint(folder, arch, **(MOE if arch == "qwen3_moe" else {}))


@dataclass(frozen=True)
class Peft:
    """Results of peft for all adapters of this module, from one process."""

    folder: Path
    factors: dict[str, dict[str, Factors]]
    tensors: dict[str, Tensor]

    def all(self, prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory, parity_folder: Path) -> Peft:
    folder = tmp_path_factory.mktemp("peft")
    load, factors = {}, {}
    for name, case in WRITE_CASES.items():
        checkpoint = arch_checkpoint(parity_folder, case.arch)
        shapes = projections(checkpoint)
        chosen = {key: shape for key, shape in shapes.items() if case.chosen(key)}
        factors[name] = random_factors(chosen, case.lora.rank)
        adapter = folder / f"written, {name}"
        adapter.mkdir()
        peft_format.write(adapter, case.lora, factors[name], str(checkpoint), shapes if case.know_model else None)
        scaling = case.lora.alpha / (math.sqrt(case.lora.rank) if case.lora.rslora else case.lora.rank)
        deltas = {parameter(key): scaling * product(key, pair) for key, pair in factors[name].items()}
        save_file(deltas, folder / f"{name}.deltas")
        load[name] = {
            "checkpoint": str(checkpoint),
            "adapter": str(adapter),
            "deltas": str(folder / f"{name}.deltas"),
        }
    save = {
        name: {
            "checkpoint": str(arch_checkpoint(parity_folder, arch)),
            "config": {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **config},
            "folder": str(folder / f"saved, {name}"),
        }
        for name, (arch, config, _) in SAVED.items()
    }
    job = {"tokens": TOKENS, "load": load, "save": save, "result": str(folder / "result.safetensors")}
    completed = run_reference(WORKER, stdin=json.dumps(job))
    assert completed.returncode == 0, completed.stderr[-4000:]
    return Peft(folder, factors, load_file(folder / "result.safetensors"))


@pytest.mark.parametrize("name", WRITE_CASES)
def test_peft_loads_written_adapters(peft: Peft, name: str) -> None:
    loaded = peft.all(f"{name}/adapter/")
    bases = {key for key in loaded if peft_tensors.base_layer(key)}  # would be saved as well
    assert len(bases) == (2 if name == "embedding and head" else 0)
    loaded = {key: value for key, value in loaded.items() if key not in bases}
    saved = load_file(peft.folder / f"written, {name}" / peft_tensors.WEIGHTS)
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(loaded[key], value), key
    logits = peft.all(f"{name}/logits/")
    assert float((logits["merged"] - logits["base"]).abs().max()) > 0.01
    assert float((logits["peft"] - logits["merged"]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", WRITE_CASES)
def test_written_adapters_are_read_unchanged(peft: Peft, name: str) -> None:
    case = WRITE_CASES[name]
    folder = peft.folder / f"written, {name}"
    lora, factors = peft_format.read(folder)
    config = json.loads((folder / peft_format.CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == case.target_modules
    assert config.get("target_parameters") == case.target_parameters
    targets = [*config["target_modules"], *config.get("target_parameters", [])]
    assert lora == case.lora.model_copy(
        update={
            "targets": tuple(sorted(target.removesuffix(".weight") for target in targets)),
            "dropout": 0.0
            if case.target_parameters
            else case.lora.dropout,  # peft drops nothing of a parameter's input
        }
    )
    assert lora.scaling == case.lora.scaling
    assert_equal(factors, peft.factors[name])


@pytest.mark.parametrize("name", SAVED)
def test_adapters_saved_by_peft_are_read(peft: Peft, name: str) -> None:
    _, config, targets = SAVED[name]
    lora, factors = peft_format.read(peft.folder / f"saved, {name}")
    assert lora == Lora(
        rank=4,
        alpha=6,
        rslora=config.get("use_rslora", False),
        dropout=config.get("lora_dropout", 0.0),
        targets=targets,
    )
    deltas = peft.all(f"{name}/delta/")
    assert {parameter(key) for key in factors} == deltas.keys()
    for key, pair in factors.items():
        assert float(deltas[parameter(key)].abs().max()) > 0.01
        delta = lora.scaling * product(key, pair)
        torch.testing.assert_close(delta, deltas[parameter(key)], atol=1e-6, rtol=1e-5)


def test_base_weights_saved_by_peft_must_match_the_model(peft: Peft, parity_folder: Path, tmp_path) -> None:
    checkpoint = arch_checkpoint(parity_folder, "qwen3")
    saved = peft.folder / "saved, embedding and head"
    tensors = load_file(saved / peft_tensors.WEIGHTS)
    bases = [key for key in tensors if peft_tensors.base_layer(key)]
    assert sorted(map(peft_tensors.base_layer, bases)) == ["lm_head", "model.embed_tokens"]
    check_base_weights(saved, checkpoint)
    save_file({key: value.bfloat16() for key, value in tensors.items()}, tmp_path / peft_tensors.WEIGHTS)
    check_base_weights(tmp_path, checkpoint)
    for key in bases:
        for other in (tensors[key][:-1].contiguous(), tensors[key] + 1e-3):
            save_file(tensors | {key: other}, tmp_path / peft_tensors.WEIGHTS)
            with pytest.raises(CheckpointError, match=rf"holds {key}, which is not the weight of"):
                check_base_weights(tmp_path, checkpoint)


# -- files without peft


@dataclass
class Files:
    """The content of an adapter's two files, to be damaged."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def read(self, folder: Path) -> tuple[Lora, dict[str, Factors]]:
        (folder / peft_format.CONFIG).write_text(json.dumps(self.config), encoding="utf-8")
        save_file(self.tensors, folder / peft_tensors.WEIGHTS)
        return peft_format.read(folder)


def files(factors: dict[str, Factors], rank: int = 2) -> Files:
    lora = Lora(rank=rank, alpha=4)
    return Files(peft_format.to_config(lora, factors, "org/base"), peft_tensors.to_tensors(factors, rank))


def assert_equal(actual: dict[str, Factors], expected: dict[str, Factors]) -> None:
    assert actual.keys() == expected.keys()
    for name, pair in expected.items():
        assert torch.equal(actual[name].a, pair.a), name
        assert torch.equal(actual[name].b, pair.b), name


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
Q_A, Q_B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


@pytest.fixture
def dense() -> Files:
    return files(random_factors({Q: (6, 4), UP: (8, 4)}, 2))


@pytest.fixture
def moe() -> Files:
    return files(random_factors({GATE_UP: (3, 10, 4), DOWN: (3, 4, 5)}, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("r", 0),
        ("lora_alpha", None),
        ("lora_dropout", 1.5),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("target_modules", 3),
        ("target_parameters", [4]),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 9}),
        ("megatron_config", {"hidden_size": 4}),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("monteclora_config", {"num_samples": 2}),
        ("arrow_config", {"top_k": 3}),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
    ],
)
def test_refused_settings(dense: Files, tmp_path: Path, field: str, value: Any) -> None:
    dense.config[field] = value
    with pytest.raises(CheckpointError) as refusal:
        dense.read(tmp_path)
    text = str(refusal.value)
    assert str(tmp_path) in text
    assert f"{peft_format.CONFIG}: {field} " in text
    assert str(next(iter(value.values())) if isinstance(value, dict) and "pattern" in field else value) in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"up_proj": 4}),
        ("modules_to_save", []),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", False),
        ("qalora_group_size", 16),
        ("megatron_core", "megatron.core"),
        ("layers_to_transform", [0]),
    ],
)
def test_settings_that_change_nothing(dense: Files, tmp_path: Path, field: str, value: Any) -> None:
    expected = peft_tensors.to_factors(dense.tensors, 2, [])
    dense.config[field] = value
    lora, factors = dense.read(tmp_path)
    assert (lora.rank, lora.alpha, lora.targets) == (2, 4.0, (UP, Q))
    assert_equal(factors, expected)


def drop(key: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(key)


def put_tensor(key: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({key: tensor})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop(Q_A), rf"lora_B of {Q}, but no lora_A"),
        (drop(Q_B), rf"lora_A of {Q}, but no lora_B"),
        (
            put_tensor(Q_A, torch.ones(3, 4)),
            rf"{peft_tensors.WEIGHTS}: {Q}: A and B are \[3, 4\] and \[6, 2\], but the rank is 2",
        ),
        (put_tensor(Q_B, torch.ones(6, 1)), rf"{Q}: A and B are \[2, 4\] and \[6, 1\], but the rank is 2"),
        (put_tensor(Q_B, torch.ones(6, 2, 1)), r"must be a matrix .*\[6, 2, 1\]"),
        (put_tensor(Q_A, torch.ones(2, 4, dtype=torch.int64)), r"must be a matrix .*torch.int64"),
        (put_tensor(Q_A, torch.full((2, 4), math.nan)), rf"{Q}: 8 of 8 values of A are NaN or infinite"),
        (put_tensor(Q_B, torch.tensor([[math.inf, 1.0]] * 6)), rf"{Q}: 6 of 12 values of B are NaN or infinite"),
        (
            put_tensor(f"{PREFIX}{Q}.lora_magnitude_vector", torch.ones(6)),
            "lora_magnitude_vector, which is not a factor of",
        ),
        (put_tensor(f"{PREFIX}lm_head.weight", torch.ones(6, 4)), "lm_head.weight, which is not a factor of"),
        (put_tensor(f"{PREFIX}{Q}.lora_B.bias", torch.ones(6)), "lora_B.bias, which is not a factor of"),
        (put_tensor(f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.ones(2, 9)), "embed_tokens, but no lora_B"),
        (
            put_tensor(f"{PREFIX}model.embed_tokens.lora_A.weight", torch.ones(2, 9)),
            "are supported for embed_tokens only",
        ),
        (put_tensor(f"{PREFIX}model.wte.lora_embedding_A", torch.ones(2, 9)), "are supported for embed_tokens only"),
        (put_tensor(f"{PREFIX}{Q}.base_layer.weight", torch.ones(6, 4)), "which is not a factor of"),
        (put_tensor(Q_A.removeprefix(PREFIX), torch.ones(2, 4)), "which is not a factor of"),
        (dict.clear, "holds no tensor"),
    ],
)
def test_refused_tensors(dense: Files, tmp_path: Path, damage: Callable[[Any], Any], message: str) -> None:
    damage(dense.tensors)
    with pytest.raises(CheckpointError, match=message) as refusal:
        dense.read(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_an_adapter_inside_another_layer_is_refused(dense: Files, tmp_path: Path) -> None:
    inner = f"{PREFIX}{Q}.base_layer"
    dense.tensors |= {f"{inner}.lora_A.weight": torch.ones(2, 4), f"{inner}.lora_B.weight": torch.ones(6, 2)}
    with pytest.raises(CheckpointError, match="an adapter inside another"):
        dense.read(tmp_path)


def test_files_that_are_missing_or_damaged(dense: Files, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        peft_format.read(tmp_path)
    dense.read(tmp_path)
    weights, config = tmp_path / peft_tensors.WEIGHTS, tmp_path / peft_format.CONFIG
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        peft_format.read(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        peft_format.read(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin, a pickle.*safe_serialization=True"):
        peft_format.read(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[]", "must hold an object, found list")):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            peft_format.read(tmp_path)


def test_stored_precision_becomes_float32(dense: Files, tmp_path: Path) -> None:
    dense.tensors = {key: value.bfloat16() for key, value in dense.tensors.items()}
    _, factors = dense.read(tmp_path)
    assert factors[Q].a.dtype == torch.float32
    assert torch.equal(factors[Q].a, dense.tensors[Q_A].float())


# -- experts


def test_the_layout_of_experts() -> None:
    """Check that experts are slowest in A, fastest in B; gate_up_proj is inside if down_proj is adapted too, else outermost."""
    a = torch.arange(3 * 2 * 4.0).reshape(3, 2, 4)
    b = torch.arange(3 * 10 * 2.0).reshape(3, 10, 2)
    stem = f"{PREFIX}model.layers.1.mlp.experts"
    single = peft_tensors.to_tensors({GATE_UP: Factors(a, b)}, 2)
    assert single.keys() == {f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"}
    for expert in range(3):
        for rank in range(2):
            assert torch.equal(single[f"{stem}.lora_A.weight"][expert * 2 + rank], a[expert, rank])
            assert torch.equal(single[f"{stem}.lora_B.weight"][:, rank * 3 + expert], b[expert, :, rank])
    pair = random_factors({GATE_UP: (3, 10, 4), DOWN: (3, 4, 5)}, 2)
    shapes = {key.removeprefix(stem): list(value.shape) for key, value in peft_tensors.to_tensors(pair, 2).items()}
    assert shapes == {
        ".base_layer.lora_A.weight": [6, 4],
        ".base_layer.lora_B.weight": [10, 6],
        ".lora_A.weight": [6, 5],
        ".lora_B.weight": [4, 6],
    }


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], r"holds 2 pair\(s\) of factors .* target_parameters .* \[\], names 0"),
        (["experts.down_proj"], "names 1 of its parameters"),
    ],
)
def test_parameters_must_be_named(moe: Files, tmp_path: Path, parameters: list[str], message: str) -> None:
    moe.config["target_parameters"] = parameters
    with pytest.raises(CheckpointError, match=message):
        moe.read(tmp_path)


def test_experts_that_do_not_fit(moe: Files, tmp_path: Path) -> None:
    moe.config["r"] = 4
    with pytest.raises(CheckpointError, match=r"are \[6, 4\] and \[10, 6\]; expected experts \* r rows .* r is 4"):
        moe.read(tmp_path)
    moe.config["r"] = 2
    outer = f"{PREFIX}model.layers.1.mlp.experts"
    swapped = {f"{outer}{inner}.lora_{f}.weight": f for inner in ("", ".base_layer") for f in "AB"}
    moe.tensors = {
        key: moe.tensors[
            key.replace(".base_layer", "") if ".base_layer" in key else key.replace("experts", "experts.base_layer")
        ]
        for key in swapped
    }
    with pytest.raises(CheckpointError, match="which do not fit together"):
        moe.read(tmp_path)


def single_experts(count: int = 3) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Build adapters of single experts, gate and up with the same A, and the equal fused factors."""
    generator = torch.Generator().manual_seed(3)
    stem, tensors = "model.layers.1.mlp.experts", {}
    gate_up, down = [], []
    for expert in range(count):
        a, down_a, gate, up, down_b = (
            torch.randn(shape, generator=generator) for shape in ((2, 4), (2, 5), (5, 2), (5, 2), (4, 2))
        )
        for projection, pair in (
            ("gate_proj", (a, gate)),
            ("up_proj", (a.clone(), up)),
            ("down_proj", (down_a, down_b)),
        ):
            for factor, tensor in zip("AB", pair, strict=True):
                tensors[f"{PREFIX}{stem}.{expert}.{projection}.lora_{factor}.weight"] = tensor
        gate_up.append((a, torch.cat([gate, up])))
        down.append((down_a, down_b))
    fused = {
        name: Factors(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))
        for name, pairs in ((GATE_UP, gate_up), (DOWN, down))
    }
    return tensors, fused


def test_single_experts_become_fused_ones(moe: Files, tmp_path: Path) -> None:
    moe.tensors, expected = single_experts(count=11)  # above 10, by number and not by name
    moe.config |= {"target_parameters": None, "target_modules": list(MLP)}
    lora, factors = moe.read(tmp_path)
    assert lora.targets == (DOWN, GATE_UP)
    assert_equal(factors, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another A", r"experts\.1, .*, with a different A for each"),
        ("no up_proj", r"experts\.0, .* only one of gate_proj and up_proj"),
        ("an expert missing", r"lacks down_proj of experts \[1\] of"),
        ("fused too", "both fused and one by one"),
    ],
)
def test_single_experts_that_cannot_be_fused(moe: Files, tmp_path: Path, change: str, message: str) -> None:
    fused = moe.tensors
    moe.tensors, _ = single_experts()
    stem = f"{PREFIX}model.layers.1.mlp.experts"
    if change == "another A":
        moe.tensors[f"{stem}.1.up_proj.lora_A.weight"] += 1e-3
    elif change == "fused too":
        moe.tensors |= fused
    else:
        removed = ".up_proj." if change == "no up_proj" else ".1.down_proj."
        moe.tensors = {key: value for key, value in moe.tensors.items() if removed not in key}
    with pytest.raises(CheckpointError, match=message):
        moe.read(tmp_path)


# -- writing


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({}, "an adapter without layers"),
        (random_factors({Q: (6, 4)}, 3), "the rank is 2"),
        ({Q: Factors(torch.full((2, 4), math.nan), torch.ones(6, 2))}, "8 of 8 values of A are NaN"),
        (random_factors({Q: (3, 6, 4)}, 2), "A and B need 2 dimensions"),
        (random_factors({DOWN: (6, 4)}, 2), "A and B need 3 dimensions"),
    ],
)
def test_writing_refuses(tmp_path: Path, factors: dict[str, Factors], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        peft_format.write(tmp_path, Lora(rank=2), factors, "org/base")
    assert str(tmp_path) in str(refusal.value)
    assert not any(tmp_path.iterdir())


def test_projections_may_share_one_a(tmp_path: Path) -> None:
    """Write factors that share A, as those of a fused layer of queries, keys and values do."""
    pairs = random_factors({Q: (6, 4), UP: (8, 4)}, 2)
    pairs[UP] = replace(pairs[UP], a=pairs[Q].a)
    peft_format.write(tmp_path, Lora(rank=2), pairs, "org/base")
    assert_equal(peft_format.read(tmp_path)[1], pairs)


def test_peft_must_not_take_other_mlps_for_experts() -> None:
    """Refuse targets that peft would turn into experts.gate_up_proj, of twice the rank, in a model with experts."""
    shared = "model.layers.1.mlp.shared_expert.gate_proj"
    config = peft_format.to_config(Lora(dropout=0.1), [shared], "org/base", [shared, GATE_UP, DOWN, Q])
    assert config["target_modules"] == []
    assert config["target_parameters"] == ["shared_expert.gate_proj.weight"]
    assert config["lora_dropout"] == 0.0


LAYER = "model.layers.{}.self_attn.{}".format
ADAPTABLE = [LAYER(layer, name) for layer in range(3) for name in ("q_proj", "v_proj")]
ADAPTABLE += [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(3) for name in EXPERTS] + ["lm_head"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"target_modules": ["q_proj"]}, {LAYER(layer, "q_proj") for layer in range(3)}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}, {LAYER(0, "q_proj"), LAYER(2, "q_proj")}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, {LAYER(1, "q_proj")}),
        ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, {LAYER(n, "q_proj") for n in range(3)}),
        ({"target_modules": r".*\.0\.self_attn\..*"}, {LAYER(0, "q_proj"), LAYER(0, "v_proj")}),
        ({"target_modules": [LAYER(1, "v_proj"), "lm_head"]}, {LAYER(1, "v_proj"), "lm_head"}),
        ({"target_modules": ["down_proj"]}, set()),  # experts are parameters
        ({"target_parameters": ["experts.down_proj"]}, {f"model.layers.{n}.mlp.experts.down_proj" for n in range(3)}),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj", DOWN]},
            {DOWN} | {f"model.layers.{n}.mlp.experts.gate_up_proj" for n in range(3)},
        ),
    ],
)
def test_targeted_layers_match_peft(config, expected):
    assert peft_format.targeted(config, ADAPTABLE) == expected


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ("target_modules", r"(.+.+)+[A-Z]"),
        ("exclude_modules", "(a?){4000000000}"),
        ("layers_pattern", r"([a-z]*)*([a-z._0-9]*)*Z"),
        ("target_modules", "(" * 1000),
    ],
)
def test_hostile_pattern_is_refused(field, pattern, monkeypatch):
    monkeypatch.setattr(peft_format, "_MATCHER", peft_format._MATCHER.replace("(5, 5)", "(1, 1)"))
    config = {"target_modules": ["q_proj"], "layers_to_transform": [0], field: pattern}
    names = [*ADAPTABLE, LAYER(0, 40 * "q")]
    with pytest.raises(CheckpointError, match=f"{field} cannot be matched"):
        peft_format.targeted(config, names)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*?(?:language|text).*?)?model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q_proj|v_proj)",
        r"^(?!.*(?:visual|lm_head)).*(?:q_proj|k_proj)$",
        r".*\.(?P<part>self_attn)\.[qv]_proj",
    ],
)
def test_patterns_match_as_in_peft(pattern):
    """Match patterns as written by Unsloth, ms-swift and peft; peft's own function is the reference."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = [name for name in ADAPTABLE if "experts" not in name]
    expected = {name for name in modules if check_target_module_exists(LoraConfig(target_modules=pattern), name)}
    assert peft_format.targeted({"target_modules": pattern}, ADAPTABLE) == expected != set()


def test_adapter_without_a_targeted_layer_raises_checkpoint_error(tmp_path):
    """Refuse a truncated file or a dropped layer, which would be trained on and merged silently."""
    (tmp_path / peft_format.CONFIG).write_text(json.dumps({"target_modules": ["q_proj", "v_proj"]}), encoding="utf-8")
    every = [name for name in ADAPTABLE if name.endswith(("q_proj", "v_proj"))]
    peft_format.check_complete(tmp_path, every, ADAPTABLE)
    with pytest.raises(CheckpointError) as raised:
        peft_format.check_complete(tmp_path, every[:3] + every[4:], ADAPTABLE)
    assert f"has no factors of {LAYER(1, 'v_proj')}, which adapter_config.json targets" in str(raised.value)
    (tmp_path / peft_format.CONFIG).write_text(
        json.dumps({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]}), encoding="utf-8"
    )
    peft_format.check_complete(tmp_path, every[:2] + every[4:], ADAPTABLE)
