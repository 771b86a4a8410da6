"""An export after training is loaded by plain transformers with the same logits."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adam, Batching, Parallel
from megascend.errors import CheckpointError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from megascend.testing.reference import run_reference

pytestmark = pytest.mark.usefixtures("megatron_imported")
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "generation_config.json")
LOAD = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

path, tokens, result = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
options = {"output_loading_info": True, "dtype": "auto", "attn_implementation": "eager"}
model, info = AutoModelForCausalLM.from_pretrained(path, **options)
assert not any(info.values()), info
with torch.no_grad():
    logits = [model.eval()(torch.tensor([ids[:-1]])).logits[0].float().contiguous() for ids in tokens]
save_file({str(i): entry for i, entry in enumerate(logits)}, result)
print(next(model.parameters()).dtype)
"""


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    arch: str = "qwen3"
    overrides: dict[str, Any] = field(default_factory=dict)
    adam: dict[str, Any] = field(default_factory=dict)


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TIED = {"tie_word_embeddings": True}
LAYOUTS = {
    "single": Layout(),
    "TP2 x PP2": Layout(4, Parallel(tensor=2, pipeline=2)),
    "tied, TP2": Layout(2, Parallel(tensor=2), overrides=TIED),
    "DP2, overlap": Layout(2, adam=OVERLAP),
    "MoE EP2": Layout(2, Parallel(expert=2), arch="qwen3_moe"),
}


def train_and_export(checkpoint: Path, target: Path, layout: Layout, precision: str = "fp32", steps: int = 2):
    """Train and export; return rank 0's logits of three samples at the time of the export."""

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(
            checkpoint,
            layout.parallel,
            precision=precision,
            optimizer=Adam(lr=1e-2, **layout.adam),
            batching=Batching(micro_batch_tokens=64),
            timeout_s=60,
            self_check=False,  # transformers' logits of what is exported are compared
        )
        for _ in range(steps):
            backend.forward_backward(backend.shard(causal_samples(token_lists())))
            assert not backend.optimizer_step().skipped
        backend.export_hf(target)
        return backend.forward(causal_samples(token_lists())[:3], logits=True).logits

    return run_distributed(on_rank, layout.world_size, init=False)[0]


def transformers_alone(path: Path) -> tuple[str, list[torch.Tensor]]:
    """Load an export with plain transformers, in a process without megascend; return its dtype and logits."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "logits.safetensors"
        completed = run_reference(LOAD, path, json.dumps(token_lists()[:3]), result)
        assert completed.returncode == 0, completed.stderr[-3000:]
        logits = load_file(result)
    return completed.stdout.strip(), [logits[str(index)] for index in range(3)]


def largest_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


def relative_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest logit: fp32 has seven digits, and trained logits reach twenty."""
    return largest_difference(actual, expected) / max(float(entry.abs().max()) for entry in expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.nightly_cases(
    "single",  # covered: TP2 x PP2; MoE EP2
    "tied, TP2",  # covered: engines/test_layouts_of_files.py: tied; TP2 x PP2
)
def test_exported_models_give_the_same_logits_in_transformers(parity_folder, tmp_path, name):
    layout = LAYOUTS[name]
    checkpoint = case_checkpoint(parity_folder, layout.arch, **layout.overrides)
    before = load_file(checkpoint / "model.safetensors")
    actual = train_and_export(checkpoint, tmp_path / "out", layout)
    dtype, expected = transformers_alone(tmp_path / "out")
    assert dtype == "torch.float32"
    # Relative to logits of about 10 in fp32, whose sums two implementations order differently, and each processor once more.
    assert relative_difference(actual, expected) <= 2e-6
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == {name: t.shape for name, t in before.items()}
    assert all(not torch.equal(after[name], before[name]) for name in before)  # every tensor was trained


@pytest.mark.nightly_cases("fp16*")  # covered: bf16
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_dtype_of_training_is_kept(parity_folder, tmp_path, precision, dtype):
    layout = LAYOUTS["TP2 x PP2"]
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    actual = train_and_export(checkpoint, tmp_path / "out", layout, precision)
    loaded_dtype, expected = transformers_alone(tmp_path / "out")
    assert loaded_dtype == str(dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == str(dtype).removeprefix("torch.")
    assert largest_difference(actual, expected) <= (0.15 if precision == "bf16" else 0.02)


@pytest.fixture
def with_companions(parity_folder, tmp_path) -> Path:
    checkpoint = tmp_path / "model"
    shutil.copytree(case_checkpoint(parity_folder, "qwen3"), checkpoint)
    for name in COMPANIONS:
        (checkpoint / name).write_text("{}" if name.endswith("json") else f"# {name}")
    return checkpoint


def test_an_export_replaces_an_earlier_one_whole(with_companions, tmp_path):
    target = tmp_path / "out"
    shutil.copytree(with_companions, target)
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    (target / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for steps in (1, 2):
        actual = train_and_export(with_companions, target, LAYOUTS["single"], steps=steps)
        assert not list(target.glob("*index*")) + list(target.glob("*-of-*"))
        _, expected = transformers_alone(target)
        assert largest_difference(actual, expected) <= 1e-5
    assert not list(tmp_path.glob(".*"))


def export_one_after_another(checkpoint: Path, folder: Path, layouts: list[Parallel]) -> list[tuple[int, int]]:
    """Export each layout without training; return (tensors compared, tensors that differ from the checkpoint)."""
    from megascend.backends import MegatronBackend

    counts = []
    for index, parallel in enumerate(layouts):
        backend = MegatronBackend(checkpoint, parallel, "fp32", timeout_s=60, self_check=False)
        backend.export_hf(folder / str(index))
        backend.close()
        exported, original = (load_file(path / "model.safetensors") for path in (folder / str(index), checkpoint))
        counts.append((len(original), sum(not torch.equal(exported[name], original[name]) for name in original)))
    return counts


def test_layouts_of_one_process_export_after_each_other(parity_folder, tmp_path):
    """Export twice: mcore-bridge keeps its export group in a module global, so a second layout would use the first one's."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    layouts = [Parallel(expert=2), Parallel(pipeline=2), Parallel(tensor=2), Parallel(expert=2)]
    results = run_distributed(export_one_after_another, 2, checkpoint, tmp_path / "out", layouts, timeout_s=120)
    for counts in results:
        assert len(counts) == len(layouts)
        assert all(count > 30 and differ == 0 for count, differ in counts)


@pytest.fixture
def with_prediction_heads(parity_folder, tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write GLM-4.5 in bf16 as published: fp32 correction biases, and a layer after the last for multi-token prediction."""
    checkpoint = tmp_path / "model"
    shutil.copytree(case_checkpoint(parity_folder, "glm4_moe"), checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors = {k: t if k.endswith("correction_bias") else t.bfloat16() for k, t in tensors.items()}
    heads = {
        "model.layers.4.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.4.mlp.gate.e_score_correction_bias": torch.randn(4),
        "model.layers.4.shared_head.norm.weight": torch.randn(64).bfloat16(),
    }
    save_file(tensors | heads, checkpoint / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint, heads


def test_heads_for_multi_token_prediction_are_carried_over(with_prediction_heads, tmp_path):
    """Keep their values and dtype; trained tensors have the dtype of training, except for the fp32 biases."""
    checkpoint, heads = with_prediction_heads
    train_and_export(checkpoint, tmp_path / "out", Layout(2, Parallel(expert=2)), "bf16", steps=1)
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert set(before) == set(after)
    for name, tensor in after.items():
        if name in heads:
            assert tensor.dtype == heads[name].dtype
            assert torch.equal(tensor, heads[name])
        elif name.endswith("correction_bias"):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before[name])
        else:
            assert tensor.dtype == torch.bfloat16


def test_other_tensors_than_the_sources_are_an_error_on_all_ranks(parity_folder, tmp_path, monkeypatch):
    """Export tensors as mcore-bridge writes GLM-4, with which transformers would start with random MLPs; the target stays."""
    from megascend.backends import MegatronBackend
    from megascend.engines.megatron import named_weights

    monkeypatch.setattr(named_weights, "_join_fused", lambda stream, headers: stream)
    checkpoint = case_checkpoint(parity_folder, "glm4")
    target = tmp_path / "out"
    shutil.copytree(checkpoint, target)
    before = (target / "model.safetensors").read_bytes()

    def on_rank():
        backend = MegatronBackend(checkpoint, Parallel(tensor=2), "fp32", timeout_s=60, self_check=False)
        with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.gate_up_proj.weight.*have .*gate_proj"):
            backend.export_hf(target)

    run_distributed(on_rank, 2, init=False)
    assert (target / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*"))
