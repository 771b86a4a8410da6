"""Look names of torch_npu up in its own Python package and in simnpu: those in ``__all__``, and those that programs use.

    PYTHONPATH=src:scripts/npu python -m real_torch_npu.names [FOLDER]    # writes the files behind the tables of docs/simnpu.md

FOLDER has checkouts of the programs in CHECKOUTS; a program that is not there keeps its last names. Nothing of a program is
imported: a name is a dotted path below ``torch_npu``, ``torch.npu`` or ``torch.ops.npu`` in its source. What it reaches through
``torch.cuda``, which ``transfer_to_npu`` replaces, is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from real_torch_npu.library import FOLDER, build_cann, run, unpack, version_for_torch

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED, USED = (ROOT / "benchmarks" / "integrations" / f"torch_npu-{kind}.json" for kind in ("names", "programs"))
PACKAGES = [f"torch_npu.{name}" for name in ("npu", "npu.amp", "profiler", "optim", "utils", "distributed")]
RAISES_WHEN_CALLED = {"torch_npu.npu.NPUGraph"}
ROOTS = ("torch_npu", "torch.npu", "torch.ops.npu")
DEVICE_MODULES = {"get_torch_device", "get_device_module", "_torch_npu"}
"""Functions that return ``torch.npu``: verl's, torch's, megascend's."""
NOT_THE_LIBRARY = {"tests", "test", "tests_extend", "examples", "docs", "mindspore"}
"""Folders of programs that are left out; MindSpore is another framework, for which MindSpeed has a folder."""
HCCL_TRANSFER = (
    "weight_transfer/hccl_engine", "weight_transfer/packed_tensor",
    "device_communicators/pyhccl", "device_communicators/pyhccl_wrapper",
)  # fmt: skip
CHECKOUTS = {
    "MindSpeed": ["mindspeed/mindspeed"],
    "verl": ["verl/verl"],
    "twinkle": ["twinkle/src"],
    "vllm-ascend, HCCL weight transfer": [f"vllm-ascend/vllm_ascend/distributed/{file}.py" for file in HCCL_TRANSFER],
}
INSTALLED = ("mcore_bridge", "transformers", "accelerate")


def below_a_root(name: str) -> bool:
    return name.startswith(tuple(f"{root}." for root in ROOTS))


def names_of_program(*paths: Path) -> set[str]:
    """Return the names that these Python files, or those below these folders, use."""
    names = set()
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*.py"):
            if path.is_file() or not NOT_THE_LIBRARY & set(file.relative_to(path).parts[:-1]):
                source = file.read_text(encoding="utf-8", errors="replace")
                if re.search(rf"npu|{'|'.join(DEVICE_MODULES)}", source):
                    names.update(filter(below_a_root, names_of_file(ast.parse(source))))
    return {re.sub(r"^torch\.npu\.", "torch_npu.npu.", name) for name in names if ".__" not in name}


def names_of_file(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a file reads, imports, passes to ``hasattr``, or has as a string."""
    aliases: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                yield item.name
                first = item.name.partition(".")[0]
                aliases[item.asname or first] = item.name if item.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                aliases[item.asname or item.name] = full = f"{node.module}.{item.name}".removesuffix(".*")
                yield full
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value, aliases)
            if below_a_root(value) or value in ROOTS:
                aliases[node.targets[0].id] = value
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in inner:
            yield dotted(node, aliases)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(_|\.)npu(\.\w+)+", str(node.value)):
            yield str(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield f"{dotted(node.args[0], aliases)}.{getattr(node.args[1], 'value', '')}".rstrip(".")


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return the dotted name of an expression by the file's imports; empty if it is none."""
    if isinstance(node, ast.Attribute):
        above = dotted(node.value, aliases)
        return above and f"{above}.{node.attr}"
    if isinstance(node, ast.Call):
        return "torch.npu" if getattr(node.func, "id", getattr(node.func, "attr", "")) in DEVICE_MODULES else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def look_up(name: str) -> Any:
    """Return what a name is: None if it is not there, its parameters if Python knows them, else its kind."""
    path, *parts = name.split(".")
    target: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            target = getattr(target, part)
        except (AttributeError, RuntimeError):
            try:
                target = importlib.import_module(path)
            except ImportError:
                return None
    if part == "__all__":
        return list(target)
    if isinstance(target, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
        return "operator"
    try:
        return [described(parameter) for parameter in inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):
        return "value"


def described(parameter: inspect.Parameter) -> str:
    """Return a parameter as in a signature, without its annotation and with a readable default."""
    default = parameter.default
    if not (plain := isinstance(default, (str, int, float, type(None), torch.dtype))):
        default = ...
    text = str(parameter.replace(annotation=inspect.Parameter.empty, default=default if plain else parameter.empty))
    optional = parameter.default is not inspect.Parameter.empty
    return f"{text}=..." if optional and not plain else text


def look_up_in_a_process(names: Iterable[str], environment: dict[str, str]) -> dict[str, Any]:
    """Look names up in a process of its own, because imports of some change torch."""
    environment = environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{ROOT / 'scripts' / 'npu'}"}
    command = [sys.executable, "-m", "real_torch_npu.names", "--look-up"]
    done = subprocess.run(command, input="\n".join(names), text=True, capture_output=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"torch_npu cannot be imported: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def real_package(*module_path: Path, folder: Path = FOLDER) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that imports torch_npu's own package; a file and three empty folders pass for CANN."""
    release = version_for_torch()
    package = unpack(release, folder)
    variables = build_cann(package, folder / release / "cann")
    with tempfile.TemporaryDirectory() as cann:
        for part in ("opp", "runtime", "compiler"):
            (Path(cann) / part).mkdir()
        (Path(cann) / "ascend_toolkit_install.info").write_text("version=9.2.0\n")
        variables |= {"ASCEND_HOME_PATH": cann, "ASCEND_OPP_PATH": f"{cann}/opp"}
        variables["PYTHONPATH"] = os.pathsep.join(map(str, (package.parent, *module_path)))
        yield {name: value for name, value in os.environ.items() if not name.startswith("SIMNPU")} | variables


def of_torch_npu(names: Iterable[str]) -> dict[str, Any]:
    with real_package() as environment:
        return look_up_in_a_process(names, environment)


def of_simnpu(names: Iterable[str]) -> dict[str, Any]:
    import simnpu

    return look_up_in_a_process(names, simnpu.environment())


def installed_programs() -> dict[str, dict[str, Any]]:
    """Return version and names of megascend and of the programs in this environment."""
    programs = {
        "megascend": {"version": "", "names": sorted(names_of_program(ROOT / "src/megascend", ROOT / "src/weightwire"))}
    }
    for package in INSTALLED:
        path = Path(find_spec(package).origin).parent  # type: ignore[union-attr,arg-type]
        programs[package.replace("_", "-")] = {"version": version(package), "names": sorted(names_of_program(path))}
    return programs


def programs_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return revision and names of the programs whose checkouts lie in a folder."""
    programs = {}
    for program, paths in CHECKOUTS.items():
        checkout = folder / paths[0].partition("/")[0]
        if checkout.is_dir():
            revision = run(["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]).strip()
            names = names_of_program(*(folder / path for path in paths))
            programs[program] = {"version": revision, "names": sorted(names)}
    return programs


def compare_names(names: Iterable[str]) -> dict[str, Any]:
    """Return the names that torch_npu or simnpu lacks, and those whose parameters differ."""
    real, simulated = of_torch_npu(names := sorted(names)), of_simnpu(names)
    lists = {name: (real[name], simulated[name]) for name in names}
    return {
        "only in torch_npu": [n for n, (r, s) in lists.items() if r is not None and s is None],
        "only in simnpu": [n for n, (r, s) in lists.items() if r is None and s is not None],
        "in neither": [n for n, (r, s) in lists.items() if r is None and s is None],
        "other parameters": {
            n: {"torch_npu": ", ".join(r), "simnpu": ", ".join(s)}
            for n, (r, s) in lists.items()
            if isinstance(r, list) and isinstance(s, list) and r != s
        },
    }


def published_names() -> dict[str, dict[str, list[str]]]:
    """Sort the names in ``__all__`` of torch_npu's packages by what simnpu does with them."""
    listed = of_torch_npu(f"{package}.__all__" for package in PACKAGES)
    names = {package: sorted(listed[f"{package}.__all__"]) for package in PACKAGES}
    found = of_simnpu(f"{package}.{name}" for package in PACKAGES for name in names[package])
    table: dict[str, dict[str, list[str]]] = {}
    for package in PACKAGES:
        table[package] = {"there": [], "raises when called": [], "raises when looked up": []}
        for name in names[package]:
            full = f"{package}.{name}"
            there = "raises when called" if full in RAISES_WHEN_CALLED else "there"
            table[package]["raises when looked up" if found[full] is None else there].append(name)
    return table


def write(path: Path, content: dict[str, Any]) -> None:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments == ["--look-up"]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # torch_npu prints, too
        importlib.import_module("torch_npu")  # which adds the other names to torch
        json.dump({name: look_up(name) for name in sys.stdin.read().split()}, answers)
        answers.flush()
        os._exit(0)  # torch_npu's own end calls more of CANN than the stand-in has
    programs = json.loads(USED.read_text())["programs"] if USED.is_file() else {}
    programs |= installed_programs() | (programs_in(Path(arguments[0])) if arguments else {})
    names = set().union(*(program["names"] for program in programs.values()))
    write(USED, {"torch_npu": version_for_torch(), "programs": programs, **compare_names(names)})
    write(PUBLISHED, published_names())


if __name__ == "__main__":
    main(sys.argv[1:])
