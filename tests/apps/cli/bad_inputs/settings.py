"""Invalid run files and settings."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.row import Bad, settings, words


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
    "Latin-1": run_file("# café\n".encode("latin-1"), says="run.yaml:7 | not UTF-8 | save the file as UTF-8"),
    "empty": replaced_by("", says="run.yaml | a mapping of settings | NoneType"),
    "a colon too many": run_file("engine: a: b\n", says="run.yaml:7:10 | not valid YAML"),
    "a key twice": run_file("steps: 5\n", says="run.yaml:7:1 | 'steps' appears twice | line 5"),
    "no model": replaced_by("output: o\ndata: {path: d}\n", says="run.yaml: model: required"),
}  # fmt: skip
KEYS = {
    "a head": settings("head=scalar", says="head: a setting of backends | bradley_terry | docs/losses.md"),
    "below a number": settings("steps.every=1", says="--set steps.every=1 | 'steps' is not a section"),
    "no value": settings("steps", says="--set | KEY=VALUE | 'steps'"),
}  # fmt: skip
VALUES = {
    "steps in words": settings("steps=many", says="steps | 'many'"),
    "lr NaN": settings("optimizer.lr=.nan", says="optimizer.lr | finite | nan"),
    "betas": settings("optimizer.betas=[0.9, 1.5]", says="optimizer.betas.1 | less than 1 | 1.5"),
    "platform that is not here": Bad(
        words("platform 'npu' cannot be used here"), ("train", "run.yaml", "--nproc", "2", "--set", "platform=npu")
    ),
    "plug-in": settings("plugins=[no_such_package.x]", says="plugins | 'no_such_package'"),
    "callback without a file": settings("callbacks=[no.py:Stop]", says="callbacks | no.py | does not exist"),
    "callback that its file does not have": Bad(
        words("callbacks | mine.py defines no class 'Stop'"),
        ("train", "run.yaml", "--nproc", "2", "--set", "callbacks=[mine.py:Stop]"),
        lambda folder: (folder / "mine.py").write_text("class Stopp: pass"),
    ),
    "timeout of ages": settings(f"timeout_s={10**12}", says=f"timeout_s | {366 * 86400} | {10**12}"),
    "LoRA on another layer": settings("lora.targets=[q_proj, kproj]", says="lora.targets | 'kproj' | k_proj"),
    "generation too long": settings(
        "generation={prompts: [one], max_tokens: 999}", says="generation.max_tokens is 999 | more than 256"
    ),
}  # fmt: skip
COMBINATIONS = {
    "output in the data": settings("data.path=.", says="output: out | data.path: . | read as data"),
    "layout: tensor": settings("parallel.tensor=2", says="world size 1 | parallel.tensor=2 | 2 processes"),
}  # fmt: skip
LAYOUTS = {
    "three processes": Bad(
        words("world size 3 | parallel.tensor=2 | 2 or 4 processes"),
        ("train", "run.yaml", "--nproc", "3", "--set", "parallel.tensor=2"),
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
