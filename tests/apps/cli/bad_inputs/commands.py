"""Invalid command lines, output directories, states to resume from and environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs.row import Bad, command, words


def earlier_run(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "metrics.jsonl").write_text('{"step": 1}\n')


def exported_run(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "hf").symlink_to((folder / "model").resolve())


def adapter(folder: Path) -> None:
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text("{}")


def file(name: str, content: str = "precious") -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def checkpoint(content: str) -> Callable[[Path], Any]:
    """Create a checkpoint directory with a manifest of this content."""

    def make(folder: Path) -> None:
        path = folder / "out" / "checkpoints" / "step-00000001"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(content)

    return make


def rl(change: str, says: str) -> Bad:
    return Bad(words(says), ("rl", "rl.yaml", "--set", change))


def reward_file(folder: Path) -> None:
    (folder / "reward.py").write_text("def other(response, example):\n    return 0.0\n")


OPTIONS = {
    "no such command": command("trian", says="trian | train"),
    "no run file": command("train", says="Missing argument | config | megascend train --help"),
    "no such option": command("train run.yaml --gpus 2", says="No such option | --gpus | megascend train --help"),
    "an option without its value": command("train run.yaml --set", says="--set | requires an argument"),
    "processes in words": command("train run.yaml --nproc two", says="--nproc | int | 'two'"),
    "more processes than cores": command("train run.yaml --nproc 4096", says="--nproc 4096 | 4 processes a core | torchrun"),
    "a dry run of bad data": command("train run.yaml --dry-run --set data.path=no.jsonl", says="data.path | no.jsonl"),
    "--nproc under torchrun": command(
        "train run.yaml --nproc 2", says="--nproc 2 under torchrun", RANK="0", WORLD_SIZE="2"
    ),
    "show-config: layout": command(
        "show-config run.yaml --nproc 2 --set parallel.tensor=4", says="world size 2 | parallel.tensor=4 | 4 processes"
    ),
    "show-config: nothing there": command("show-config nowhere.yaml", says="no config file at | nowhere.yaml"),
    "new-model: architecture": command("new-model new --arch gpt9", says="--arch 'gpt9' | llama, qwen2, qwen3, qwen3_moe"),
    "new-model: vocabulary": command("new-model new --vocab 10", says="--vocab 10 | 259"),
    "new-model: something there": command("new-model model", says="model exists and is not an empty directory"),
    "export: type": command("export model new --dtype fp8", says="--dtype | 'fp8' | fp32"),
    "export: nothing there": command("export nowhere new", says="no checkpoint at nowhere"),
    "chat: a name on the Hub": command(
        "chat Qwen/Qwen3-8B@main", says="Qwen/Qwen3-8B@main | does not exist here | hf download"
    ),
    "generate: a prompt for a file": command("generate model 2+2=?", says="2+2=? cannot be read | - for standard input"),
    "export: an adapter for a model": command(
        "export lora new", says="lora is a LoRA adapter | --adapter lora", arrange=adapter
    ),
    "export: unfinished run": command(
        "export out new", says="out is a run directory without an exported model", arrange=earlier_run
    ),
    "export: something there": command("export model model", says="model exists and is not an empty directory"),
    "plan: no model": command("plan", says="plan needs MODEL, a checkpoint directory or a config.json"),
    "plan: device": command("plan model --device h101", says="--device h101: no device of this name is described"),
    "plan: fsdp": command("plan model --set engine=fsdp", says="engine: fsdp has one layout for a world"),
    "plan: targets": command(
        "plan model --lora 4 --set lora.targets=[wheels]", says="lora.targets: 'wheels' is not a linear layer"
    ),
    "init: task": command(
        "init sfr model", says="unknown task 'sfr'; known: sft, dpo, reward, classification, pretrain, rl"
    ),
    "init: nothing there": command("init sft nowhere", says="nowhere: no model is there"),
    "init: two hosts of rl": command(
        "init rl model --cards 16", says="--cards 16: a run starts engines on one host, which has 8 x NVIDIA H100"
    ),
    "init: a file there": command("init sft model run.yaml", says="run.yaml | data.jsonl | would be overwritten"),
    "show-config: nothing": command("show-config", says="show-config takes one of CONFIG, --defaults COMMAND and --schema"),
    "job: kind": command("job pbs run.yaml", says="unknown kind of job 'pbs'; known: slurm, kubernetes, skypilot, ray"),
    "job: name": command("job slurm run.yaml --name My_run", says="takes lower-case letters"),
    "push: no namespace": command(
        "train run.yaml --set push.repository=small", says="'small' is not the name of a model on the Hub"
    ),
    "run: platform": command("run --platform tpu -- true", says="'tpu' is not one of 'auto', 'cpu', 'cuda', 'npu'"),
    "generate: a file there": command("generate model data.jsonl -o run.yaml", says="--output run.yaml exists"),
    "doctor: no run": command("doctor --run model", says="--run model | no run has written | events.jsonl"),
    "simnpu: no such command": command("simnpu no-such-program", says="no-such-program"),
}  # fmt: skip
OUTPUTS = {
    "a file": command("train run.yaml", says="output: out exists and is not a directory", arrange=file("out")),
    "not to be written": command("train run.yaml --set output=/proc/out", says="output: /proc/out cannot be written | /proc"),
    "an earlier run": command(
        "train run.yaml", says="output: out | earlier run | metrics.jsonl | --overwrite", arrange=earlier_run
    ),
    "its model overwritten": command(
        "train run.yaml --overwrite --set model=out/hf", says="model: out/hf | output: out | --overwrite", arrange=exported_run
    ),
    "overwritten and resumed": command(
        "train run.yaml --overwrite --resume auto", says="--overwrite and --resume auto contradict each other"
    ),
    "rl: an earlier run": command("rl rl.yaml", says="output: out | earlier run | --overwrite", arrange=earlier_run),
}  # fmt: skip
ENVIRONMENTS = {
    "WORLD_SIZE in words": command("train run.yaml", says="WORLD_SIZE='two'", RANK="0", WORLD_SIZE="two"),
    "nowhere to meet": command("train run.yaml", says="without MASTER_ADDR and MASTER_PORT | torchrun", RANK="0", WORLD_SIZE="2"),
    "a cache that is a file": command("train run.yaml", says="data.jsonl | MEGASCEND_CACHE", MEGASCEND_CACHE="data.jsonl"),
    "a switch in words": command("show-config run.yaml", says="MEGASCEND_DEBUG | boolean", MEGASCEND_DEBUG="maybe"),
}  # fmt: skip
RL = {
    "a run file of train": command("rl run.yaml", says="data: for megascend train only"),
    "a run file of rl": command("train rl.yaml", says="rollout: for megascend rl only"),
    "no prompts": rl("rollout.prompts=nowhere.jsonl", says="no prompts at | nowhere.jsonl"),
    "another function": Bad(
        words("reward.py | 'sorted' | other"), ("rl", "rl.yaml", "--set", "rollout.reward=reward.py:sorted"), reward_file
    ),
    "no engines": rl("engines=[]", says="engines | at least 1 item"),
    "no key": rl("engines=[http://a:1]", says="engines | http://a:1 | no key | WEIGHTWIRE_KEY"),
    "a long prompt": Bad(
        words("prompts.jsonl:2 | 600 tokens | rollout.max_tokens: 8 | 256 (the model's context"),
        ("rl", "rl.yaml"),
        lambda folder: (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + 600 * "b" + '"}\n'),
    ),
}  # fmt: skip
SERVE = {
    "no model": command("serve", says="megascend serve: model: required"),
    "a model that is not there": command("serve --model modle", says="modle is not a directory | a Hugging Face checkpoint"),
    "a run file of train": command("serve run.yaml", says="output: unknown setting | steps: unknown setting"),
    "a host that is none": command(
        "serve --model model --host no.such.host.invalid", says="cannot listen on no.such.host.invalid:8000"
    ),
}  # fmt: skip
COMMANDS = {
    f"{part}, {name}": bad
    for part, rows in {
        "options": OPTIONS,
        "output": OUTPUTS,
        "environment": ENVIRONMENTS,
        "rl": RL,
        "serve": SERVE,
    }.items()
    for name, bad in rows.items()
}
