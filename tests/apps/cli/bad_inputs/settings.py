"""Invalid run files and settings."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.row import UNREADABLE, Bad, settings, words


def run_file(content: str | bytes, says: str) -> Bad:
    """Append ``content`` to the valid ``run.yaml``."""

    def write(folder: Path) -> None:
        with (folder / "run.yaml").open("ab") as file:
            file.write(content if isinstance(content, bytes) else content.encode())

    return Bad(words(says), arrange=write)


def replaced_by(content: str | bytes, says: str) -> Bad:
    """Replace ``run.yaml`` by ``content``."""
    encoded = content if isinstance(content, bytes) else content.encode()
    return Bad(words(says), arrange=lambda folder: (folder / "run.yaml").write_bytes(encoded))


RUN_FILES = {
    "nothing there": Bad(words("no config file at | nowhere.yaml"), ("train", "nowhere.yaml")),
    "a folder": Bad(words(". is a directory | YAML"), ("train", ".")),
    "a link to itself": Bad(
        words("loop.yaml cannot be read"), ("train", "loop.yaml"), lambda folder: (folder / "loop.yaml").symlink_to("loop.yaml")
    ),
    "not to be read": Bad(
        words("mem.yaml cannot be read"), ("train", "mem.yaml"), lambda folder: (folder / "mem.yaml").symlink_to(UNREADABLE)
    ),
    "Latin-1": run_file("# café\n".encode("latin-1"), says="run.yaml:7 | not UTF-8 | save the file as UTF-8"),
    "empty": replaced_by("", says="run.yaml | a mapping of settings | NoneType"),
    "a tab": run_file("optimizer:\n\tlr: 1\n", says="run.yaml:8:1 | not valid YAML"),
    "a bracket left open": run_file("parallel: {tensor: 1\n", says="run.yaml:8:1 | not valid YAML"),
    "a colon too many": run_file("engine: a: b\n", says="run.yaml:7:10 | not valid YAML"),
    "a key twice": run_file("steps: 5\n", says="run.yaml:7:1 | 'steps' appears twice | line 5"),
    "a key that is no name": run_file("on: 5\n", says="run.yaml:7:1 | 'on' is read as True"),
    "no model": replaced_by("output: o\ndata: {path: d}\n", says="run.yaml: model: required"),
    "no data": replaced_by("output: o\nmodel: m\n", says="data: required"),
}  # fmt: skip
KEYS = {
    "unknown": settings("stepps=1", says="stepps: unknown setting (value 1) | did you mean steps?"),
    "unknown in a section": settings(
        "optimizer.learning_rate=1", says="optimizer.learning_rate: unknown setting (value 1), did you mean optimizer.lr"
    ),
    "a head": settings("head=scalar", says="head: a setting of backends | bradley_terry | docs/losses.md"),
    "below a number": settings("steps.every=1", says="--set steps.every=1 | 'steps' is not a section"),
    "a section that is a number": settings("optimizer=3", says="optimizer: a section of settings | 3"),
    "no value": settings("steps", says="--set | KEY=VALUE | 'steps'"),
    "no name": settings("optimizer..lr=1", says="--set | KEY=VALUE | 'optimizer..lr=1'"),
    "a value that is no YAML": settings("steps=[1", says="--set steps=[1: not valid YAML"),
}  # fmt: skip
VALUES = {
    "steps in words": settings("steps=many", says="steps | 'many'"),
    "half a step": settings("steps=1.5", says="steps | 1.5"),
    "steps: true": settings("steps=true", says="steps | a number | True"),
    "lr NaN": settings("optimizer.lr=.nan", says="optimizer.lr | finite | nan"),
    "betas": settings("optimizer.betas=[0.9, 1.5]", says="optimizer.betas.1 | less than 1 | 1.5"),
    "one beta": settings("optimizer.betas=[0.9]", says="optimizer.betas.1: required"),
    "precision": settings("precision=fp8", says="precision | 'fp32', 'fp16' or 'bf16' | 'fp8'"),
    "platform": settings("platform=tpu", says="platform | 'cuda' | 'tpu'"),
    "platform that is not here": Bad(
        words("platform 'npu' cannot be used here"), ("train", "run.yaml", "--nproc", "2", "--set", "platform=npu")
    ),
    "provider": settings("provider=nobody", says="provider | 'nobody'"),
    "plug-in": settings("plugins=[no_such_package.x]", says="plugins | 'no_such_package'"),
    "plug-in that is a path": settings("plugins=[my/plugin.py]", says="plugins | my/plugin.py | does not exist"),
    "callback without a file": settings("callbacks=[no.py:Stop]", says="callbacks | no.py | does not exist"),
    "callback without a class": settings("callbacks=[no.py]", says="callbacks | 'no.py' | path/to/file.py:name"),
    "callback of no package": settings("callbacks=['no_such_package:Stop']", says="callbacks | 'no_such_package'"),
    "callback that its file does not have": Bad(
        words("callbacks | mine.py defines no class 'Stop'"),
        ("train", "run.yaml", "--nproc", "2", "--set", "callbacks=[mine.py:Stop]"),
        lambda folder: (folder / "mine.py").write_text("class Stopp: pass"),
    ),
    "callback in a file that is no Python": Bad(
        words("callbacks | mine.py cannot be read | SyntaxError"),
        ("train", "run.yaml", "--set", "callbacks=[mine.py:Stop]"),
        lambda folder: (folder / "mine.py").write_text("class Stop(:"),
    ),
    "seed beyond 64 bits": settings(f"seed={10**20}", says=f"seed | 64 bits | {10**20}"),
    "timeout of ages": settings(f"timeout_s={10**12}", says=f"timeout_s | {366 * 86400} | {10**12}"),
    "a group of nothing": settings("optimizer.groups=[{lr_scale: 2}]", says="optimizer.groups.0.match | required"),
    "LoRA on another layer": settings("lora.targets=[q_proj, kproj]", says="lora.targets | 'kproj' | k_proj"),
    "generation of nothing": settings("generation.prompts=[]", says="generation.prompts | at least 1"),
    "generation too long": settings(
        "generation={prompts: [one], max_tokens: 999}", says="generation.max_tokens is 999 | more than 256"
    ),
    "recompute": settings("recompute.modules=[attention]", says="recompute.modules.0 | 'core_attn' | 'attention'"),
    "no output": settings("output=''", says="output | a path | ''"),
}  # fmt: skip
COMBINATIONS = {
    "warm-up of all steps": settings(
        "steps=50", "schedule={kind: linear, warmup_steps: 50}", says="total_steps: 50 with a warm-up of 50 steps"
    ),
    "output in the data": settings("data.path=.", says="output: out | data.path: . | read as data"),
    "layout: tensor": settings("parallel.tensor=2", says="world size 1 | parallel.tensor=2 | 2 processes"),
    "layout: virtual pipeline": settings(
        "parallel.virtual_pipeline=2", says="parallel.virtual_pipeline=2 | parallel.pipeline=1"
    ),
}  # fmt: skip
LAYOUTS = {
    "three processes": Bad(
        words("world size 3 | parallel.tensor=2 | 2 or 4 processes"),
        ("train", "run.yaml", "--nproc", "3", "--set", "parallel.tensor=2"),
    ),
    "attention heads": Bad(
        words("parallel.tensor=8 | 4 attention heads"), ("train", "run.yaml", "--nproc", "8", "--set", "parallel.tensor=8")
    ),
    "key and value heads": Bad(
        words("parallel.tensor=4 | 2 query groups"), ("train", "run.yaml", "--nproc", "4", "--set", "parallel.tensor=4")
    ),
}  # fmt: skip
SETTINGS = {
    f"{part}, {name}": bad
    for part, rows in {
        "run file": RUN_FILES,
        "keys": KEYS,
        "values": VALUES,
        "together": COMBINATIONS,
        "layout": LAYOUTS,
    }.items()
    for name, bad in rows.items()
}
