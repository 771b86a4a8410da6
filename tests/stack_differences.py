"""Tests of what differs between stacks: CI runs them on the newest one, the other tests on the first one only.

    python tests/stack_differences.py main     # their files, one a line; npu: those on the simulated device

``scripts/test.sh 0.19 --differences`` runs them. Some are nightly on the first stack.
"""

from __future__ import annotations

import os
import sys

import pytest

import nightly

DIFFERENCES = {
    "runtime/bootstrap/test_runtime.py": {
        "reported_modules_and_functions_are_installed": "functions that are replaced when Megatron's modules are imported",
    },
    "runtime/bootstrap/test_versions.py": {
        "missing_undeclared_module_is_named": "triton, which Megatron-Core imports from 0.17 on",
        "this_environment_is_a_row_of_the_table": "versions of packages",
    },
    "training/checkpoint/test_across_stacks.py": {
        "run_saved_on_one_stack_continues_on_another[from the other-MoE EP2]": "weights and optimizer state in checkpoints",
        "run_saved_on_one_stack_continues_on_another[to the other-bf16]": "weights and optimizer state in checkpoints",
    },
    "engines/megatron/test_grouped_experts.py": {
        "trajectory_equals_hugging_face[recomputed activation]": "outputs that recomputation replaces, without a compiler",
    },
    "training/lora/test_parity_with_peft.py": {
        "trajectory_equals_peft[TP2 + SP]": "layers on which adapters act",
    },
    "models/test_families.py": {
        "export_is_the_source_and_after_training_transformers_weights[nemotron_h]": "HybridModel: conversion of weights",
        "training_equals_hugging_face[deepseek_v32: TP2 x EP2 + SP]": "sparse attention",
        "training_equals_hugging_face[glm_moe_dsa: CP2]": "sparse attention: gathered keys, layers that share a choice",
        "training_equals_hugging_face[nemotron_h: CP2]": "HybridModel: packed samples joined over context ranks",
        "training_equals_hugging_face[nemotron_h: TP2 x EP2 + SP]": "HybridModel: state spaces, latent experts",
    },
    "models/test_nemotron.py": {
        "other_members_equal_transformers[dense, VPP2-]": "HybridModel: layers divided over virtual stages",
    },
    "models/test_qwen_hybrid.py": {
        "context_parallel_training_equals_transformers[TP2 x CP2 + SP]": "linear attention that exchanges heads (context_core)",
    },
    "models/test_sparse_attention.py": {
        "recomputation_of_shared_choices_equals_transformers[PP2, full recompute]": "layers that share a choice, recomputed",
    },
    "parity/test_matrix.py": {
        "trajectory_equals_hugging_face[TP2 x PP2 x VPP2 + SP]": "schedule of virtual stages, names of the norms' sizes",
        "trajectory_equals_hugging_face[fp16]": "main parameters, loss scale",
        "trajectory_equals_hugging_face[saved and loaded]": "checkpoints of the stack itself",
        "trajectory_equals_hugging_face[selective recompute]": "recomputed core attention",
    },
    "engines/step/test_router_replay.py": {
        "gradients_are_those_of_transformers_with_the_same_experts[qwen3_moe, EP2]": "hook of routers",
    },
    "test_upstream_faults.py": {
        "gradients_of_several_samples_in_a_batch_are_reduced": "_reduce, which 0.19 has mended",
        "packed_samples_with_interleaved_rotary_embeddings_are_not_rotated_by_the_fused_kernel[glm4]": "mended in 0.18",
        "queries_that_are_not_compressed_have_no_norm": "norm of uncompressed queries, added in 0.19",
    },
    "npu/test_adaptor_bootstrap.py": {
        "late_import_is_refused_before_patching[megatron.core]": "provider megatron_adaptor: order of imports",
        "late_import_is_refused_before_patching[peft, ": "peft imports the NPU's transformer_engine",
        "megatrons_layers_are_built_on_the_npus_engine": "Transformer Engine's classes on the NPU",
        "packages_are_imported_in_order": "provider megatron_adaptor: order of imports",
        "provider_follows_from_the_stack": "default provider",
        "verification_names_what_is_not_patched": "provider megatron_adaptor: verification",
    },
    "npu/test_adaptor_training.py": {
        "fused_operators_are_called_and_arguments_follow_the_model": "provider megatron_adaptor: operators, defaults, repatching",
        "packed_samples_over_context_ranks_equal_hugging_face[ring]": "packing with context parallelism on NPUs",
    },
    "npu/test_parity.py": {
        "trajectory_equals_hugging_face[MoE TP2 x EP2 + SP]": "experts on TransformerEngineNPU's classes",
    },
}
"""By file below tests: beginnings of tests' names, without ``test_``, and what differs."""


def mark(items: list[pytest.Item], whole_files: bool) -> None:
    """Add the marker ``difference`` to the tests of :data:`DIFFERENCES`."""
    nightly.mark_named(items, DIFFERENCES, pytest.mark.difference, whole_files)


if __name__ == "__main__":
    on_npu, has_other = sys.argv[1] == "npu", bool(os.environ.get("MEGASCEND_OTHER_STACK_PYTHON"))
    # tests/conftest.py ignores the file of two stacks where there is one.
    files = [file for file in DIFFERENCES if has_other or not file.endswith("test_across_stacks.py")]
    print(*(f"tests/{file}" for file in files if file.startswith("npu/") == on_npu), sep="\n")
