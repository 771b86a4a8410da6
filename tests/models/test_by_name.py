"""Every declared architecture by its name: ``megascend new-model --arch``, ``megascend train`` and recipes of the cookbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascend.models import expert_count
from megascend.models.registry import BUILT_IN
from support.forked_programs import run_command, run_forked
from support.stacks import stack_marks

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "examples" / "quickstart" / "chat.jsonl"
STEPS = 2
IN_CI = ("deepseek_v3", "gpt_oss")
"""A whole family and one that Megatron-Core does not divide by tensor parallelism alone."""
WHOLE_SEQUENCES = (
    r"TopologyError: \w+: parallel.context=2: Megatron-Core divides its linear attention from \S+ on, and .+ set 1, .+"
)
ALL_GATHER = r"TopologyError: \w+: parallel\.context_algorithm=\w+ with parallel\.context=2: .+ all_gather only; set .+"
NO_EXPERTS = r"TopologyError: parallel\.expert=2, but the model has no experts; .+"
BIASES = (
    r"TopologyError: parallel\.expert_tensor=2 .+ does not divide experts that have biases; set expert_tensor to 1, .+"
)
WITH_IMAGES = r"ConfigError: parallel\.context: 2 with \w+: its images are not divided over context parallel ranks; .+"
OLDER_STACK = r"VersionError: \w+: Megatron-Core has its layers from \S+ on, and \S+ is installed; install stack .+"
NOT_BUILT = r"CheckpointError: \S+ mcore-bridge \S+ has no model for model_type '\w+'; .+"


def marks(arch: str) -> list[pytest.MarkDecorator]:
    return [] if arch in IN_CI else [pytest.mark.nightly]


ALL = [pytest.param(name, marks=marks(name)) for name in BUILT_IN]

# The mean loss of the samples that the run trains on in its first step, computed by plain transformers.
SCORE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from megascend.models.checkpoint_files.architectures import make_known_to_transformers
make_known_to_transformers(Path(sys.argv[1]))  # Kimi-K2: transformers' DeepSeek-V3 under its own name
takes_images = hasattr(AutoConfig.from_pretrained(sys.argv[1]), "vision_config")
loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
model = loader.from_pretrained(sys.argv[1], attn_implementation="eager").float()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total = count = 0
for line in open(sys.argv[2], encoding="utf-8"):
    messages = json.loads(line)["messages"]
    head = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(head + messages[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
    count += len(ids[0]) - start
print(total / count)
"""


def make_model(arch: str, folder: Path) -> Path:
    model = folder / "model"
    sizes = ("--hidden", "64", "--layers", "2", "--context", "512")
    completed = run_command("new-model", model, "--arch", arch, *sizes)
    assert completed.returncode == 0, completed.stderr
    return model


@pytest.mark.nightly_cases("gpt_oss")  # covered: deepseek_v3
@pytest.mark.parametrize("arch", ALL)
def test_model_by_name_trains_from_the_loss_of_transformers(arch: str, tmp_path: Path) -> None:
    model, data = make_model(arch, tmp_path), tmp_path / "chats.jsonl"
    chats = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns), encoding="utf-8")
    settings: dict[str, Any] = {
        "model": str(model),
        "output": str(tmp_path / "out"),
        "data": {"path": str(data), "global_batch_size": len(chats)},
        "steps": 3,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 1e-3},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    completed = run_command("train", run_file, "--set", "engine=megatron")
    if refused := engine_refusal(arch):
        assert completed.returncode == 2
        assert re.search(rf"^{refused}$", completed.stderr, re.MULTILINE), completed.stderr[-3000:]
        completed = run_command("train", run_file, "--set", "engine=single")
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    scored = run_forked(SCORE, model, data)
    assert scored.returncode == 0, scored.stderr[-3000:]
    assert rows[0]["loss"] == pytest.approx(float(scored.stdout.split()[-1]), abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]


def recipes(model: Path, output: Path) -> dict[str, list[str]]:
    """Return the arguments of each recipe that takes a model, for two ranks."""
    steps, chats = ("--steps", str(STEPS)), ("--max-length", "128")
    data = ("--data", f"ada={CHATS}", "--data", f"bob={CHATS}")
    options = {
        "dense_tp_pp_dp": ("--tensor", "2", "--pipeline", "1", "--batch", "4", *chats),
        "moe_ep": ("--batch", "4", *chats),
        "long_context_cp": ("--length", "64", "--batch", "4"),
        "multi_lora": ("--batch", "2", *data, *chats),
    }
    return {
        name: [
            str(ROOT / "cookbook" / f"{name}.py"),
            *("--model", str(model), "--output", str(output / name)),
            *steps,
            *arguments,
        ]
        for name, arguments in options.items()
    }


def engine_refusal(arch: str) -> str | None:
    """Return the sentence with which the Megatron engine of this stack refuses a family; None where it trains it."""
    if stack_marks(arch):
        return OLDER_STACK
    return None if BUILT_IN[arch].proven or BUILT_IN[arch].proven_with_images else NOT_BUILT


def refusal(arch: str, recipe: str) -> str | None:
    """Return the sentence with which a recipe refuses a family on two ranks; None where it trains it."""
    architecture = BUILT_IN[arch]
    if stack_marks(arch):
        return OLDER_STACK
    if recipe == "moe_ep" and not expert_count(architecture.tiny):
        return NO_EXPERTS
    if recipe == "long_context_cp" and stack_marks(arch, context=2) and architecture.context_core is not None:
        return WHOLE_SEQUENCES
    if recipe == "long_context_cp" and architecture.context_algorithms == ("all_gather",):
        return ALL_GATHER
    if recipe == "long_context_cp" and architecture.images is not None:
        return WITH_IMAGES
    if refused := engine_refusal(arch):
        return refused
    tensor = recipe in ("dense_tp_pp_dp", "multi_lora")
    return BIASES if tensor and architecture.biases == "all" and expert_count(architecture.tiny) else None


@pytest.mark.nightly_cases("gpt_oss")  # covered: deepseek_v3
@pytest.mark.parametrize("arch", ALL)
def test_recipes_train_a_model_by_name_or_refuse_it(arch: str, tmp_path: Path) -> None:
    jobs, model = tmp_path / "jobs.json", make_model(arch, tmp_path)
    jobs.write_text(json.dumps(recipes(model, tmp_path)), encoding="utf-8")
    completed = run_forked(Path(__file__).with_name("recipe_runs.py"), "megatron", jobs, directory=ROOT)
    assert completed.returncode == 0, completed.stderr[-3000:]
    for recipe, (trained, output) in json.loads(completed.stdout.splitlines()[-1]).items():
        refused = refusal(arch, recipe)
        assert trained == (refused is None), (recipe, output[-3000:])
        if refused is None:
            steps = re.findall(rf"^step (\d)/{STEPS}  ", output, re.MULTILINE)
            assert steps == [str(step) for step in range(1, STEPS + 1)], output
        else:
            assert re.search(rf"^megascend\.errors\.{refused}$", output, re.MULTILINE), output[-3000:]
