"""The settings of a run file."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megascend.config import RunConfig, Validation, load_config
from megascend.errors import ConfigError

RUN_FILE = "model: m\noutput: o\ndata: {path: d.jsonl}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE + text, encoding="utf-8")
    return load_config(path, list(overrides))


def test_providers_and_their_options_are_settings(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(tmp_path, "provider: mindspeed\nprovider_options: {speed: 3}\n", "provider_options.name=fast")
    assert (config.provider, config.provider_options) == ("mindspeed", {"speed": 3, "name": "fast"})


def test_an_override_takes_the_place_of_the_files_alternative(tmp_path):
    assert load(tmp_path, "epochs: 3\n", "steps=50").epochs is None
    assert load(tmp_path, "steps: 30\n", "epochs=2").steps == 0
    validation = load(tmp_path, "validation: {path: v, every: 7}\n", "validation.fraction=0.1").validation
    assert validation == Validation(fraction=0.1, every=7)


def test_off_needs_no_quotes_and_other_words_that_yaml_reads_as_booleans_do(tmp_path: Path) -> None:
    assert load(tmp_path, "batching: {share_prefixes: off}\n").batching.share_prefixes == "off"
    assert load(tmp_path, "", "batching.share_prefixes=off").batching.share_prefixes == "off"
    with pytest.raises(ConfigError, match="share_prefixes: a number is expected"):
        load(tmp_path, "batching: {share_prefixes: on}\n")
    with pytest.raises(ConfigError, match=r"prompts\.1: text is expected here \(got False\): quote"):
        load(tmp_path, "generation: {prompts: ['yes', no], max_tokens: 3}\n")


def test_tasks_need_no_held_out_samples_and_have_an_interval(tmp_path: Path) -> None:
    validation = load(tmp_path, "validation: {tasks: {names: [t]}, every: 7, metric: t/acc, patience: 2}\n").validation
    assert validation is not None
    assert (validation.holds_out, validation.tasks_interval) == (False, 7)
    validation = load(tmp_path, "validation: {fraction: 0.1, tasks: {names: [t], interval: 50}, every: 7}\n").validation
    assert validation is not None
    assert (validation.holds_out, validation.tasks_interval) == (True, 50)


def test_schedule_ends_with_the_run_and_excess_steps_are_reported(tmp_path):
    cosine = "schedule: {kind: cosine, warmup_steps: 5, total_steps: 100}\n"
    assert load(tmp_path, cosine, "steps=50").for_samples(8).schedule_remarks() == []
    # 0.07 * 800 / 8 is 7.000000000000001 in binary fractions.
    assert [load(tmp_path, "", f"epochs={share}").for_samples(800).steps for share in ("0.07", "0.0701", "3")] == [
        7,
        8,
        300,
    ]
    thrice = load(tmp_path, "", "epochs=3")
    assert thrice.for_samples(800).last_step(800) is None
    text = "epochs: 3 over 60 samples are 23 steps of 8; the last one takes 4 from a further pass"
    assert thrice.for_samples(60).last_step(60) == text
    [remark] = load(tmp_path, cosine, "steps=150").for_samples(8).schedule_remarks()
    assert "steps: 150 goes beyond schedule.total_steps: 100: the last 50 steps have the learning rate" in remark
    without_end = load(tmp_path, "schedule: {kind: cosine, warmup_steps: 5}\n", "steps=150").for_samples(8)
    assert (without_end.schedule.total_steps, without_end.schedule_remarks()) == (150, [])
    [remark] = load(tmp_path, "steps: 5\nschedule: {warmup_steps: 9}\n").for_samples(8).schedule_remarks()
    assert "schedule.warmup_steps: 9 is not less than steps: 5" in remark


UNHELPFUL: dict[str, str] = {
    "trackers=wandb": r"trackers: a list is expected here .*'wandb'\): write trackers: \[wandb\], or --set trackers=\[wandb\]",
    "plugins=mine": r"plugins: a list is expected here \(got 'mine'\): .* --set plugins=\[mine\]",
    "output=": r"output: a value is expected here, and there is none",
    "data={sources: [{path: a.jsonl, weight: 0}]}": r"data\.sources\.0\.weight: Input should be greater than 0",
    "optimizer.lr=": r"optimizer\.lr: a value is expected here, and there is none",
    "batch_size=4": r"batch_size: unknown setting \(value 4\), did you mean data\.global_batch_size",
    "parallel.lr=4": r"parallel\.lr: unknown setting \(value 4\), did you mean optimizer\.lr",
    "engine=fdsp": r"unknown engine 'fdsp', did you mean fsdp\? Known: megatron, single, fsdp",
    "engine=deepspeed": r"unknown engine 'deepspeed'; known: megatron, single, fsdp",
    "lora.targets=q_proj": r"lora\.targets: Input should be 'all-linear' .*; or a list .*: write lora\.targets: \[q_proj\]",
    "lora.targets=[q_proj, 5]": r"run\.yaml: lora\.targets\.1: Input should be a valid string \(got 5\)$",
    "trackers=[{wandb: 5}]": r"run\.yaml: trackers\.0\.wandb: Input should be a valid dictionary \(got 5\)$",
    "lerning_rate=1": r"lerning_rate: unknown setting \(value 1\), did you mean optimizer\.lr",
    "rollout={prompts: p.jsonl}": r"rollout: for megascend rl only",
    "trackers=[wanb]": r"trackers: unknown tracker 'wanb', did you mean wandb\? Known: tensorboard, wandb",
}


@pytest.mark.parametrize("override", UNHELPFUL)
def test_invalid_override_raises_with_the_remedy(override, tmp_path):
    with pytest.raises(ConfigError, match=UNHELPFUL[override]):
        load(tmp_path, "", override)


def test_names_of_plugins_are_left_to_them(tmp_path):
    assert load(tmp_path, "plugins: [json]\n", "engine=mine", "trackers=[ours]").engine == "mine"


def test_names_are_checked_without_importing_packages(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE, encoding="utf-8")
    code = (
        "import sys, megascend.config as c\n"
        "try: c.load_config(sys.argv[1], ['engine=fdsp'])\n"
        "except c.run.ConfigError as e: print(e)\n"
        "print([name for name in ('torch', 'transformers', 'megatron', 'wandb') if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "unknown engine 'fdsp'" in completed.stdout.splitlines()[0]
    assert completed.stdout.splitlines()[1] == "[]"
