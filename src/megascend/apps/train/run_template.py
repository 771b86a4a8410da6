"""Commented run files for a task and a model, with a planned layout and example data, for ``megascend init``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.search import Candidate
from megascend.apps.train.layout_plan import (
    LENGTH,
    default_length,
    model_checkpoint,
    plan_layouts,
    plan_split,
    settings,
)
from megascend.config import RunConfig, TrainerConfig, parsed
from megascend.config.commented import comment, commented_out, commented_settings
from megascend.config.rl import VLLM, RlConfig
from megascend.config.run_file import apply_overrides, full_names
from megascend.errors import ConfigError
from megascend.runtime.io.paths import format_bytes

BATCH = 8
"""Samples of a step, where no cards are named; with cards, at least two for each."""
ADAPTER_LR = 10
"""Factor from the learning rate of all parameters to that of an adapter."""
PAIRED = 10
"""Fastest layouts among which one is sought whose micro batches hold whole pairs."""
LAYOUT = ("parallel", "recompute", "batching", "optimizer")
"""Sections in which a plan sets something."""

CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a + b}."}]}
    for a, b in ((1, 2), (2, 5), (3, 3), (4, 1), (5, 4), (6, 2), (7, 1), (8, 8))
]
PAIRS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"{a + b}.", "rejected": f"I would say about {a + b + 1}, or so."}
    for a, b in ((1, 2), (2, 5), (3, 3), (4, 1), (5, 4), (6, 2), (7, 1), (8, 8))
]
TEXTS = [
    {"text": f"{a} apples and {b} apples are {a + b} apples."}
    for a, b in ((1, 2), (2, 5), (3, 3), (4, 1), (5, 4), (6, 2), (7, 1), (8, 8))
]
LABELLED = [
    {"text": text, "label": label}
    for label, texts in (
        (
            "positive",
            ("I would buy it again.", "Well made, and quick.", "It does all I hoped for.", "A pleasure to use."),
        ),
        (
            "negative",
            ("It broke on day one.", "Slow, and loud.", "I want my money back.", "Nothing works as described."),
        ),
    )
    for text in texts
]
PROMPTS = [
    {"prompt": f"What is {a} + {b}?", "answer": f"{a + b}"}
    for a, b in ((1, 2), (2, 5), (3, 3), (4, 1), (5, 4), (6, 2), (7, 1), (8, 8))
]
REWARD = '''\
"""Rewards of a run of `megascend rl`: change them to what the model should learn."""


def reward(response, example):
    """Return a number, higher is better: 1 for the answer of the prompt's line, less for one with more beside it."""
    if example["answer"] not in response:
        return 0.0
    return len(example["answer"]) / max(len(response.strip()), 1)
'''


@dataclass(frozen=True)
class TaskTemplate:
    """Learning task, with its settings and the format of its data.

    Attributes:
        command: command that takes the run file: ``train`` or ``rl``.
        settings: settings that the run file has beside model, output, data, lengths and layout.
        data: description of the data's lines; ``examples``: some of them.
        suggestions: further settings, which are written as comments.
        unit_samples: samples that a micro batch holds together: 2 of preference pairs, of which a step counts one.
    """

    command: str
    title: str
    data: str
    examples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    suggestions: Mapping[str, Any] = field(default_factory=dict)
    unit_samples: int = 1

    @property
    def kind(self) -> type[TrainerConfig]:
        """Class of the settings."""
        return RlConfig if self.command == "rl" else RunConfig


VALIDATION = {"validation": {"fraction": 0.05, "every": 50}}
TRACKING = {"trackers": ["tensorboard"]}
ANSWERS = {"generation": {"prompts": ["What is 2 + 2?"], "every": 50}}

TASKS: dict[str, TaskTemplate] = {
    "sft": TaskTemplate(
        "train",
        "supervised fine-tuning on conversations",
        "conversations ({messages: [{role, content}, ...]}), or prompts with completions; only answers carry loss",
        CONVERSATIONS,
        {"epochs": 3, "optimizer": {"lr": 1e-5}, "schedule": {"kind": "cosine", "warmup_ratio": 0.03}},
        VALIDATION | ANSWERS | TRACKING,
    ),
    "dpo": TaskTemplate(
        "train",
        "direct preference optimisation",
        "preference pairs: a prompt, or messages, with chosen and rejected",
        PAIRS,
        {
            "dpo": {"beta": 0.1},
            "epochs": 1,
            "optimizer": {"lr": 1e-6},
            "schedule": {"kind": "linear", "warmup_ratio": 0.1},
        },
        VALIDATION | TRACKING,
        unit_samples=2,
    ),
    "reward": TaskTemplate(
        "train",
        "a reward model on preference pairs",
        "preference pairs: a prompt, or messages, with chosen and rejected, and optionally the margin between their rewards",
        PAIRS,
        {
            "bradley_terry": {"center_coefficient": 0.01},
            "epochs": 1,
            "optimizer": {"lr": 1e-5},
            "schedule": {"kind": "linear", "warmup_ratio": 0.1},
        },
        VALIDATION | TRACKING,
        unit_samples=2,
    ),
    "classification": TaskTemplate(
        "train",
        "a sequence classifier on labelled texts",
        "texts ({text: ...}) or conversations ({messages: [...]}) with a label: one of the names under classification.labels, or "
        "its number from 0; with problem_type: multi_label_classification a list of them",
        LABELLED,
        {
            "classification": {"problem_type": "single_label_classification", "labels": ["negative", "positive"]},
            "epochs": 3,
            "optimizer": {"lr": 1e-5},
            "schedule": {"kind": "linear", "warmup_ratio": 0.1},
        },
        VALIDATION | TRACKING,
    ),
    "pretrain": TaskTemplate(
        "train",
        "pre-training, or its continuation, on texts",
        "texts ({text: ...}), of which all tokens carry loss; long ones are split",
        TEXTS,
        {
            "epochs": 1,
            "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "schedule": {"kind": "cosine", "warmup_ratio": 0.01, "min_lr": 1e-5},
        },
        VALIDATION | TRACKING,
    ),
    "rl": TaskTemplate(
        "rl",
        "reinforcement learning on rewards",
        "prompts (a prompt, or messages), with fields for the reward function",
        PROMPTS,
        {"steps": 100, "optimizer": {"lr": 1e-6}, "objective": {"preset": "grpo"}},
        {"evaluation": {"prompts": "held_out.jsonl", "every": 25}} | TRACKING,
    ),
}
"""Tasks by name."""


@dataclass(frozen=True)
class RunFileRequest:
    """Request for a run file.

    Attributes:
        model: checkpoint directory, or the ``config.json`` of a model whose weights are elsewhere.
        data: file or folder with training data; None: example data are written.
        length: longest sample in tokens; None: :data:`LENGTH`, or the model's context.
        batch: samples of a step; None: :data:`BATCH`, or two for each card.
        lora: rank of an adapter; None: all parameters are trained.
        overrides: further settings, ``a.b=value``.
        cards: number of devices that the layout is planned for; 0: none is planned.
    """

    model: Path
    data: Path | None = None
    output: Path | None = None
    length: int | None = None
    batch: int | None = None
    lora: int | None = None
    overrides: Sequence[str] = ()
    cards: int = 0
    hardware: Hardware | None = None


def run_files(name: str, request: RunFileRequest, path: Path) -> dict[Path, str]:
    """Return the run file of a task, checked as its command checks it, and example data where none were named, by path."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    task = TASKS[name]
    examples = {} if request.data is not None else _examples(task, path.parent)
    data = request.data or next(iter(examples))
    if request.model.name == "config.json":  # its weights may be beside it
        request = replace(request, model=request.model.parent)
    remarks: list[str] = []
    with model_checkpoint(request.model) as checkpoint:
        if checkpoint != request.model and request.model.exists():  # a run downloads the weights of a name on the Hub
            remarks.append(
                "Only the model's configuration was there when this was written: model has to have its weights."
            )
        length = request.length or default_length(checkpoint)
        values = _settings(name, task, request, data, length, path.parent)
        overrides = full_names(request.overrides, values, task.kind)
        if request.cards:
            values = _merged(values, _layout(task, request, checkpoint, values, length, overrides, remarks))
    apply_overrides(values, overrides)
    parsed(task.kind, values, path)
    return {path: _text(name, task, request, values, path, remarks)} | examples


def _examples(task: TaskTemplate, folder: Path) -> dict[Path, str]:
    """Return example data, and of ``rl`` a reward function, by path."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in task.examples)
    if task.command == "rl":
        return {folder / "prompts.jsonl": lines, folder / "reward.py": REWARD}
    return {folder / "data.jsonl": lines}


def _settings(
    name: str, task: TaskTemplate, request: RunFileRequest, data: Path, length: int, folder: Path
) -> dict[str, Any]:
    """Return the settings of a run file in their order, without a layout."""
    batch = request.batch or max(BATCH, 2 * request.cards)
    values: dict[str, Any] = {"model": str(request.model), "output": str(request.output or Path("runs") / name)}
    if task.command == "rl":
        group = min(8, batch)
        values["rollout"] = {
            "prompts": str(data),
            "reward": f"{folder / 'reward.py'}:reward",
            "prompts_per_step": max(1, batch // group),
            "group_size": group,
            "max_tokens": max(1, length // 2),  # the other half is left for the prompt
        }
        values["engines"] = ["local"]
    else:
        values["data"] = {"path": str(data), "global_batch_size": batch}
    values |= json.loads(json.dumps(task.settings))  # a copy, which is changed below
    values["batching"] = {"max_length": length, "micro_batch_tokens": max(LENGTH, task.unit_samples * length)}
    if request.lora is not None:
        values["lora"] = {"rank": request.lora, "alpha": 2 * request.lora}
        values["optimizer"]["lr"] *= ADAPTER_LR
        if "min_lr" in values.get("schedule", {}):
            values["schedule"]["min_lr"] *= ADAPTER_LR
    values["checkpoint"] = {"every": 100, "keep_last": 2}
    return values


# --- layout ---


def _layout(
    task: TaskTemplate,
    request: RunFileRequest,
    checkpoint: Path,
    values: Mapping[str, Any],
    length: int,
    overrides: Sequence[str],
    remarks: list[str],
) -> dict[str, Any]:
    """Return the settings of the fastest layout; add remarks on it."""
    assert request.hardware is not None, "cards are of some kind"
    cards, hardware = request.cards, request.hardware
    rollout = values.get("rollout")
    batch = rollout["prompts_per_step"] * rollout["group_size"] if rollout else values["data"]["global_batch_size"]
    # For rl only the trainer's, which are those of a plan.
    chosen = [override for override in overrides if re.split("[.=]", override)[0] in RunConfig.model_fields]
    chosen += [] if request.lora is None else [f"lora.rank={request.lora}"]
    if rollout:
        if cards > hardware.cards_per_node:
            raise ConfigError(
                f"--cards {cards}: a run starts engines on one host, which has {hardware.cards_per_node} x {hardware.title}; "
                "see `megascend plan --rl` for more, and name addresses in engines"
            )
        config = settings(checkpoint, length, batch, None, chosen)
        split = plan_split(checkpoint, config, cards, length, hardware)[0]
        trainer, tensor = split.trainer.topology.world_size, split.engines.tensor
        count = split.engines.devices // tensor
        gpus = [[trainer + tensor * engine + rank for rank in range(tensor)] for engine in range(count)]
        remarks += [
            f"Planned for {cards} x {hardware.title}: {count} engines of {tensor} beside a trainer of {trainer}, "
            f"{split.trainer.describe()}; predicted (not measured): {split.seconds:.3g} s a step.",
        ]
        placement = {"trainer": [*range(trainer)], "engines": gpus}
        return _chosen(split.trainer) | {"engines": [VLLM] * count, "placement": placement}
    config = settings(checkpoint, length, task.unit_samples * batch, None, chosen)
    # For each layout the plan has the fastest micro batch only, which may be too small for a pair.
    plan = plan_layouts(checkpoint, config, cards, length, hardware, best=1 if task.unit_samples == 1 else PAIRED)
    layouts = [candidate for candidate in plan.layouts if candidate.micro_batch % task.unit_samples == 0]
    if not layouts:
        needs = (
            "" if plan.plan.smallest is None else f"; the smallest needs {format_bytes(plan.plan.smallest[1].total)}"
        )
        raise ConfigError(
            f"--cards {cards}: no layout of this run fits on {cards} x {hardware.title}{needs} a card: name more, "
            "shorter samples (--length) or --lora RANK"
        )
    best = layouts[0]
    flops = plan.info.flops_per_token(length, frozen=request.lora is not None)
    remarks.append(
        f"Planned for {cards} x {hardware.title}: {best.describe()}; predicted (not measured): {best.time.seconds:.3g} s a step "
        f"of {plan.request.global_batch} samples of {length} tokens, {best.tokens_per_second:,.0f} tokens/s a card, "
        f"MFU {flops * best.tokens_per_second / hardware.peak:.0%}, "
        f"{format_bytes(best.memory.total)} of {format_bytes(hardware.memory)} a card."
    )
    if plan.unchecked:
        remarks.append(f"The engine did not check the layout: {plan.unchecked}")
    return _chosen(best)


def _chosen(candidate: Candidate) -> dict[str, Any]:
    """Return the settings of a layout that differ from their defaults."""
    values = candidate.config.model_dump(mode="json", exclude_defaults=True, include={*LAYOUT})
    return {name: section for name, section in values.items() if section}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with changes; sections are merged."""
    result = dict(values)
    for name, value in changes.items():
        sections = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if sections else value
    return result


# --- text ---


def _text(
    name: str,
    task: TaskTemplate,
    request: RunFileRequest,
    values: Mapping[str, Any],
    path: Path,
    remarks: Sequence[str],
) -> str:
    command, job = f"megascend {task.command} {path}", []
    if request.hardware is not None:
        ranks = len(values["placement"]["trainer"]) if "placement" in values else request.cards
        nodes = -(-ranks // request.hardware.cards_per_node)
        command += f" --nproc {ranks}"
        if nodes > 1:
            command = (
                f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
                f"-m megascend.apps.cli.main {task.command} {path}"
            )
            options = f"--nodes {nodes} --device {request.hardware.name}"
            job = [f"#   megascend job slurm {path} {options}   # or kubernetes, skypilot, ray"]
    lines = [
        *comment(f"{name}: {task.title}, written by `megascend init`. Paths are relative to the working directory."),
        f"#   {command} --dry-run   # checks it, and shows samples and memory",
        f"#   {command}",
        *job,
        *(line for remark in remarks for line in comment(remark)),
        *comment(f"All settings, with their defaults: megascend show-config --defaults {task.command}"),
        *comment(f"Lines of the data: {task.data}."),
        *commented_settings(task.kind, values),
        "",
        *comment("Often set as well:"),
        *commented_out(commented_settings(task.kind, _suggestions(task, values))),
    ]
    return "\n".join(lines) + "\n"


def _suggestions(task: TaskTemplate, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return further settings that the run file does not have."""
    adapter = {"lora": {"rank": 16, "alpha": 32}}
    return {name: value for name, value in {**task.suggestions, **adapter}.items() if name not in values}
