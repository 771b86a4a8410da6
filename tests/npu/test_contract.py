"""The double of MindSpeed and the real one agree on everything that megascend's bootstrap relies on.

``contract_report.py`` writes the reports, one process per scenario. Every test runs on the double's report, and with
``MEGASCEND_MINDSPEED=CHECKOUT`` on the real one's too; the last test then compares the two. A MindSpeed
release that changes the interface fails here, by name, before anything trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import simnpu
from megascend.runtime.bootstrap.versions import installed_versions

FOLDER = Path(__file__).resolve().parent
FOLDERS = {"double": FOLDER.parent / "doubles"}
if checkout := os.environ.get("MEGASCEND_MINDSPEED"):
    FOLDERS["real"] = Path(checkout)
SCENARIOS = ("patched", "ring", "late")
DEADLINE_S = 300

IS_0_16 = Version(installed_versions()["megatron-core"] or "0") >= Version("0.16.0a0")
TE = "megatron.core.extensions.transformer_engine"
TE_ATTENTION = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention." + (
    "TEDotProductAttention" if IS_0_16 else "MindSpeedTEDotProductAttention"
)
RING_ATTENTION = "mindspeed.core.context_parallel.adaptor.MindSpeedCPDotProductAttention"
OWN_PRODUCTS = "mindspeed" if IS_0_16 else "megatron"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process on the simulated device with the ``mindspeed`` of ``folder``."""
    path = [str(folder), *(entry for entry in sys.path if entry and "simnpu" not in entry and "doubles" not in entry)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MIND_SPEED_LOG_LEVEL": "INFO"}
    return simnpu.environment(os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path)})


@pytest.fixture(scope="session")
def all_reports() -> dict[str, dict[str, Any]]:
    """Report every scenario of every available MindSpeed; the processes of one MindSpeed run in parallel."""
    return {kind: make_reports(folder) for kind, folder in FOLDERS.items()}


def make_reports(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / "contract_report.py")]
    processes = {
        scenario: subprocess.Popen(
            [*command, scenario],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for scenario in SCENARIOS
    }
    reports = {}
    try:
        for scenario, process in processes.items():
            output, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"scenario {scenario} with {folder}:\n{errors[-4000:]}"
            reports[scenario] = json.loads(output.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
    return reports


@pytest.fixture(params=FOLDERS)
def reports(request: pytest.FixtureRequest, all_reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return all_reports[request.param]


@pytest.fixture
def patched(reports: dict[str, Any]) -> dict[str, Any]:
    return reports["patched"]


def test_signatures_that_the_bootstrap_uses(patched):
    signatures = patched["signatures"]
    assert signatures["args_utils.get_mindspeed_args"] == "(get_defaults=False)"
    assert signatures["args_utils.get_full_args"] == "()"
    assert signatures["megatron_adaptor.repatch"] == "(args)"
    manager = "patch_utils.MindSpeedPatchesManager"
    assert signatures[f"{manager}.register_patch"] == (
        "(orig_func_name, new_func=None, force_patch=False, create_dummy=False)"
    )
    assert signatures[f"{manager}.remove_wrappers"] == "(orig_func_name, wrappers_name, remove_check=True)"
    assert signatures["features_manager.feature.MindSpeedFeature"] == "(feature_name, optimization_level=2)"
    assert signatures["features_manager.feature.MindSpeedFeature.register_patches"] == "(self, patch_manager, args)"


def test_defaults_do_not_read_the_command_line(patched):
    facts = patched["arguments"]
    assert facts["unset_before"]
    assert facts["defaults_are_not_kept"]
    assert facts["defaults"]["optimization_level"] == 2
    assert facts["defaults"]["context_parallel_algo"] == "megatron_cp_algo"
    assert facts["defaults"]["attention_mask_type"] == "causal"
    assert facts["defaults"]["optimizer_selection"] == "fused_adamw"
    assert "use_flash_attn" not in facts["defaults"]  # so it has to be seeded
    assert "context_parallel_size" not in facts["defaults"]


def test_unseeded_arguments_come_from_the_command_line(patched):
    facts = patched["arguments"]
    assert facts["kept_after_parsing"]
    assert facts["full_args_are_the_kept"]
    assert facts["foreign_options"] == {
        "hidden_dropout": "0.5",  # a string, which would become the model's dropout
        "some_switch": True,
        "a_list": ["x", "y"],
        "equals": "7",
    }
    assert facts["exit_of_help"] == 0
    assert facts["exit_of_bad_level"] == 2


def test_seeding_avoids_the_command_line(patched):
    assert patched["seeding"] == {"kept": True, "command_line_untouched": True}


def test_patch_reaches_every_module_and_is_undone(patched):
    facts = patched["patch_manager"]
    assert facts["not_before_apply"] == "original"
    assert facts["stacked"] == "outer(inner(replacement))"
    assert facts["also_elsewhere"]
    assert facts["restored"]
    assert facts["forced"] == "original"
    assert facts["second_replacement"].startswith("RuntimeError")
    assert facts["unknown_name"].startswith("ValueError")
    assert facts["unknown_wrapper"].startswith("RuntimeError")
    assert facts["table_attributes"] == ["orig_func", "patch_func", "wrappers", "is_applied"]


def test_missing_modules_are_created_only_on_demand(patched):
    facts = patched["patch_manager"]
    assert facts["dummy"].startswith("RuntimeError")
    assert facts["dummy_spec_has_no_loader"]
    assert facts["absent"] == "ModuleNotFoundError"


def test_module_scan_can_skip_lazy_modules(patched):
    assert patched["lazy_modules_hook"]


def test_import_replaces_root_logging(patched):
    assert patched["root_logging"] == {"our_handler_is_gone": True, "handlers": ["StreamHandler"], "level": "INFO"}


def test_import_changes_outside_megatron(patched):
    facts = patched["process"]
    assert facts["transformer_engine_version"] == "2.2.0"
    assert set(facts["dummies_have_no_loader"].values()) == {True}
    assert facts["compile_passes_through"]
    assert facts["type_of_device_tensor"] == "torch.cuda.FloatTensor"
    assert facts["view_of_transposed"] == [0, 3, 1, 4, 2, 5]
    assert facts["capability"] == [9, 0]
    # Without the parameter, dist.broadcast of torch 2.13 fails: megascend repairs it on stack 0.15.
    assert facts["capability_parameters"] == (["device"] if IS_0_16 else [])


def test_all_reduce_of_float64_loses_its_result(patched):
    facts = patched["process"]["all_reduce"]
    assert facts["wrappers"] == ["torch_all_reduce_double_dtype_bypass_wrapper"]
    assert facts["results"] == {"torch.float32": 1.0, "torch.float64": 0.0}
    assert facts["reduced_as"] == ["torch.float32", "torch.float32"]


def test_patches_are_complete_if_imported_first(patched):
    assert set(patched["flags"].values()) == {True}
    owners = patched["owners"]
    native = [name for name, owner in owners.items() if owner != "mindspeed"]
    expected = {f"megatron.core.tensor_parallel.layers.{kind}ParallelLinear" for kind in ("Column", "Row")}
    expected |= {f"megatron.core.parallel_state.{verb}_model_parallel" for verb in ("initialize", "destroy")}
    if not IS_0_16:
        expected |= {f"{TE}.TEColumnParallelLinear", f"{TE}.TERowParallelLinear"}
    assert set(native) == expected
    assert patched["owners_at_the_end"] == owners


def test_late_import_misses_optimizer_and_fusers(reports):
    facts = reports["late"]
    assert set(facts["flags"].values()) == {False}
    assert facts["owners"]["megatron.core.jit.jit_fuser"] == "torch"
    assert facts["owners"]["megatron.core.optimizer.Adam"] == "torch"
    assert facts["owners"]["megatron.core.optimizer.clip_grads.l2_norm_impl"] == "megatron"
    # The most obvious place to check gives no hint:
    assert facts["owners"][f"{TE}.TEDotProductAttention"] == "mindspeed"


def test_runtime_arguments_reach_the_configuration(patched):
    facts = patched["config"]
    assert facts["argument_becomes_field"] == 0.25
    assert facts["argument_wins_over_nothing_given"] == 0.5
    assert facts["other_arguments_become_attributes"] == "seeded"
    assert facts["class_of_its_own"]
    assert facts["name"] == "TransformerConfig"
    assert not facts["pickles"]
    assert not facts["replaces"]


def test_subclassed_configuration_keeps_arguments_of_its_creation(patched):
    facts = patched["config"]
    assert facts["subclass_keeps_its_moment"] == "at subclassing"
    assert facts["subclass_takes_it_as_a_field"]
    assert facts["subclass_argument_becomes_field"] == 0.1  # Megatron's default: the constructor's patch is lost


def test_optimizer_adam_is_adamw(patched):
    facts = patched["optimizer"]
    assert facts["as_torch_adamw"]
    assert facts["state"] == ["exp_avg", "exp_avg_sq"]
    assert facts["step_in_group"] == 3


def test_repatching_leaves_nothing_behind(patched):
    facts = patched["repatch"]
    assert facts["left_by_repeats"] == []
    assert facts["table_grew_by_repeats"] == 0
    assert facts["left_by_going_there_and_back"] == []
    replaced = [f"{TE}.TEDotProductAttention"] if IS_0_16 else []
    assert facts["changed_by_context_parallelism"] == [
        *replaced,
        "megatron.core.parallel_state.initialize_model_parallel",
    ]


def test_arguments_survive_a_repatch_but_not_their_namespace(patched):
    assert patched["repatch"]["arguments_stay"] == 1
    assert patched["repatch"]["arguments_go_with_the_namespace"]


def test_appended_feature_is_part_of_every_repatch(patched):
    facts = patched["repatch"]
    assert facts["feature_name"] == "contract_feature"
    assert facts["own_feature_in_force"] == [True, True]
    assert facts["own_feature_gone"]


def test_attention_class_of_each_algorithm(patched):
    ring = RING_ATTENTION if IS_0_16 else TE_ATTENTION  # 0.15 takes the class that knows no ring
    assert patched["attention"] == {
        "size 1, megatron_cp_algo, level 0": TE_ATTENTION,
        "size 1, megatron_cp_algo, level 2": TE_ATTENTION,
        "size 2, megatron_cp_algo, level 2": ring,
        "size 2, kvallgather_cp_algo, level 2": TE_ATTENTION,
        "size 2, megatron_cp_algo, level 0": f"{TE}.TEDotProductAttention",  # nobody's: building fails
    }


def test_attention_calls_of_the_kernel(patched):
    calls = patched["attention_calls"]
    # keep_prob: no call to train() or eval() changes it
    for call in calls.values():
        assert (call["pre_tockens"], call["next_tockens"], call["keep_prob"], call["heads"]) == (65536, 0, 0.75, 2)
    triangle = {"mask": ["torch.bool", 2048, 2048], "mask_is_a_triangle": True, "sparse_mode": 2}
    assert calls["no mask"].items() >= {**triangle, "layout": "SBH", "shape": [8, 1, 32]}.items()
    assert calls["packed"].items() >= {**triangle, "layout": "TND", "actual_seq_qlen": [0, 5, 8]}.items()
    # A dense mask arrives with the sparse mode of the compressed one: the kernel has to refuse it, and does.
    dense = calls["dense mask"]
    assert (dense["mask_is_the_models"], dense["mask"][1:], dense["sparse_mode"]) == (True, [1, 1, 8, 8], 2)
    assert calls["dense mask, attention_mask_type general"]["sparse_mode"] == 1


def test_ring_groups_exist_if_context_parallelism_was_seeded(reports):
    owners, groups = reports["ring"]["owners"], reports["ring"]["groups"]
    assert owners["megatron.core.parallel_state.initialize_model_parallel"] == "mindspeed"
    assert groups["before"] == "AssertionError"
    assert groups["window"] == groups["group_of_the_window"] == [0]
    assert groups["across_windows"] == [0, 1]
    assert groups["group_is_not_megatrons"]
    assert groups["megatrons_are_destroyed"]


def test_double_agrees_with_the_real_mindspeed(all_reports):
    if "real" not in all_reports:
        pytest.skip("MEGASCEND_MINDSPEED names no checkout of MindSpeed")
    double, real = (dict(flatten(all_reports[kind])) for kind in ("double", "real"))
    lacking = [name for name in real if name not in double]
    # The double declares the arguments that matter, not all.
    assert [name for name in lacking if not name.startswith("patched.arguments.defaults")] == []
    different = {name: (value, real.get(name, "absent")) for name, value in double.items() if real.get(name) != value}
    assert different == {}


def flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return ``a.b.c`` and the value for every leaf of nested dicts."""
    if not isinstance(value, dict) or not value:
        return [(name, value)]
    return [leaf for key, inner in value.items() for leaf in flatten(inner, f"{name}.{key}" if name else key)]
