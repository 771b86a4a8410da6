"""Sparse attention (DeepSeek-V3.2, GLM-5): the choice of keys, layers that share a choice, and what is refused."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from packaging.version import Version

from megascend.config import Parallel, Recompute
from megascend.errors import ConfigError, TopologyError
from megascend.models import architecture_named
from megascend.models.base import IndexedAttention, LatentAttention
from megascend.models.checkpoint_files.info import shape_of
from megascend.models.memory import activations
from megascend.models.memory.activations import LayerKind, sparse_attention_bytes
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from megascend.testing.tiny_models import tiny_config
from support.model_checks import (
    assert_within,
    saved_bytes,
)

pytestmark = pytest.mark.usefixtures("megatron_imported")

needs_stack = pytest.mark.skipif(
    Version(metadata.version("megatron-core")) < Version("0.19"),
    reason="sparse attention needs megatron-core 0.19 (stack 0.19)",
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def config(arch: str, **overrides: Any) -> dict[str, Any]:
    return tiny_config(arch, **overrides)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v4", r"0\.19 lack compressed attention and hyper-connections; use engine single"),
        (
            "deepseek_v41",
            r"0\.19 lack its compressed attention and lookup tables; wait for the next one, and transformers'",
        ),
        ("glm5_next", r"0\.19 lack pooled indexers and its hyper-connections; wait for the release after it"),
    ],
)
def test_unreleased_family_is_refused_by_name(model_type: str, reason: str, tmp_path: Path) -> None:
    from megascend.engines.megatron.build import check_architecture

    settings = {"model_type": model_type, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
    if model_type != "deepseek_v4":
        settings = {"model_type": model_type, "text_config": settings | {"model_type": f"{model_type}_text"}}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{model_type}: mcore-bridge builds it on a development version .*{reason}"):
        check_architecture(tmp_path)


@pytest.mark.parametrize(
    ("spelling", "computing"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True, False)),
        ({"index_topk_pattern": "FFSF"}, (True, True, False, True)),
        ({"index_topk_freq": 1}, (True, True, True, True)),
        ({"indexer_types": ["full", "full", "shared", "shared"]}, (True, True, False, False)),
    ],
)
def test_layers_with_an_indexer_are_read_as_transformers_reads_them(
    spelling: dict[str, Any], computing: tuple[bool, ...]
) -> None:
    from transformers import GlmMoeDsaConfig

    raw = {name: value for name, value in config("glm_moe_dsa").items() if name != "indexer_types"} | spelling
    sizes = IndexedAttention.from_config(architecture_named("glm_moe_dsa").normalise(raw))
    assert sizes is not None
    assert sizes.computing == computing
    assert tuple(kind == "full" for kind in GlmMoeDsaConfig(**raw).indexer_types) == computing


def test_period_of_the_choice_is_that_of_megatron_core() -> None:
    types = ["full", "shared", "shared", "full"]
    settings = architecture_named("glm_moe_dsa").megatron_settings(config("glm_moe_dsa", indexer_types=types))
    assert (settings["dsa_indexer_topk_freq"], settings["dsa_indexer_skip_topk_offset"]) == (3, 1)


@needs_stack
def test_ring_over_context_ranks_is_refused(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "deepseek_v32")

    def on_rank() -> str:
        with pytest.raises(TopologyError) as caught:
            case_backend(Case("CP2", 2, Parallel(context=2)), checkpoint)
        return str(caught.value)

    messages = run_distributed(on_rank, 2, init=False, timeout_s=60)
    assert all("set parallel.context_algorithm: all_gather" in message for message in messages)


@needs_stack
@pytest.mark.parametrize(
    "case",
    [
        # differs: layers that share a choice, recomputed
        pytest.param(
            Case("PP2, full recompute", 2, Parallel(pipeline=2), recompute=Recompute(granularity="full")),
            marks=pytest.mark.difference,
        ),
        Case("padded, full recompute", packing=False, micro_batch_tokens=80, recompute=Recompute(granularity="full")),
        Case("core attention recomputed", recompute=Recompute(granularity="selective", modules=("core_attn",))),
    ],
    ids=lambda case: case.name,
)
def test_recomputation_of_shared_choices_equals_transformers(case: Case, parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, "glm_moe_dsa"), token_lists()
    difference = differences(
        train_case(case, checkpoint, tokens, steps=3), hf_reference(parity_folder, checkpoint, tokens, steps=3)
    )
    assert_within(difference, loss=1e-5, grad_norm=1e-4)


@needs_stack
@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_yarn_equals_transformers(arch: str, parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, arch, rope_parameters=YARN), token_lists()
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=2)
    difference = differences(train_case(Case(arch), checkpoint, tokens, steps=2), reference)
    assert_within(difference, loss=1e-5, grad_norm=1e-4, logits=2e-5)


@needs_stack
def test_scores_in_blocks_equal_the_sum_over_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascend.models.families import sparse_attention_megatron as module

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(37, 2, 3, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(41, 2, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(37, 2, 3, generator=generator, dtype=torch.float64)
    expected = torch.einsum("sbht,sbh->bst", torch.einsum("sbhd,tbd->sbht", q, k).relu(), weights)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 2 * 3 * 41 * 5)  # five queries at a time
    scores = module.index_scores(q, weights, k)
    assert scores.dtype == torch.float32
    assert float((scores - expected).abs().max()) < 1e-5


@needs_stack
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_attention_saves_the_counted_bytes(parity_folder: Path, precision: Literal["fp32", "bf16"]) -> None:
    lengths = (96, 64)
    checkpoint = case_checkpoint(parity_folder, "deepseek_v32")
    case = Case("saved", precision=precision, micro_batch_tokens=4096)

    def on_rank() -> int:
        with case_backend(case, checkpoint) as backend:
            return saved_bytes(backend, lambda chunk: chunk.decoder.layers[0].self_attention, lengths)

    (measured,) = run_distributed(on_rank, 1, init=False, timeout_s=60)
    settings = config("deepseek_v32")
    latent, indexed = LatentAttention.from_config(settings), IndexedAttention.from_config(settings)
    assert latent is not None
    assert indexed is not None
    width = {"bf16": 2, "fp32": 4}[precision]
    kind = LayerKind(fused=False, bytes=width, packed=True, frozen=False, rank=0, longest=max(lengths))
    topology = plan(Parallel(), 1, shape_of(settings))
    expected = sparse_attention_bytes(latent, indexed, 4, topology, kind) + width * 64
    assert sum(lengths) * expected == pytest.approx(measured, rel=0.03)


def test_block_is_the_one_of_the_estimate() -> None:
    source = Path(activations.__file__).parents[1] / "families" / "sparse_attention_megatron.py"
    assert "BLOCK_BYTES = 2**28\n" in source.read_text(encoding="utf-8")
    assert activations.SCORE_BLOCK_BYTES == 2**28
