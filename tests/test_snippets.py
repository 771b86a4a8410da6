"""Programs and run files that README and the pages show run or are accepted; commands take the options that are shown.

Pages that tests of their own follow from top to bottom are left to those: own-data.md, the integrations, README's programs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from megascend.cli.main import app
from megascend.config import Lora, RunConfig, TrainerConfig
from megascend.config.rl import RlConfig
from megascend.testing import run_distributed, write_tiny_checkpoint

ROOT = Path(__file__).parents[1]
OUTSIDE = str(ROOT / "tests" / "outside")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "cookbook" / "README.md"]


@dataclass(frozen=True)
class Block:
    """A block of code on a page; ``line`` is where it begins there."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """Its first line that is neither empty, a comment nor an import of megascend alone."""
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        return next((line for line in lines if line != "import megascend"), lines[0])

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


def fenced_blocks() -> list[Block]:
    """Blocks between fences that name a language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 2
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


BLOCKS = fenced_blocks()


def block(page: str, beginning: str) -> Block:
    """Return the block of a page whose first line begins so."""
    (found,) = [each for each in BLOCKS if each.page == page and each.first.startswith(beginning)]
    return found


# --- programs ---

Around = Callable[[Path], dict[str, Any]]


def nothing(folder: Path) -> dict[str, Any]:
    return {}


def with_backend(folder: Path, **options: Any) -> dict[str, Any]:
    """A backend, samples with a field of their own, and what a program keeps of its data."""
    import torch

    import megascend

    backend = megascend.MegatronBackend(model=folder / "tiny", precision="fp32", timeout_s=60, **options)
    samples = [megascend.Sample.causal(list(range(1, 9)), prompt_length=2) for _ in range(2)]
    for sample in samples:
        sample.extra = {"teacher": -torch.rand(len(sample))}

    class Stream:
        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

    return {"backend": backend, "samples": samples, "stream": Stream()}


def with_tenants(folder: Path) -> dict[str, Any]:
    import megascend

    found = with_backend(folder, adapters=megascend.Adapters())
    for name in ("alice", "bob"):
        found["backend"].add_adapter(name, megascend.Lora(rank=2))
    return found | {"batches": dict.fromkeys(("alice", "bob"), found["samples"])}


def with_a_small_model(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder / "tiny", "runs/quickstart/model")
    return {}


def with_packages_from_outside(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, OUTSIDE)
    return {}


def check_sample(found: dict[str, Any]) -> None:
    assert len(found["sample"]) == 3
    assert found["sample"].extra["teacher"].shape == (3,)


def check_own_loss(found: dict[str, Any]) -> None:
    assert found["backend"].optimizer_step().grad_norm > 0


def check_progress(found: dict[str, Any]) -> None:
    assert found["progress"] == {"data": {"position": 3}}


def check_tenants(found: dict[str, Any]) -> None:
    assert all(future.result().loss > 0 for future in found["losses"].values())
    assert all(future.result().grad_norm > 0 for future in found["steps"].values())


def check_targets(found: dict[str, Any]) -> None:
    assert set(found["lora"].targets) == set(found["adapters"].targets)


def check_sampled(found: dict[str, Any]) -> None:
    assert [answer.error for answer in (found["alice"], found["bob"], found["base"])] == [None] * 3
    assert len(found["alice"].samples) == 4
    assert len(found["bob"].prompt_logprobs) == len(b"the sky is")


def check_graphs(found: dict[str, Any]) -> None:
    assert found["batching"].cuda_graphs.max_tokens == 8192


def check_trained(found: dict[str, Any]) -> None:
    assert found["step"].grad_norm > 0


def check_tracker_is_told(found: dict[str, Any]) -> None:
    from megascend.tracking.trackers import Trackers

    trackers = Trackers({"lines": {}}, Path("run"), {})
    trackers.log(1, {"loss": 0.5})
    trackers.log_texts(1, {"one?": "two"})
    trackers.close("finished")
    lines = [json.loads(line) for line in Path("run/trackers/lines.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5}, {"step": 1, "answers": {"one?": "two"}}]


def check_loss_is_known(found: dict[str, Any]) -> None:
    from megascend.batch.losses import resolve

    assert resolve("focal").function is found["focal"]


def check_engine_is_known(found: dict[str, Any]) -> None:
    from megascend import backends

    assert backends.settings_of("bigram") >= {"model", "optimizer", "seed"}


def check_provider_is_known(found: dict[str, Any]) -> None:
    from megascend.bootstrap import providers

    assert "mine" in providers.names("npu")


def check_architecture_is_that_of_the_package(found: dict[str, Any]) -> None:
    import parrot  # noqa: F401  registering another of that name is an error

    from megascend.models import registered

    assert registered("parrot") is not None


def check_targets_are_known(found: dict[str, Any]) -> None:
    from megascend.lora import target_maps

    assert target_maps._by_model_type["my_model_type"] is found["layer_targets"]


def check_reward(found: dict[str, Any]) -> None:
    assert found["sorted_digits"]("13", {"answer": "134."}) == 0.5


def check_nothing(found: dict[str, Any]) -> None:
    """That it runs is all there is to see."""


HERE: dict[tuple[str, str], tuple[int, Around, Callable[[dict[str, Any]], None]]] = {
    ("docs/api.md", "megascend.bootstrap()"): (1, nothing, check_nothing),
    ("docs/data.md", "sample = megascend.Sample.causal"): (
        1,
        lambda folder: {"token_ids": list(range(20))},
        check_sample,
    ),
    ("docs/data.md", "def reverse_kl"): (1, with_backend, check_own_loss),
    ("docs/lora.md", "layers = "): (1, nothing, check_targets),
    ("docs/lora.md", "queue = megascend.AdapterQueue"): (1, with_tenants, check_tenants),
    ("docs/benchmarks.md", "batching = megascend.Batching(micro_batch_tokens=8192, cuda_graphs"): (
        1,
        nothing,
        check_graphs,
    ),
    ("docs/serve.md", "sampler = megascend.Sampler"): (1, with_tenants, check_sampled),
    ("docs/npu.md", "megascend.bootstrap(parallel="): (1, nothing, check_nothing),
    ("docs/parallelism.md", "megascend.Parallel("): (1, nothing, check_nothing),
    ("docs/quickstart.md", "megascend.bootstrap()"): (2, with_a_small_model, check_trained),
    ("docs/rl.md", "def sorted_digits"): (1, nothing, check_reward),
    ("docs/reliability.md", "pending = backend.save"): (1, with_backend, check_progress),
    ("docs/contributing.md", "import torch"): (1, nothing, check_loss_is_known),
    ("docs/contributing.md", "from megascend.engines.context import EngineSpec"): (1, nothing, check_engine_is_known),
    ("docs/contributing.md", "class MyProvider"): (1, nothing, check_provider_is_known),
    ("docs/contributing.md", "import json"): (1, nothing, check_tracker_is_told),
    ("docs/contributing.md", "megascend.register_architecture"): (
        *(1, with_packages_from_outside),
        check_architecture_is_that_of_the_package,
    ),
    ("docs/contributing.md", "from megascend.lora.target_maps"): (1, nothing, check_targets_are_known),
}
"""Programs that are run below: on how many ranks, with what around them, and what is to be seen afterwards."""

IN_PYTEST = ("docs/contributing.md", "from megascend.config import Parallel")
"""The test of an architecture, which is called as pytest would call it."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snippets")
    write_tiny_checkpoint(folder / "tiny", "qwen3")
    return folder


@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize("key", HERE, ids=lambda key: f"{key[0]}: {key[1]}")
def test_a_program_runs(key: tuple[str, str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, around, check = HERE[key]
    program = block(*key)
    monkeypatch.chdir(tmp_path)

    def on_rank() -> None:
        import megascend

        found: dict[str, Any] = {"megascend": megascend} | (prepared if world_size > 1 else around(tiny))
        exec(compile("\n" * program.line + program.text, str(ROOT / program.page), "exec"), found)
        check(found)
        if "backend" in found:
            found["backend"].close()

    prepared = around(tiny) if world_size > 1 else {}
    run_distributed(on_rank, world_size, init=False)


@pytest.mark.usefixtures("megatron_imported")
def test_the_test_of_an_architecture_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    program = block(*IN_PYTEST)
    found: dict[str, Any] = {}
    exec(compile("\n" * program.line + program.text, str(ROOT / program.page), "exec"), found)
    found["test_it_trains_as_in_hugging_face"](None, tmp_path)


# --- run files ---

SETTINGS = {"model": "PATH", "output": "PATH", "data": {"path": "PATH"}}
RL_SETTINGS = {
    "model": "PATH",
    "output": "PATH",
    "rollout": {"prompts": "PATH", "reward": "package.module:function"},
}


@pytest.mark.parametrize("each", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_a_run_file_is_accepted(each: Block) -> None:
    if each.page == "docs/rl.md":
        assert RlConfig.model_validate(RL_SETTINGS | yaml.safe_load(each.text)) == RlConfig.model_validate(RL_SETTINGS)
    else:
        RunConfig.model_validate(SETTINGS | yaml.safe_load(each.text))


def test_every_setting_of_rl_is_documented_with_its_default() -> None:
    documented = yaml.safe_load(block("docs/rl.md", "engines: ").text)
    defaults = RlConfig.model_validate(RL_SETTINGS).model_dump(mode="json")
    own = {name: value for name, value in defaults.items() if name not in TrainerConfig.model_fields}
    assert keys_of(documented) == keys_of(own)


def test_every_setting_is_documented_with_its_default() -> None:
    documented = yaml.safe_load(block("docs/cli.md", "model: PATH").text)
    assert keys_of(documented) == keys_of(RunConfig.model_validate(SETTINGS).model_dump(mode="json"))
    assert RunConfig.model_validate(documented) == RunConfig.model_validate(SETTINGS)
    text = block("docs/cli.md", "model: PATH").text
    of_lora = yaml.safe_load(textwrap.dedent("\n".join(re.findall(r"^#( .*)$", text, re.MULTILINE))))
    assert of_lora.keys() == Lora().model_dump().keys()
    assert Lora(**of_lora) == Lora()


def keys_of(values: dict[str, Any], prefix: str = "") -> set[str]:
    """Names of all settings; ``provider_options`` has none of its own."""
    found = set()
    for name, value in values.items():
        found |= keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found


# --- commands ---

PROGRAMS = ("megascend", "python", "bash", "torchrun", "pip", "git", "source", "export", "pre-commit", ".ci/run")


def commands() -> list[tuple[str, str]]:
    """(page, command) of the indented lines that are one, without what a variable in front or a comment behind says."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for line in re.sub(r" \\\n *", " ", text).splitlines():
            if not line.startswith("    "):
                continue
            command = re.sub(r"^(\w+=\S+ )+", "", re.sub(r"\s+# .*| {3,}#.*", "", line.strip()))
            if command.startswith(tuple(f"{program} " for program in PROGRAMS)) or command in PROGRAMS:
                found.append((str(page.relative_to(ROOT)), command))
    return found


@pytest.mark.parametrize("command", sorted({c for _, c in commands() if c.startswith("megascend ")}))
def test_the_command_line_takes_the_options_that_pages_show(command: str) -> None:
    name, *arguments = shlex.split(command)[1:]
    group: Any = get_command(app)
    group.get_command(None, name).make_context(name, arguments)


def test_scripts_take_the_options_that_pages_show() -> None:
    shown = sorted(
        {command for _, command in commands() if re.match(r"python scripts/(bench_train|parity)\.py", command)}
    )
    assert len(shown) >= 5
    for command in shown:
        _, script, *options = shlex.split(command)
        text = (ROOT / script).read_text(encoding="utf-8")
        assert [option for option in options if option.startswith("--") and f'"{option}"' not in text] == [], command


@pytest.mark.nightly
@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    """As README has it, but that nothing is installed: its environment is this one."""
    bin = tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    path = ":".join([str(ROOT / "src"), *(entry for entry in sys.path if entry)])
    for name, line in {
        "python": f'exec {sys.executable} "$@"',
        "megascend": f'exec {sys.executable} -m megascend.cli.main "$@"',
        "pip": "exit 0",
    }.items():
        (bin / name).write_text(f"#!/bin/sh\nexport PYTHONPATH={path}\n{line}\n")
        (bin / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quickstart.sh")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "MEGASCEND_VENV": str(tmp_path / "venv"),
            "MEGASCEND_RUN": str(tmp_path / "run"),
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "== Done" in done.stdout
    assert (tmp_path / "run" / "run" / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "run" / "metrics.png").is_file()
