"""Tests that are nightly for their time alone, and what covers the same code in CI.

Files and tests that are nightly for other reasons carry the marker themselves: docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

NIGHTLY = {
    "apps/rl/test_lost_engines.py": {
        "engines_and_controller_may_start_later_end_and_come_back": "run without any engine waits; engine that joins later",
        "run_goes_on_without_an_engine_that_hangs[generate]": "an engine that reports its version and takes no weights",
        "run_goes_on_without_an_engine_that_reports_its_version_and_takes_no_weights[commit": "begin_update, verify",
    },
    "apps/rl/test_teacher.py": {
        "student_learns_a_teacher_without_rewards[policy]": "reverse_kl; a step of each loss on recorded rollouts",
    },
    "apps/train/test_teacher_model.py": {
        "gradients_of_transformers_engines_are_those_of_plain_float64[fsdp]": "single",
    },
    "apps/train/test_token_budget.py": {
        "budget_leaves_room_for_a_teachers_distributions": "models/memory/test_teacher_estimate.py; the choice of a budget",
        "budget_fills_the_memory_and_is_kept_on_resume": "models/memory/test_measured_peaks.py; the choice of a budget",
    },
    "runtime/bootstrap/test_after_import.py": {
        "plain_megatron_program_reduces_non_contiguous_tensors": "reported modules and functions: test_runtime.py",
    },
    "runtime/bootstrap/test_import_order.py": {
        "other_modules_can_precede_the_bootstrap[megascend.engines.step.step]": "megascend.backend, which imports it",
    },
    "runtime/bootstrap/test_import_structure.py": {
        "model_files_are_read_once_and_names_unchanged": "every test that imports megascend",
    },
    "runtime/bootstrap/test_providers.py": {
        "provider_is_loaded_by_import_path": "external provider is called in order",
    },
    "runtime/bootstrap/test_runtime.py": {
        "installed_stub_modules_are_reported": "reported modules and functions are installed",
        "user_settings_win_and_are_not_reported": "the environment changes only as reported",
        "transformers_and_peft_can_precede_the_bootstrap[transformers, peft, torch.distributed]": "test_import_order.py",
    },
    "training/checkpoint/test_asynchronous.py": {
        "exception_in_the_block_does_not_wait_forever[one rank]": "on all ranks",
        "checkpoint_with_hf_contains_the_exported_model": "training/checkpoint/test_corruption.py: every damage, kind hf",
    },
    "training/checkpoint/test_corruption.py": {
        "checkpoint_of_a_model_with_other_parameters_is_refused[False]": "True",
        "every_damaged_file_is_refused_and_changes_nothing[full]": "the same files and a model in kind hf",
        "previous_checkpoint_is_loaded_and_logged[full]": "kind adapters, which has more files",
    },
    "training/checkpoint/test_killed_while_saving.py": {
        "rank_stopped_while_writing_is_reported_in_time[for it]": "reliability/test_hang_and_death.py",
        "rank_stopped_while_writing_is_reported_in_time[in the next save]": "for it",
        "every_kill_point_of_an_overwrite_leaves_a_checkpoint[exchange]": "no exchange; every point of a series",
    },
    "training/checkpoint/test_save_and_load.py": {
        "same_layout_resumes_bit_for_bit[single-True]": "reliability/test_resume.py: single",
        "checkpoint_before_the_first_step_resumes_bit_for_bit[False]": "True",
        "other_layout_resumes_from_the_same_numbers": "training/checkpoint/test_resharding.py",
        "main_parameters_are_saved[bf16]": "fp16; upstream's reader in bf16",
        "same_layout_resumes_bit_for_bit[EP2-False]": "EP2-True, DP2-False",
        "same_layout_resumes_bit_for_bit[PP2-True]": "PP2 x VPP2",
    },
    "training/checkpoint/test_upstream_reader.py": {
        "asynchronous_checkpoint_has_the_state_of_the_save_call[plain-bf16]": "distributed",
    },
    "apps/cli/test_cli_doctor.py": {
        "doctor_on_this_machine": "what it reports of simulated machines, in the same file",
    },
    "apps/cli/test_cli_generate.py": {
        "answers_equal_those_of_transformers_on_every_engine[single]": "TP2",
    },
    "apps/cli/test_cli_init.py": {
        "run_file_trains_to_the_end_as_it_stands[classification-3]": "test_cli_train_classification.py",
    },
    "apps/cli/test_cli_launch.py": {
        "unexpected_exception_keeps_its_traceback": "killed worker is named; root cause",
        "root_cause_wins_over_its_consequences": "killed worker is named",
        "launch_returns_the_result_of_rank_0": "two processes of a plug-in's engine: engines/test_registered_engine.py",
    },
    "apps/cli/test_cli_new_model.py": {
        "plain_transformers_loads_every_architecture": "the command; every tiny model is used by parity",
    },
    "apps/cli/test_cli_results.py": {
        "incomplete_export_is_refused_before_the_first_step": "engines/test_layouts_of_files.py",
    },
    "apps/cli/test_cli_resume.py": {
        "ctrl_c_once_on_one_process": "test_cli_signals.py: a signal saves and stops",
    },
    "apps/cli/test_cli_rl.py": {
        "example_learns_and_resumes": "apps/rl/test_loop.py",
    },
    "apps/cli/test_cli_serve.py": {
        "server_survives_lost_output_and_stops_cleanly[1]": "[15]",
    },
    "apps/cli/test_cli_signals.py": {
        "signal_saves_and_stops_even_if_output_is_lost[SIGUSR1, full disk]": "SIGHUP; a run with a full disk finishes",
        "signal_saves_and_stops_even_if_output_is_lost[SIGXCPU, kept]": "SIGHUP with a closed terminal",
    },
    "apps/cli/test_cli_template.py": {
        f"run_keeps_its_date_and_exports_its_template[{kind}]": "models/checkpoint_files/test_files.py: beside an adapter"
        for kind in ("single", "single, lora", "fsdp", "megatron", "megatron, lora")
    },
    "apps/cli/test_cli_train.py": {
        "two_processes_learn_the_same": "a cookbook script on two ranks; one process in the same file",
    },
    "apps/cli/test_cli_train_distillation.py": {
        "student_learns_the_teachers_distributions[megatron]": "a teacher beside the student; step/test_distillation.py",
    },
    "apps/cli/test_cli_train_losses.py": {
        "kto_equals_its_formula_with_the_reference_point_of_the_batch[TP2]": "single; step/test_step.py: preference losses",
    },
    "apps/cli/test_cli_train_reward.py": {
        "reward_model_trains_and_scores_as_transformers[TP2]": "the adapter with its head; engines/test_scalar_head.py",
    },
    "runtime/distributed/test_objects.py": {
        "missing_rank_is_reported_with_the_call": "ranks that do not come are named",
    },
    "runtime/distributed/test_process_groups.py": {
        "lost_rank_is_named_where_frames_are_relayed": "reliability/test_hang_and_death.py; relayed frames in the same file",
    },
    "engines/fsdp/test_fsdp.py": {
        "policy_and_preference_losses_equal_hugging_faces": "engines/step/test_loss_in_every_layout.py; engine single",
    },
    "engines/fsdp/test_fsdp_adapters.py": {
        "dropout_is_drawn_alike_in_every_layout_and_on_the_megatron_engine": "fused layers draw one mask: test_adapter_layers.py",
    },
    "engines/fsdp/test_fsdp_experts.py": {
        "gradients_of_divided_experts_count_once": "divided experts equal Hugging Face's, norms too; NaN: test_fsdp.py",
        "the_auxiliary_loss_is_hugging_faces_in_every_layout": "engines/fsdp/test_single.py: the router loss",
    },
    "engines/fsdp/test_linear_attention.py": {
        "samples_of_a_micro_batch_do_not_see_each_other[qwen3_5_moe_text]": "qwen3_next",
        "samples_of_a_micro_batch_do_not_see_each_other[qwen3_5_text]": "qwen3_next",
        "training_and_export_equal_transformers_without_packing[qwen3_5_moe_text]": "qwen3_next",
        "training_and_export_equal_transformers_without_packing[qwen3_5_text]": "qwen3_next",
    },
    "engines/fsdp/test_speed.py": {
        "compiled_layers_compute_the_same": "eager layers; compiled ones are nightly only",
    },
    "engines/megatron/test_export.py": {
        "a_merged_adapter_is_exported_under_the_sources_names": "named weights: a merged adapter; cli/test_cli_train_lora.py",
        "an_export_without_training_is_the_checkpoint_bit_for_bit[GLM-4.5, EP2]": "MoE EP2, and the other architectures",
        "an_export_without_training_is_the_checkpoint_bit_for_bit[dots1, PP2]": "TP2 x PP2, and the other architectures",
        "exported_models_give_the_same_logits_in_transformers[GLM-4 (fused gate and up), TP2]": "named weights",
        "exported_models_give_the_same_logits_in_transformers[QKV bias, TP2]": "tied, TP2; parity: TP2 + SP Qwen2 (QKV bias)",
        "exported_models_give_the_same_logits_in_transformers[odd vocabulary, TP2]": "named weights: TP2 x PP2, odd vocabulary",
        "exported_models_give_the_same_logits_in_transformers[tied, PP2]": "tied, TP2; TP2 x PP2",
        "heads_for_multi_token_prediction_are_carried_over[fp16]": "bf16",
        "layouts_of_one_process_export_after_each_other[own default group]": "the trainer's default group",
        "the_dtype_of_training_is_kept[fp16-dtype1]": "bf16",
    },
    "engines/megatron/test_graphed_steps.py": {
        "one_adapter_is_replayed_operation_by_operation": "a model, operation by operation; a life of adapters of experts",
        "a_life_of_a_model_is_the_same[1-": "[2-True]",
        "a_life_of_a_model_is_the_same[2-False]": "[2-True]",
        "a_life_of_adapters_is_the_same[1]": "adapters of experts",
        "a_life_of_adapters_is_the_same[2]": "one process; nothing that is captured is communicated",
    },
    "engines/megatron/test_grouped_experts.py": {
        "tenants_equal_pefts[EP2-2]": "trajectories of TP2 x EP2 + SP; lora/test_parity_with_peft.py: experts",
    },
    "engines/megatron/test_model_settings.py": {
        "honoured_as_in_hugging_face[decoder_sparse_step: 2, PP2]": "on one process; mlp_only_layers, TP2 + SP",
        "honoured_as_in_hugging_face[recompute shared_experts]": "recompute moe",
    },
    "engines/megatron/test_named_weights.py": {
        "merged_adapter_matches_peft[qwen2-parallel1]": "qwen3",
        "stalled_reader_is_named_in_time": "weightwire/test_processes.py",
        "peak_memory_is_one_layer_on_receivers_and_one_shard_elsewhere[EP2": "PP2",
        "peak_memory_is_one_layer_on_receivers_and_one_shard_elsewhere[TP2": "PP2",
        "the_stream_is_the_checkpoint_bit_for_bit[MoE TP2 x EP2, ETP1]": "ETP2",
    },
    "engines/megatron/test_registered_architecture.py": {
        "the_self_check_compares_it_and_its_export_has_its_names": "it trains as in Hugging Face; selfcheck/test_check.py",
    },
    "engines/megatron/test_routers.py": {
        "a_skipped_step_and_one_at_lr_0_change_nothing[dots1]": "glm4_moe",
        "both_losses_are_the_references_in_every_layout[CP2]": "EP2; TP2 + SP",
        "both_losses_are_the_references_in_every_layout[DP2]": "EP2, CP2",
        "both_losses_are_the_references_in_every_layout[single]": "EP2, CP2; fp16 on one process",
        "dummy_batches_count_nowhere[megatron]": "the formula of transformers",
        "aux_loss_with_pipelines_and_recomputation[selective": "PP2 x VPP2, full recompute",
        "the_bias_moves_by_the_load_of_all_ranks_real_tokens[PP2]": "EP2; TP2 + SP",
    },
    "engines/fsdp/test_single.py": {
        "adapters_equal_pefts_and_move_between_engines[qwen3]": "qwen3_moe",
        "more_than_one_process_is_refused": "a refusal without layout or communication",
    },
    "engines/test_optimizer_layouts.py": {
        "muon_in_bf16_is_close_to_the_plain_computation[FSDP2]": "DP2, single; FSDP2 in fp32",
        "muon_resumes_bit_for_bit[DP2]": "TP2, EP2; 8-bit moments of DP2",
        "muon_resumes_in_another_layout_or_engine[TP2-DP2]": "TP2-FSDP2, DP2-PP2",
        "patterns_without_a_weight_raise_config_error[FSDP2]": "single; EP2, PP2",
        "training_matches_the_plain_computation[EP2-groups]": "EP2-muon; TP2-groups, PP2-groups",
        "training_matches_the_plain_computation[FSDP2-groups]": "FSDP2-muon; TP2-groups, PP2-groups",
        "training_matches_the_plain_computation[TP2 x DP2-muon, original, with groups]": "the same settings on PP2",
        "muon_resumes_bit_for_bit[FSDP2]": "8-bit moments of FSDP2; Muon in other layouts",
        "muon_resumes_in_another_layout_or_engine[FSDP2 of experts-EP2]": "TP2-FSDP2",
        "training_matches_the_plain_computation[FSDP2 x EP2-muon, original, with groups]": "the same settings in other layouts",
    },
    "engines/test_registered_engine.py": {
        "a_run_file_names_its_plug_in_and_the_engine": "the same engine through the backend, in the same file",
    },
    "engines/test_scalar_head.py": {
        "token_classifier_dropout_acts_only_in_training": "training equals transformers, without dropout",
    },
    "integrations/test_megatron_start.py": {
        "the_page_runs_as_it_is_written": "runtime/bootstrap/test_training_device.py",
    },
    "training/lora/test_adapter_failures.py": {
        "tenants_are_isolated_with_shared_experts[EP2]": "ETP2",
        "failures_of_one_tenant_do_not_change_another[DP2]": "TP2 + SP",
        "failures_of_one_tenant_do_not_change_another[single]": "TP2 + SP",
    },
    "training/lora/test_adapter_io.py": {
        "files_of_one_layout_are_those_of_every_other[dense-layouts0]": "odd shapes",
        "two_tenants_resume_bit_for_bit[DP2-fp16]": "DP2 in fp32; TP2 + SP in fp16",
        "two_tenants_resume_bit_for_bit[TP2 + SP-fp32]": "DP2 in fp32; TP2 + SP in fp16",
    },
    "training/lora/test_backend_adapters.py": {
        "a_fresh_adapter_changes_nothing_and_the_reference_never_changes[qwen3-": "qwen3_moe",
        "dropout_does_not_depend_on_the_layout[DP2]": "CP2; TP2 + SP",
        "dropout_does_not_depend_on_the_layout[PP2]": "CP2; TP2 + SP",
        "dropout_does_not_depend_on_the_layout[TP2]": "TP2 + SP",
        "metrics_of_a_tenant_equal_a_separate_run[CP2]": "TP2 + SP",
        "metrics_of_a_tenant_equal_a_separate_run[DP2]": "TP2 + SP",
        "targets_on_some_pipeline_stages_only[all-linear-targets1]": "targets2, and a limit of the backend",
        "targets_on_some_pipeline_stages_only[limits3-targets3]": "targets2, limits0",
        "targets_on_some_pipeline_stages_only[limits4-targets4]": "targets2, limits0",
        "tenants_on_one_data_parallel_rank_only[qwen3]": "qwen3_moe",
    },
    "training/lora/test_isolation.py": {
        "mixed_training_equals_separate_training[CP2-4]": "embedding and head on TP2 + SP, experts on EP2, PP2",
        "mixed_training_equals_separate_training[TP2 + SP-4]": "embedding and head on TP2 + SP",
    },
    "training/lora/test_parity_with_peft.py": {
        "trajectory_equals_peft[CP2 packed]": "embedding and head, CP2 packed",
        "trajectory_equals_peft[MoE TP2 + SP (ETP2)]": "MoE TP2 x EP2, ETP2",
        "trajectory_equals_peft[MoE TP2 x EP2 + SP]": "MoE TP2 x EP2, ETP2; npu/test_lora.py",
        "trajectory_equals_peft[MoE, full recompute]": "CP2, full recompute; MoE TP2 x EP2, ETP2",
        "trajectory_equals_peft[TP2 + SP]": "TP2 + SP, padded",
        "trajectory_equals_peft[TP2 x PP2]": "TP2 + SP, padded; PP2 x VPP2",
        "trajectory_equals_peft[embedding and head, PP2]": "embedding and head: TP2, DP2, CP2",
    },
    "training/lora/test_quantised_base.py": {
        "trajectory_equals_peft_on_dequantised_weights[TP2 x PP2, nf4]": "EP2, fp8",
    },
    "training/lora/test_target_maps.py": {
        "adapters_of_a_real_model_follow_the_registered_map": "engines/megatron/test_registered_architecture.py: its adapters",
    },
    "models/memory/test_measured_peaks.py": {
        "the_estimate_is_close_to_the_peak[dp2]": "tp2 sequence, moe",
        "the_estimate_is_close_to_the_peak[lora]": "tp2 sequence, moe",
    },
    "models/test_by_name.py": {
        "model_by_name_trains_from_the_loss_of_transformers[gpt_oss]": "deepseek_v3",
        "recipes_train_a_model_by_name_or_refuse_it[gpt_oss]": "deepseek_v3",
    },
    "models/test_checkpoints_of_families.py": {
        "resuming_in_another_layout_equals_uninterrupted_training[gpt_oss": "deepseek_v3; checkpoint/test_resharding.py",
    },
    "models/test_deepseek.py": {
        "norms_of_latents_have_the_epsilon_of_hugging_face[single-deepseek_v2]": "on TP2 + SP; deepseek_v3",
        "norms_of_latents_have_the_epsilon_of_hugging_face[single-glm4_moe_lite]": "deepseek_v3",
        "norms_of_latents_have_the_epsilon_of_hugging_face[TP2 + SP-glm4_moe_lite]": "deepseek_v2, deepseek_v3",
    },
    "models/test_images.py": {
        "checkpoints_continue_on_other_engines[qwen3_vl": "engines/fsdp/test_between_engines.py",
        "engines_of_transformers_train_with_images[fsdp-qwen3_5-train-2]": "single; the frozen tower of qwen3_vl on fsdp",
        "qwen2_5_vl_is_refused_by_name[fsdp]": "megatron: the declaration refuses it before an engine is chosen",
        "qwen2_5_vl_is_refused_by_name[single]": "megatron: the declaration refuses it before an engine is chosen",
    },
    "models/test_mtp.py": {
        "head_trains_like_a_plain_one[glm4_moe_lite-TP2 + SP]": "deepseek_v3-TP2 x EP2 + SP",
        "head_that_is_not_trained_is_copied_or_left_out[fsdp-qwen3_next]": "megatron-deepseek_v3",
    },
    "models/test_nemotron.py": {
        "steps_have_no_limit_without_megatron[fsdp]": "single",
    },
    "models/test_sparse_attention.py": {
        "samples_of_a_batch_do_not_see_each_other_without_megatron[deepseek_v32-fsdp]": "single",
        "samples_of_a_batch_do_not_see_each_other_without_megatron[glm_moe_dsa-fsdp]": "single",
    },
    "models/test_tower_adapters.py": {
        "adapters_in_the_tower_equal_peft[1-qwen3_5: single]": "two adapters",
        "adapters_in_the_tower_equal_peft[1-qwen3_vl: PP2]": "two adapters",
        "adapters_in_the_tower_equal_peft[1-qwen3_vl: TP2 + SP]": "two adapters",
        "engines_of_transformers_train_adapters_in_the_tower[fsdp-qwen3_vl-1-2]": "single",
    },
    "npu/test_attention_calls.py": {
        "context_parallel_algorithms_never_get_a_dense_mask[all_gather]": "parity: CP2, all_gather",
    },
    "npu/test_bootstrap.py": {
        "wrong_import_order_is_refused_before_patching[mcore_bridge with an": "without Transformer Engine",
        "wrong_import_order_is_refused_before_patching[megatron.core, through": "megatron.core",
    },
    "npu/test_configurations.py": {
        "dropout_is_refused_with_all_gather_only[ring]": "all_gather; npu/test_dropout.py",
        "ten_repatches_leave_no_trace": "configurations follow each other; npu/test_contract.py: repatching",
    },
    "npu/test_cookbook_ascend.py": {
        "recipe_learns_on_two_forked_ranks[tp_moe_npu]": "tp_moe_cp_npu",
        "recipe_learns_on_two_forked_ranks[tp_npu]": "tp_moe_cp_npu",
        "run_that_does_not_learn_fails_with_a_reason": "what is wrong by losses and norms",
    },
    "npu/test_fsdp.py": {
        "attention_equals_the_formula": "trajectories in the same file",
    },
    "npu/test_lora.py": {
        "one_adapter_equals_peft[single]": "two adapters on TP2 + SP",
    },
    "npu/test_objects.py": {
        "other_ranks_raise_in_time_and_name_the_missing_one[stopped]": "killed, missing; reliability/test_hang_and_death.py",
    },
    "npu/test_parity.py": {
        "trajectory_equals_hugging_face[MoE EP2]": "MoE TP2 x EP2 + SP",
        "trajectory_equals_hugging_face[PP2]": "TP2 x PP2",
        "trajectory_equals_hugging_face[TP2 + SP]": "MoE TP2 x EP2 + SP",
    },
    "npu/test_traps_models.py": {
        "sequences_are_padded_to_twice_the_context_parallel_size[all_gather]": "ring",
    },
    "reference/te/test_names.py": {
        "lora_of_peft_on_the_layers": "training/lora/test_parity_with_peft.py",
    },
    "reference/te/test_reference_install.py": {
        "a_real_transformer_engine_with_cuda_is_not_replaced": "where it is installed: tests/gpu",
    },
    "reliability/test_disk.py": {
        "run_stopped_on_a_full_disk_raises_checkpoint_error": "a run that goes on without checkpoints",
    },
    "reliability/test_hang_and_death.py": {
        "rank_lost_in_grad_reduce_is_named[stop]": "die; forward: TP2-stop",
        "rank_lost_in_forward_is_named[DP2-die-1]": "TP2-stop; die at start-up and in a save",
        "rank_lost_in_forward_is_named[PP2-hang-0]": "TP2-stop",
        "rank_lost_in_forward_is_named[TP2-hang-1]": "TP2-stop",
        "rank_lost_in_grad_reduce_is_named[hang]": "die; object_gather-hang; a rank that skips a reduction",
        "rank_lost_in_object_gather_is_named[stop]": "hang",
        "rank_lost_in_save_is_named[save-hang]": "save-die; object_gather-hang",
        "rank_lost_in_save_is_named[save-stop]": "a rank that stops while it writes",
        "rank_lost_in_save_is_named[write-die]": "save-die; a rank that stops while it writes",
        "rank_lost_in_save_is_named[write-hang]": "object_gather-hang; a rank that stops while it writes",
        "rank_lost_at_start_up_is_named[hang]": "die",
        "rank_lost_at_start_up_is_named[stop]": "die",
    },
    "reliability/test_kills.py": {
        "killed_rank_of_several_ends_the_run_by_name_and_changes_nothing_that_is_learned": "killed processes",
    },
    "reliability/test_resume.py": {
        "killed_run_resumes_bit_for_bit[MoE EP2-0]": "single; checkpoint/test_save_and_load.py: EP2",
        "killed_run_resumes_bit_for_bit[DP2-0]": "single; checkpoint/test_save_and_load.py",
        "killed_run_resumes_bit_for_bit[PP2-0]": "single; checkpoint/test_save_and_load.py",
        "killed_run_resumes_bit_for_bit[TP2-0]": "single; checkpoint/test_save_and_load.py",
    },
    "reliability/test_under_torchrun.py": {
        "rank_deaths_before_and_after_a_restart_are_reported": "test_hang_and_death.py; cli/test_cli_launch.py",
    },
    "apps/rl/rollout/controller/test_controller_hostile.py": {
        "random_http_requests_are_refused": "chosen requests in the same file",
    },
    "apps/rl/rollout/engines/test_guarded.py": {
        "nothing_is_left_when_the_trainer_is_killed[trainer and server-alone]": "trainer and server-forks",
        "nothing_is_left_when_the_trainer_is_killed[trainer-alone]": "trainer and server-forks",
        "nothing_is_left_when_the_trainer_is_killed[trainer-forks]": "trainer and server-forks",
    },
    "apps/sampling/test_recurrent_cache.py": {
        "responses_of_engines_without_megatron_equal_transformers_generate[fsdp, padded]": "fsdp; single",
    },
    "models/selfcheck/test_check.py": {
        "backend_starts_early_worker_only_without_cache": "early worker checks and next run starts none",
    },
    "models/selfcheck/test_findings.py": {
        "ignored_settings_are_named": "models/selfcheck/test_check.py: a difference raises an error",
        "random_shapes_of_proven_architectures_agree[one each]": "unbuildable models do not agree and honoured settings do",
    },
    "apps/serve/test_serve_flat.py": {
        "lives_that_are_over_leave_nothing_behind[False]": "[True]",
    },
    "apps/serve/test_serve_memory.py": {
        "request_out_of_memory_on_one_rank_fails_alone[DP2]": "TP2",
        "request_out_of_memory_on_one_rank_fails_alone[one rank]": "TP2",
    },
    "apps/serve/test_serve_vllm_failures.py": {
        "one_that_is_still_ill_when_its_time_is_over": "another server answers",
    },
    "engines/step/test_distillation.py": {
        "gradients_of_all_parameters_are_those_of_plain_float64[DP2]": "TP2 + SP; CP2; step/test_step.py: DP2",
        "engines_of_transformers_have_the_same_gradients[fsdp]": "single",
    },
    "engines/step/test_loss_in_every_layout.py": {
        "a_function_that_raises_on_one_rank_ends_the_step_on_all[CP2]": "TP2 + SP",
        "a_function_that_raises_on_one_rank_ends_the_step_on_all[DP2]": "TP2 + SP, CP2",
        "a_function_that_raises_on_one_rank_ends_the_step_on_all[PP2]": "TP2 + SP, CP2",
        "a_loss_that_is_infinite_at_tokens_of_weight_0_trains[DP2, padded]": "CP2, TP2 + SP, single",
        "a_ratio_that_overflows_at_tokens_of_weight_0_is_nobodys_business[ppo": "importance sampling",
        "an_entropy_bonus_that_is_infinite_at_tokens_of_weight_0_trains[DP2, padded]": "single, padded; TP2 + SP",
        "padding_adds_nothing_to_sums_over_samples[DP2, padded]": "CP2, PP2, TP2 + SP",
        "sums_policy_losses_and_log_probabilities_equal_hugging_faces[CP2]": "parity: CP2; TP2 + SP",
        "sums_policy_losses_and_log_probabilities_equal_hugging_faces[PP2]": "single; TP2 + SP",
    },
    "engines/step/test_router_replay.py": {
        "engines_without_megatron_replay_too[qwen3_moe-fsdp]": "single",
    },
    "engines/step/test_step.py": {
        "policy_and_preference_losses_equal_the_papers_formulas[orpo-CP2]": "single; dpo-CP2",
        "policy_and_preference_losses_equal_the_papers_formulas[orpo-TP2 + SP]": "single; dpo-TP2 + SP",
        "policy_and_preference_losses_equal_the_papers_formulas[simpo-CP2]": "single; dpo-CP2",
        "policy_and_preference_losses_equal_the_papers_formulas[simpo-TP2 + SP]": "single; dpo-TP2 + SP",
        "a_rank_without_samples_joins_the_others_collectives[qwen3]": "qwen3_moe",
        "a_step_with_nan_on_one_rank_is_skipped_by_all[False": "with the distributed optimizer",
        "policy_and_preference_losses_equal_the_papers_formulas[ppo": "the two others; engines/fsdp/test_single.py",
    },
    "testing/test_distributed.py": {
        "rank_stuck_in_a_collective_is_reported_with_its_stack": "hanging ranks are named with their stacks",
    },
    "testing/test_reference.py": {
        "modules_are_imported_for_one_program_only": "every program of a reference",
    },
    "sync/test_push.py": {
        "a_silent_engine": "an engine that does not come",
        "an_engine_killed_during_the_transfer[PP2]": "TP2",
        "engines_get_the_checkpoint_bit_for_bit[TP2]": "DP2 x TP2",
    },
    "sync/test_sharded_push.py": {
        "workers_get_their_slices_of_the_export[DP2 x TP2-bf16]": "in fp32; TP2 in bf16",
        "workers_get_their_slices_of_the_export[MoE EP2-bf16]": "in fp32; EP2 of latent attention in bf16",
        "workers_get_their_slices_of_the_export[PP2, tied-bf16]": "in fp32; TP2 in bf16",
        "workers_get_their_slices_of_the_export[latent attention, expert biases, TP2-bf16]": "in fp32; EP2 in bf16",
        "a_silent_engine_is_named": "a missing engine; an engine killed during the transfer",
    },
    "weightwire/test_group.py": {
        "missing_member_is_named_by_all[1]": "[0]",
    },
    "weightwire/test_plan.py": {
        "64_ranks_to_8_engines_in_fp8_blocks": "in bf16; experts in blocks arrive once with their scales",
        "64_ranks_to_8_engines_of_published_models[Qwen3-235B-A22B-tp]": "DeepSeek-V3-tp",
    },
    "weightwire/test_sharded.py": {
        "an_exchange_follows_no_transfer_that_was_cut_at_any_message[None]": "[1]: by changes",
    },
    "test_bad_input.py": {
        "rank_that_stops_between_steps_is_named_within_timeout": "reliability/test_hang_and_death.py",
    },
    "scripts/test_bench_suite.py": {
        "save_line_produces_its_rows": "a line that fails; rows of stored figures",
    },
    "test_cookbook.py": {
        "cookbook_script_learns[CP2]": "experts on EP2; npu/test_cookbook_ascend.py: tp_moe_cp_npu",
        "cookbook_script_learns[PP2]": "experts on EP2; PP2 in parity",
        "moe_scripts_learn_and_resume_on_two_ranks[MoE FSDP2]": "MoE EP2; engines/fsdp/test_fsdp_experts.py",
        "multi_lora_fails_after_too_few_steps": "npu/test_cookbook_ascend.py: multi_lora_npu",
    },
    "test_docs.py": {
        "examples_in_testing_page_run": "test_snippets.py; the tests themselves",
    },
    "test_environments_page.py": {
        "commands_of_the_page_work_with_few_steps": "test_snippets.py; app/rl/test_loop.py; cli/test_cli_rollouts.py",
    },
    "test_own_data.py": {
        "own_data_page_commands_work[few steps]": "test_readme.py; cli/test_cli_train.py",
        "own_data_page_commands_work[whole]": "the same commands with fewer steps",
    },
    "test_readme.py": {
        "single_process_program_runs": "engines/fsdp/test_single.py",
        "lora_program_runs": "training/lora/test_backend_adapters.py, lora/test_peft_format.py",
    },
    "test_sessions_page.py": {
        "pretraining_session_continues_a_text": "apps/cli/test_cli_init.py: the same task to its end; test_snippets.py",
    },
}
"""By file below tests: beginnings of tests' names, without ``test_``, and what covers them."""


def mark(items: list[pytest.Item], whole_files: bool) -> None:
    """Add the nightly marker to the tests of :data:`NIGHTLY`."""
    mark_named(items, NIGHTLY, pytest.mark.nightly, whole_files)


def mark_named(
    items: list[pytest.Item],
    table: Mapping[str, Collection[str]],
    marker: pytest.MarkDecorator,
    whole_files: bool,
) -> None:
    """Add a marker to the tests of a table: by file below tests, beginnings of tests' names, without ``test_``.

    Args:
        whole_files: no single test was selected.

    Raises:
        pytest.UsageError: an entry matches no test of a collected file.
    """
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    dead = set()
    for file, starts in table.items():
        file_items = by_file.get(f"tests/{file}", [])
        for start in starts:
            matches = [item for item in file_items if item.name.startswith(f"test_{start}")]
            for item in matches:
                item.add_marker(marker)
            if file_items and not matches:
                dead.add(f"{file}: {start}")
    if whole_files and dead:
        raise pytest.UsageError(f"tests named as {marker.name} do not exist: {', '.join(sorted(dead))}")
