"""Tests that are nightly for their time alone, and what covers the same code in CI.

Tests with other reasons carry the marker themselves, and have a row in docs/testing.md.
"""

from __future__ import annotations

import pytest

NIGHTLY = {
    "bootstrap/test_import_order.py": {
        "parts_that_do_not_need_megatron_can_come_first[megascend.step.step]": "megascend.backend, which imports it",
    },
    "bootstrap/test_providers.py": {
        "a_provider_is_found_by_its_place": "a provider from outside, called in order",
    },
    "bootstrap/test_runtime.py": {
        "every_module_of_others_that_the_bootstrap_put_in_place_is_reported": "modules and functions that are reported",
    },
    "cli/test_cli_new_model.py": {
        "plain_transformers_loads_every_architecture": "the command; every tiny model is used by parity",
    },
    "cli/test_cli_rl.py": {
        "the_example_learns_and_resumes": "app/rl/test_loop.py",
    },
    "cli/test_cli_train.py": {
        "two_processes_learn_the_same": "a cookbook script on two ranks; one process in the same file",
    },
    "engines/megatron/test_export.py": {
        "an_export_without_training_is_the_checkpoint_bit_for_bit[GLM-4.5, EP2]": "MoE EP2, and the other architectures",
        "an_export_without_training_is_the_checkpoint_bit_for_bit[dots1, PP2]": "TP2 x PP2, and the other architectures",
    },
    "engines/megatron/test_named_weights.py": {
        "memory_is_one_layer_where_it_is_asked_for_and_one_shard_elsewhere[TP2": "PP2 and EP2",
    },
    "engines/single/test_single.py": {
        "adapters_equal_pefts_and_move_between_engines[qwen3]": "qwen3_moe",
    },
    "lora/test_isolation.py": {
        "mixed_training_equals_training_alone[CP2-4]": "embedding and head on TP2 + SP, experts on EP2, PP2",
        "mixed_training_equals_training_alone[TP2 + SP-4]": "embedding and head on TP2 + SP",
    },
    "npu/test_cookbook_ascend.py": {
        "a_recipe_learns_on_two_forked_ranks[tp_moe_npu]": "tp_moe_cp_npu",
        "a_recipe_learns_on_two_forked_ranks[tp_npu]": "tp_moe_cp_npu",
        "a_run_that_does_not_learn_fails_and_says_why": "what counts as learning",
    },
    "selfcheck/test_findings.py": {
        "random_shapes_of_the_proven_architectures_raise_no_alarm[one each]": "what is honoured raises no alarm",
    },
    "test_cookbook.py": {
        "a_cookbook_script_learns[CP2]": "experts on EP2; npu/test_cookbook_ascend.py: tp_moe_cp_npu",
        "a_cookbook_script_learns[PP2]": "experts on EP2; PP2 in parity",
        "tenants_that_had_no_time_to_learn_are_a_failure": "npu/test_cookbook_ascend.py: multi_lora_npu",
    },
    "test_readme.py": {
        "the_program_without_a_cluster_runs": "engines/single/test_single.py",
        "the_programs_about_lora_run": "lora/test_backend_adapters.py, lora/test_peft_format.py",
    },
    "testing/test_kept.py": {
        "a_reference_is_run_once_wherever_its_checkpoint_lies": "a kept program is found again, in the same file",
    },
}
"""By file below tests: beginnings of tests' names, without ``test_``, and what covers them."""


def mark(items: list[pytest.Item], whole_files: bool) -> None:
    """Give those of :data:`NIGHTLY` the marker.

    Args:
        whole_files: no single test was asked for.

    Raises:
        pytest.UsageError: an entry names no test of a file that was collected.
    """
    dead = set()
    for file, starts in NIGHTLY.items():
        mine = [item for item in items if item.nodeid.startswith(f"tests/{file}::")]
        for start in starts:
            found = [item for item in mine if item.nodeid.partition("::")[2].startswith(f"test_{start}")]
            for item in found:
                item.add_marker(pytest.mark.nightly)
            if mine and not found:
                dead.add(f"{file}: {start}")
    if whole_files and dead:
        raise pytest.UsageError(f"tests/nightly.py names no test: {', '.join(sorted(dead))}")
