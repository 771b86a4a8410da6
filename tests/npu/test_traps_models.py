"""Traps that show only with a model: its configuration, its attributes, LoRA, dropout, sequence lengths."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Sample
from megascend.config import Batching, Parallel, Recompute
from megascend.errors import ConfigError
from megascend.runtime.bootstrap import current_runtime
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, hf_reference, token_lists
from simnpu import call_log

pytestmark = pytest.mark.usefixtures("npu")

PADDED = Batching(packing=False, micro_batch_tokens=10_000)


def build(checkpoint: Path, parallel: Parallel | None = None, **options: Any) -> Any:
    from megascend.backends import MegatronBackend

    settings = {"precision": "fp32", "platform": "npu", "timeout_s": 60, "batching": PADDED} | options
    return MegatronBackend(checkpoint, parallel, **settings)


# --- the model's configuration ---


def plain(values: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def configurations(*jobs: tuple[Path, Parallel]) -> list[dict[str, Any]]:
    """Build models in turn; return each one's configuration and MindSpeed's arguments."""
    reports = []
    for checkpoint, parallel in jobs:
        backend = build(checkpoint, parallel)
        config, arguments = backend.engine.config, vars(import_module("mindspeed.args_utils").get_full_args())
        reports.append(
            {
                "config": plain(vars(config)),
                "arguments": plain(arguments),
                "missing": [name for name in arguments if not hasattr(config, name)],
                "class": [kind.__name__ for kind in type(config).__mro__],
            }
        )
        backend.close()
    return reports


@pytest.fixture(scope="module")
def in_turn(parity_folder) -> dict[str, Any]:
    """Configure experts under context parallelism, then a dense model without; and each model separately."""
    dense, experts = (case_checkpoint(parity_folder, arch) for arch in ("qwen3", "qwen3_moe"))
    jobs = ((experts, Parallel(context=2, context_algorithm="all_gather")), (dense, Parallel()))
    first, second = run_distributed(configurations, 2, *jobs, init=False, timeout_s=120)[0]
    ((experts_only,),) = run_distributed(configurations, 1, (experts, Parallel()), init=False)
    (dense_only,) = run_distributed(configurations, 2, (dense, Parallel()), init=False, timeout_s=120)[0]
    return {"experts": first, "dense after experts": second, "dense": dense_only, "experts alone": experts_only}


def test_model_config_subclass_has_mindspeeds_attributes(in_turn) -> None:
    for report in in_turn.values():
        assert report["class"].index("ModelConfig") < report["class"].index("TransformerConfig")
        assert report["missing"] == []
        assert report["config"]["use_flash_attn"] == "True"
        assert report["config"]["attention_mask_type"] == "'causal'"


@pytest.mark.parametrize(
    ("name", "context", "algorithm", "level"),
    [
        ("experts", "2", "'kvallgather_cp_algo'", "2"),
        ("experts alone", "1", "'megatron_cp_algo'", "2"),
        ("dense", "1", "'megatron_cp_algo'", "0"),
        ("dense after experts", "1", "'megatron_cp_algo'", "0"),
    ],
)
def test_configuration_and_arguments_follow_the_model(name, context, algorithm, level, in_turn) -> None:
    for values in (in_turn[name]["config"], in_turn[name]["arguments"]):
        assert values["context_parallel_size"] == context
        assert values["context_parallel_algo"] == algorithm
        assert values["optimization_level"] == level


def test_no_state_of_an_earlier_model_remains(in_turn) -> None:
    assert in_turn["experts"]["config"]["num_moe_experts"] == "4"
    assert in_turn["dense after experts"]["config"] == in_turn["dense"]["config"]
    assert in_turn["dense after experts"]["arguments"] == in_turn["dense"]["arguments"]


def test_provider_options_reach_the_model_config(parity_folder) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def work() -> tuple[bool, bool]:
        ring: dict[str, Any] = {"parallel": Parallel(context=2), "batching": Batching(packing=False)}
        backend = build(checkpoint, provider_options={"megatron_cp_in_bnsd": True}, **ring)
        option = backend.engine.config.megatron_cp_in_bnsd
        backend.close()
        backend = build(checkpoint, **ring)
        return option, backend.engine.config.megatron_cp_in_bnsd

    assert run_distributed(work, 2, init=False) == [(True, False)] * 2


def refuse_gpt_oss(folder: Path) -> list[str]:
    """Refuse the windows and learnt sinks in ``config.json`` of gpt-oss, read through mcore-bridge."""
    from megascend.engines.megatron.build import build_config
    from megascend.engines.megatron.groups import MegatronGroups
    from megascend.runtime.distributed.process_groups import initialize
    from megascend.runtime.topology.topology import plan

    runtime, topology = current_runtime("a test"), plan(Parallel(), 1)
    runtime.configure_topology(topology)
    initialize(topology, runtime.platform, 30, factory=MegatronGroups())
    config = build_config(folder, topology, "fp32", Recompute(), runtime.platform)
    with pytest.raises(ConfigError) as window:
        runtime.configure_model(config, {})
    config.window_size = None
    with pytest.raises(ConfigError) as softmax:
        runtime.configure_model(config, {})
    return [str(window.value), str(softmax.value)]


def test_window_and_learnable_softmax_of_gpt_oss_are_refused(tmp_path) -> None:
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 8}
    config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 320}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ((window, softmax),) = run_distributed(refuse_gpt_oss, 1, tmp_path, init=False)
    assert "window_size: 7, 0 with MindSpeed: its attention ignores the window" in window
    assert "softmax_type: learnable with MindSpeed: its attention computes the vanilla softmax" in softmax


# --- the attributes of sharded parameters, and LoRA ---


def norm_and_marks(checkpoint: Path) -> tuple[float, dict[str, bool]]:
    backend = build(checkpoint, Parallel(tensor=2), batching=Batching(micro_batch_tokens=64))
    marks = {
        name: bool(getattr(parameter, "tensor_model_parallel", False))
        for chunk in backend.engine.bare_chunks
        for name, parameter in chunk.named_parameters()
    }
    backend.forward_backward(causal_samples(token_lists()))
    return backend.optimizer_step().grad_norm, marks


def test_gradient_norm_counts_every_shard(parity_folder, monkeypatch) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    expected = hf_reference(parity_folder, checkpoint, token_lists()).grad_norms[0]
    norm, marks = run_distributed(norm_and_marks, 2, checkpoint, init=False, timeout_s=120)[0]
    assert norm == pytest.approx(expected, abs=1e-4)
    replicated = {name for name in marks if "norm" in name or "router" in name}
    assert {name for name, marked in marks.items() if not marked} == replicated
    for part in ("word_embeddings", "linear_qkv", "linear_proj", "experts.linear_fc1", "experts.linear_fc2", "output"):
        assert any(part in name for name in marks), part
    monkeypatch.setattr("megascend.engines.megatron.build.mark_tensor_parallel", lambda chunk: None)
    unmarked, _ = run_distributed(norm_and_marks, 2, checkpoint, init=False, timeout_s=120)[0]
    assert unmarked < expected - 0.1


# --- dropout ---


def evaluate_and_train(checkpoint: Path) -> dict[str, Any]:
    backend = build(checkpoint, batching=Batching(), self_check=False)
    samples = causal_samples(token_lists())
    results: dict[str, Any] = {}
    for name, call in (
        ("before", lambda: backend.forward(samples)),
        ("training", lambda: backend.forward_backward(samples)),
        ("after", lambda: backend.forward(samples)),
    ):
        with call_log.recording() as calls:
            result = call()
        attention = [call_record.arguments for call_record in calls if call_record.name == "npu_fusion_attention"]
        results[name] = sorted({call_arguments.get("keep_prob", 1.0) for call_arguments in attention})
        if name != "training":
            results[f"{name} logprobs"] = torch.cat([logprobs.cpu() for logprobs in result.logprobs])
    return results


def test_attention_dropout_is_active_only_in_training(parity_folder) -> None:
    noisy, plain = (case_checkpoint(parity_folder, "qwen3", attention_dropout=p) for p in (0.1, 0.0))
    (noisy_results,), (expected,) = (
        run_distributed(evaluate_and_train, 1, model, init=False) for model in (noisy, plain)
    )
    assert noisy_results["training"] == [0.9]
    assert noisy_results["before"] == noisy_results["after"] == [1.0]
    assert expected["training"] == [1.0]
    assert torch.equal(noisy_results["before logprobs"], expected["before logprobs"])
    assert torch.equal(noisy_results["after logprobs"], expected["before logprobs"])


# --- sequences under context parallelism ---

ODD = (12, 19, 8)


def queries(checkpoint: Path) -> tuple[list[int], list[float]]:
    """Return the query lengths of this rank's calls, and the summed log-probabilities of the samples."""
    backend = build(checkpoint, Parallel(context=2))
    samples = [Sample.causal(ids) for ids in token_lists(lengths=ODD)]
    with call_log.recording() as calls:
        backend.forward_backward(samples)
    lengths = [
        call_record.arguments["query"].shape[0] for call_record in calls if call_record.name == "npu_fusion_attention"
    ]
    return sorted(set(lengths)), [logprobs.sum().item() for logprobs in backend.forward(samples).logprobs]


def test_sequences_are_padded_to_twice_the_context_parallel_size(parity_folder) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    expected = hf_reference(parity_folder, checkpoint, token_lists(lengths=ODD), steps=0).logits
    longest = -(-(max(ODD) - 1) // 4) * 4  # 18 targets become 20: 2 chunks of 5 on either rank
    for lengths, sums in run_distributed(queries, 2, checkpoint, init=False, timeout_s=120):
        assert set(lengths) <= {longest // 2, longest // 4}
        for total, logits, ids in zip(sums, expected, token_lists(lengths=ODD), strict=True):
            scores = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
            assert total == pytest.approx(scores.sum().item(), abs=1e-3)
