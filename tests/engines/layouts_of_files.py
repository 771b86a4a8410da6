"""Directories of files that may or may not be a checkpoint, and what an engine or transformers loads from each.

    python layouts_of_files.py ENGINE FOLDER RESULT

ENGINE is ``transformers`` or one of ours; RESULT gets, by layout, the log-probabilities of fixed samples and what an export
holds, or the message with which the directory was refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MODEL_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SAMPLES = [[(7 * i + 3 * j) % 60 for i in range(9 + j)] for j in range(2)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0) -> Tensors:
    """Return a model's weights, all random."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    weights = {EMBEDDING: random(64, 32), "model.norm.weight": 1 + random(32), HEAD: random(64, 32)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
        weights |= {f"{prefix}.self_attn.{name}.weight": random(count, 32) for name, count in rows.items()}
        weights |= {f"{prefix}.mlp.{name}_proj.weight": random(48, 32) for name in ("gate", "up")}
        weights |= {f"{prefix}.mlp.down_proj.weight": random(32, 48)}
        weights |= {f"{prefix}.{name}_layernorm.weight": 1 + random(32) for name in ("input", "post_attention")}
    return weights


def save(path: Path, weights: Tensors) -> None:
    save_file(weights, path, metadata={"format": "pt"})


def shards(folder: Path, first: Tensors, second: Tensors, **index: Any) -> None:
    """Write two shards and their index in the place of the whole file."""
    (folder / MODEL_FILE).unlink()
    for name, weights in zip(SHARDS, (first, second), strict=True):
        save(folder / name, weights)
    places = dict.fromkeys(second, SHARDS[1]) | dict.fromkeys(first, SHARDS[0])
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places} | index))


def halves(seed: int = 0) -> tuple[Tensors, Tensors]:
    all_tensors = tensors(seed)
    names = sorted(all_tensors)
    return {name: all_tensors[name] for name in names[:9]}, {name: all_tensors[name] for name in names[9:]}


def config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def tied(folder: Path, head: torch.Tensor | None, **changes: Any) -> None:
    """Write a model whose configuration says that it is tied, with ``head`` in its file."""
    all_tensors = tensors()
    del all_tensors[HEAD]
    save(folder / MODEL_FILE, all_tensors | ({} if head is None else {HEAD: head}))
    config(folder, **({"tie_word_embeddings": True} | changes))


def adapter(folder: Path) -> None:
    """Write the weights file that peft writes beside a model."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    save(
        folder / "adapter_model.safetensors",
        {f"{module}.lora_{n}.weight": torch.ones(2, 32) for n in "A"} | {f"{module}.lora_B.weight": torch.ones(32, 2)},
    )


def adapter_config(folder: Path) -> None:
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "base"}))


def merged(folder: Path) -> None:
    adapter(folder)
    adapter_config(folder)


def bin_file(folder: Path) -> None:
    torch.save(tensors(1), folder / "pytorch_model.bin")


def stale_shards(folder: Path) -> None:
    shards(folder, *halves())
    save(folder / "model-00003-of-00003.safetensors", tensors(1))


def twice(folder: Path) -> None:
    """Write a tensor in both shards with other values; the index names the first."""
    first, second = halves()
    name = sorted(first)[3]
    shards(folder, first, second | {name: first[name] + 1})


def unindexed(folder: Path) -> None:
    """Write a shard with a tensor that the index does not name."""
    first, second = halves()
    places = dict.fromkeys(first, SHARDS[0]) | dict.fromkeys(sorted(second)[1:], SHARDS[1])
    shards(folder, first, second, weight_map=places)


def fused_experts(folder: Path) -> None:
    """Write a mixture whose experts are stored as transformers 5 has them in memory."""
    generator = torch.Generator().manual_seed(2)
    all_tensors = tensors()
    for layer in range(2):
        position = f"model.layers.{layer}"
        for name in ("gate", "up", "down"):
            del all_tensors[f"{position}.mlp.{name}_proj.weight"]
        shapes = {"gate.weight": (4, 32), "experts.gate_up_proj": (4, 2 * 16, 32), "experts.down_proj": (4, 32, 16)}
        all_tensors |= {
            f"{position}.mlp.{name}": 0.2 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()
        }
        all_tensors |= {
            f"{position}.self_attn.{name}_norm.weight": 1 + torch.randn(8, generator=generator) for name in "qk"
        }
    save(folder / MODEL_FILE, all_tensors)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8}
    config(folder, **kind, **experts)


def absent_shard(folder: Path) -> None:
    shards(folder, *halves())
    (folder / SHARDS[1]).unlink()


def index_beside_whole(folder: Path) -> None:
    shards(folder, *halves(1))
    save(folder / MODEL_FILE, tensors())


def index_of_whole(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors(), MODEL_FILE)}))


def without(folder: Path, *names: str) -> None:
    save(folder / MODEL_FILE, {name: tensor for name, tensor in tensors().items() if name not in names})


def more(folder: Path, **weights: torch.Tensor) -> None:
    save(folder / MODEL_FILE, tensors() | weights)


Q = "model.layers.1.self_attn.q_proj"
LAYOUTS: dict[str, Callable[[Path], object]] = {
    "whole": lambda folder: None,
    "shards": lambda folder: shards(folder, *halves()),
    "tied, no head": lambda folder: tied(folder, None),
    "tied, equal head": lambda folder: tied(folder, tensors()[EMBEDDING].clone()),
    "tied, equal head of another dtype": lambda folder: tied(folder, tensors()[EMBEDDING].double()),
    "tied, other head": lambda folder: tied(folder, tensors()[HEAD]),
    "untied, equal head": lambda folder: tied(folder, tensors()[EMBEDDING].clone(), tie_word_embeddings=False),
    "untied, no head": lambda folder: without(folder, HEAD),
    "no embedding": lambda folder: (without(folder, EMBEDDING), config(folder, tie_word_embeddings=True)),
    "adapter beside": merged,
    "adapter config alone": adapter_config,
    "adapter file alone": adapter,
    "bin beside": bin_file,
    "fused experts": fused_experts,
    "stale shards": stale_shards,
    "tensor in two shards": twice,
    "tensor not in the index": unindexed,
    "shard absent": absent_shard,
    "index beside whole": index_beside_whole,
    "index of whole": index_of_whole,
    "index without metadata": lambda folder: shards(folder, *halves(), metadata=None),
    "consolidated beside": lambda folder: save(folder / "consolidated.safetensors", tensors(1)),
    "variant beside": lambda folder: save(folder / "model.fp16.safetensors", tensors(1)),
    "variant alone": lambda folder: (folder / MODEL_FILE).rename(folder / "model.fp16.safetensors"),
    "original folder": lambda folder: (
        (folder / "original").mkdir(),
        save(folder / "original" / "consolidated.00.safetensors", tensors(1)),
    ),
    "other file by config": lambda folder: (
        config(folder, transformers_weights="other.safetensors"),
        save(folder / "other.safetensors", tensors(1)),
    ),
    "distributed shards": lambda folder: save(folder / "shard-00000-model-00001-of-00001.safetensors", tensors(1)),
    "tensor missing": lambda folder: without(folder, f"{Q}.weight"),
    "bias without a place": lambda folder: more(folder, **{f"{Q}.bias": torch.ones(32)}),
    "config with fewer layers": lambda folder: config(folder, num_hidden_layers=1),
    "derived tensor": lambda folder: more(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
}


def build(folder: Path, names: Collection[str]) -> None:
    """Write the layouts of these names."""
    for name in names:
        directory = folder / name
        directory.mkdir(parents=True)
        config(directory)
        save(directory / MODEL_FILE, tensors())
        LAYOUTS[name](directory)


def by_transformers(path: Path) -> Any:
    """Return log-probabilities of SAMPLES from transformers, or the error."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if report["missing_keys"]:
        return f"random: {sorted(report['missing_keys'])}"
    logprobs_of_samples = []
    with torch.no_grad():
        for sample in SAMPLES:
            logprobs = torch.log_softmax(model.eval()(torch.tensor([sample[:-1]])).logits[0].double(), -1)
            logprobs_of_samples.append(logprobs.gather(1, torch.tensor(sample[1:])[:, None])[:, 0].tolist())
    return logprobs_of_samples


def by_engine(engine: str, path: Path, out: Path) -> Any:
    """Return log-probabilities of SAMPLES from an engine, and the content of its export; or the error that rejects ``path``."""
    from megascend import Sample
    from megascend.backends import make_backend
    from megascend.errors import MegascendError

    options = {"self_check": False} if engine == "megatron" else {}
    try:
        backend = make_backend(engine, model=path, precision="fp32", **options)
    except MegascendError as error:
        return str(error)
    with backend:
        logprobs = [x.tolist() for x in backend.forward([Sample.causal(sample) for sample in SAMPLES]).logprobs]
        backend.check_export(out)
        assert not out.exists()
        backend.export_hf(out)
    tied = json.loads((out / "config.json").read_text()).get("tie_word_embeddings")
    return logprobs, sorted(load_file(out / MODEL_FILE)), tied


def results(engine: str, folder: Path) -> dict[str, Any]:
    """Return the results of ``engine`` for the layouts in ``folder``; for transformers, also of the engines' exports."""
    names = [name for name in LAYOUTS if (folder / name).is_dir()]
    if engine == "transformers":
        exports = sorted(folder.glob("*-exports/*"))
        return {path.relative_to(folder).as_posix(): by_transformers(path) for path in exports} | {
            name: by_transformers(folder / name) for name in names
        }
    return {name: by_engine(engine, folder / name, folder / f"{engine}-exports" / name) for name in names}


if __name__ == "__main__":
    kind, where, result = sys.argv[1:]
    if kind != "transformers":
        import megascend

        megascend.bootstrap("cpu", engine=kind)
    torch.save(results(kind, Path(where)), result)
