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
    "a run file too many": command("train run.yaml run.yaml", says="unexpected extra argument | run.yaml"),
    "no processes": command("train run.yaml --nproc 0", says="--nproc | 1 | '0'"),
    "processes in words": command("train run.yaml --nproc two", says="--nproc | integer | 'two'"),
    "more processes than cores": command("train run.yaml --nproc 4096", says="--nproc 4096 | 4 processes a core | torchrun"),
    "a dry run of bad data": command("train run.yaml --dry-run --set data.path=no.jsonl", says="data.path | no.jsonl"),
    "a dry run of too many": command("train run.yaml --dry-run --nproc 4096", says="--nproc 4096 | 4 processes a core"),
    "--nproc under torchrun": command(
        "train run.yaml --nproc 2", says="--nproc 2 under torchrun", RANK="0", WORLD_SIZE="2"
    ),
    "show-config: layout": command(
        "show-config run.yaml --nproc 2 --set parallel.tensor=4", says="world size 2 | parallel.tensor=4 | 4 processes"
    ),
    "show-config: nothing there": command("show-config nowhere.yaml", says="no config file at | nowhere.yaml"),
    "new-model: architecture": command("new-model new --arch gpt9", says="--arch 'gpt9' | llama, qwen2, qwen3, qwen3_moe"),
    "new-model: no layers": command("new-model new --layers 0", says="--layers | 1 | '0'"),
    "new-model: heads": command("new-model new --heads 3", says="--hidden 128 | --heads (6)"),
    "new-model: key and value heads": command("new-model new --kv-heads 3", says="--heads 4 | --kv-heads 3"),
    "new-model: experts of a dense one": command("new-model new --experts 8", says="--experts 8 | --arch qwen3 | qwen3_moe"),
    "new-model: experts per token": command(
        "new-model new --arch qwen3_moe --experts 2 --experts-per-token 3", says="--experts-per-token 3 | --experts 2"
    ),
    "new-model: vocabulary": command("new-model new --vocab 10", says="--vocab 10 | 259"),
    "new-model: something there": command("new-model model", says="model exists and is not an empty directory"),
    "new-model: below a file": command(
        "new-model data.jsonl/new", says="data.jsonl/new cannot be written | data.jsonl is not a directory"
    ),
    "export: type": command("export model new --dtype fp8", says="--dtype | 'fp8' | fp32"),
    "export: nothing there": command("export nowhere new", says="no checkpoint at nowhere"),
    "generate: a name on the Hub": command(
        "generate Qwen/Qwen3-8B@main nothing.jsonl",
        says="Qwen/Qwen3-8B@main | does not exist here | Hugging Face Hub",
    ),
    "init: a name on the Hub": command(
        "init sft Qwen/Qwen3-8B", says="Qwen/Qwen3-8B | does not exist here | Hugging Face Hub"
    ),
    "export: no model": command("export . new", says="config.json | not a Hugging Face checkpoint"),
    "export: no adapter": command("export model new --adapter data.jsonl", says="--adapter data.jsonl | adapter_config.json"),
    "export: an adapter for a model": command(
        "export lora new", says="lora is a LoRA adapter | --adapter lora", arrange=adapter
    ),
    "export: no such engine": command("export model new --engine vllm", says="'vllm' | megatron, single, fsdp"),
    "export: unfinished run": command(
        "export out new", says="out is a run directory without an exported model", arrange=earlier_run
    ),
    "export: something there": command("export model model", says="model exists and is not an empty directory"),
    "plan: no model": command("plan", says="plan needs MODEL, a checkpoint directory or a config.json"),
    "plan: nothing there": command("plan nowhere", says="nowhere: no model is there"),
    "plan: device": command("plan model --device h101", says="--device h101: no device of this name is described"),
    "plan: length": command("plan model --length 512", says="512 is above the model's context of 256 tokens"),
    "plan: calibration": command("plan model --calibration none.json", says="--calibration none.json: cannot be read"),
    "plan: fsdp": command("plan model --set engine=fsdp", says="engine: fsdp has one layout for a world"),
    "plan: a layout": command("plan model --set parallel.tensor=2", says="--set parallel.tensor: a plan chooses this setting"),
    "plan: precision": command("plan model --set precision=fp32", says="precision: fp32: devices are described for bf16 only"),
    "plan: rl as JSON": command("plan model --rl --json", says="--rl prints a table: it cannot be combined with --json"),
    "plan: a setting": command("plan model --set lora.rnak=4", says="lora.rnak: unknown setting"),
    "plan: targets": command(
        "plan model --lora 4 --set lora.targets=[wheels]", says="lora.targets: 'wheels' is not a linear layer"
    ),
    "plan: a file there": command("plan model --write data.jsonl", says="--write data.jsonl exists; choose another file"),
    "init: task": command(
        "init sfr model", says="unknown task 'sfr'; known: sft, dpo, reward, classification, pretrain, rl"
    ),
    "init: nothing there": command("init sft nowhere", says="nowhere: no model is there"),
    "init: a setting of others": command(
        "init sft model --set learning_rate=4", says="learning_rate: unknown setting (value 4), did you mean optimizer.lr"
    ),
    "init: two hosts of rl": command(
        "init rl model --cards 16", says="--cards 16: a run starts engines on one host, which has 8 x NVIDIA H100"
    ),
    "init: a file there": command("init sft model run.yaml", says="run.yaml | data.jsonl | would be overwritten"),
    "show-config: nothing": command("show-config", says="show-config takes one of CONFIG, --defaults COMMAND and --schema"),
    "show-config: two things": command("show-config run.yaml --schema train", says="show-config takes one of CONFIG"),
    "show-config: settings of no file": command(
        "show-config --defaults train --set lr=1", says="--set and --nproc need CONFIG: --defaults reads no file"
    ),
    "show-config: schema": command("show-config --schema trian", says="'trian' is not one of 'train', 'rl', 'serve'"),
    "job: kind": command("job pbs run.yaml", says="unknown kind of job 'pbs'; known: slurm, kubernetes, skypilot, ray"),
    "job: a file there": command("job slurm run.yaml run.yaml", says="run.yaml: would be overwritten"),
    "job: name": command("job slurm run.yaml --name My_run", says="takes lower-case letters"),
    "push: no namespace": command(
        "train run.yaml --set push.repository=small", says="'small' is not the name of a model on the Hub"
    ),
    "run: platform": command("run --platform tpu -- true", says="'tpu' is not one of 'auto', 'cpu', 'cuda', 'npu'"),
    "generate: a file there": command("generate model data.jsonl -o run.yaml", says="--output run.yaml exists"),
    "doctor: nothing there": command("doctor --run nowhere", says="--run nowhere | not a directory"),
    "doctor: no run": command("doctor --run model", says="--run model | no run has written | events.jsonl"),
    "doctor: nothing to verify": command("doctor --verify", says="--verify | --run DIR"),
    "doctor: no time": command("doctor --timeout 0", says="--timeout | 1 | '0'"),
    "simnpu: no command": command("simnpu", says="Missing argument | COMMAND"),
    "simnpu: no such command": command("simnpu no-such-program", says="no-such-program"),
}  # fmt: skip
OUTPUTS = {
    "a file": command("train run.yaml", says="output: out exists and is not a directory", arrange=file("out")),
    "below a file": command(
        "train run.yaml --set output=data.jsonl/out", says="output: data.jsonl/out | data.jsonl is not a directory"
    ),
    "not to be written": command("train run.yaml --set output=/proc/out", says="output: /proc/out cannot be written | /proc"),
    "a link to itself": command(
        "train run.yaml",
        says="output: out cannot be written | Too many levels of symbolic links",
        arrange=lambda f: (f / "out").symlink_to("out"),
    ),
    "an earlier run": command(
        "train run.yaml", says="output: out | earlier run | metrics.jsonl | --overwrite", arrange=earlier_run
    ),
    "its model overwritten": command(
        "train run.yaml --overwrite --set model=out/hf", says="model: out/hf | output: out | --overwrite", arrange=exported_run
    ),
    "overwritten and resumed": command(
        "train run.yaml --overwrite --resume auto", says="--overwrite and --resume auto contradict each other"
    ),
    "resume: nothing there": command("train run.yaml --resume nowhere", says="--resume nowhere | not a directory"),
    "rl: an earlier run": command("rl rl.yaml", says="output: out | earlier run | --overwrite", arrange=earlier_run),
}  # fmt: skip
ENVIRONMENTS = {
    "RANK alone": command("train run.yaml", says="RANK and WORLD_SIZE only RANK is set | torchrun", RANK="0"),
    "WORLD_SIZE in words": command("train run.yaml", says="WORLD_SIZE='two'", RANK="0", WORLD_SIZE="two"),
    "RANK beyond the world": command("train run.yaml", says="RANK=3 is outside WORLD_SIZE=2", RANK="3", WORLD_SIZE="2"),
    "nowhere to meet": command("train run.yaml", says="without MASTER_ADDR and MASTER_PORT | torchrun", RANK="0", WORLD_SIZE="2"),
    "a port in words": command(
        "train run.yaml", says="MASTER_PORT='http'", RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="http"
    ),
    "a cache that is a file": command("train run.yaml", says="data.jsonl | MEGASCEND_CACHE", MEGASCEND_CACHE="data.jsonl"),
    "a size in words": command("train run.yaml", says="MEGASCEND_CACHE_GIB='much' | above 0 | 50", MEGASCEND_CACHE_GIB="much"),
    "a switch in words": command("show-config run.yaml", says="MEGASCEND_DEBUG | boolean", MEGASCEND_DEBUG="maybe"),
}  # fmt: skip
RL = {
    "a head": command("rl rl.yaml --set head=scalar", says="head: a setting of backends | docs/losses.md"),
    "a run file of train": command("rl run.yaml", says="data: for megascend train only"),
    "a run file of rl": command("train rl.yaml", says="rollout: for megascend rl only"),
    "no prompts": rl("rollout.prompts=nowhere.jsonl", says="no prompts at | nowhere.jsonl"),
    "no function": rl("rollout.reward=rewards", says="reward | 'rewards' | package.module:name"),
    "no file of rewards": rl("rollout.reward=no.py:f", says="reward | no.py"),
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
    "a long response": rl("rollout.max_tokens=4000", says="prompts.jsonl:1 | rollout.max_tokens: 4000 | max_position_embeddings"),
    "no such preset": rl("objective.preset=papo", says="objective.preset | 'papo' | 'dapo'"),
    "no such transport": rl("sync.transport=mail", says="transport | 'mail' | gloo"),
}  # fmt: skip
SERVE = {
    "no model": command("serve", says="megascend serve: model: required"),
    "a model that is not there": command("serve --model modle", says="modle is not a directory | a Hugging Face checkpoint"),
    "precision": command("serve --model model --precision fp8", says="precision | 'fp32', 'fp16' or 'bf16' | 'fp8'"),
    "a misspelt key": command("serve --model model --set precison=fp32", says="precison: unknown setting | mean precision?"),
    "a run file of train": command("serve run.yaml", says="output: unknown setting | steps: unknown setting"),
    "too many processes": command("serve --model model --nproc 4096", says="--nproc 4096 | 4 processes a core"),
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
