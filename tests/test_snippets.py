"""Programs, run files and commands on README and the pages work.

Separate tests cover pages that are followed from top to bottom: test_pages.py, the integrations.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.main import get_command

from megascend.apps.cli.main import app
from megascend.config import RunConfig
from megascend.config.rl import RlConfig
from megascend.testing import run_distributed, write_tiny_checkpoint
from support.forked_programs import run_forked

ROOT = Path(__file__).parents[1]
OUTSIDE = str(ROOT / "tests" / "outside")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "cookbook" / "README.md"]


@dataclass(frozen=True)
class Block:
    """A block of code on a page, from its ``line``."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """First line that is neither empty, a comment nor ``import megascend``."""
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        return next((line for line in lines if line != "import megascend"), lines[0])

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


def fenced_blocks() -> list[Block]:
    """Return the fenced blocks that name a language."""
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 2
            blocks.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return blocks


BLOCKS = fenced_blocks()


def block(page: str, beginning: str) -> Block:
    """Return the block of a page whose first line starts with ``beginning``."""
    (match,) = [candidate for candidate in BLOCKS if candidate.page == page and candidate.first.startswith(beginning)]
    return match


# --- programs ---

Around = Callable[[Path], dict[str, Any]]


def nothing(folder: Path) -> dict[str, Any]:
    return {}


def with_backend(folder: Path, **options: Any) -> dict[str, Any]:
    """Build a backend, samples with an extra field, and a data stream with state."""
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

    namespace = with_backend(folder, adapters=megascend.Adapters())
    for name in ("alice", "bob"):
        namespace["backend"].add_adapter(name, megascend.Lora(rank=2))
    return namespace | {"batches": dict.fromkeys(("alice", "bob"), namespace["samples"])}


def with_a_small_model(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder / "tiny", "runs/quickstart/model")
    return {}


def with_packages_from_outside(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, OUTSIDE)
    return {}


def check_sample(namespace: dict[str, Any]) -> None:
    assert len(namespace["sample"]) == 3
    assert namespace["sample"].extra["teacher"].shape == (3,)


def check_own_loss(namespace: dict[str, Any]) -> None:
    assert namespace["backend"].optimizer_step().grad_norm > 0


def check_progress(namespace: dict[str, Any]) -> None:
    assert namespace["progress"] == {"data": {"position": 3}}


def check_tenants(namespace: dict[str, Any]) -> None:
    assert all(future.result().loss > 0 for future in namespace["losses"].values())
    assert all(future.result().grad_norm > 0 for future in namespace["steps"].values())


def check_targets(namespace: dict[str, Any]) -> None:
    assert set(namespace["lora"].targets) == set(namespace["adapters"].targets)


def check_sampled(namespace: dict[str, Any]) -> None:
    assert [answer.error for answer in (namespace["alice"], namespace["bob"], namespace["base"])] == [None] * 3
    assert len(namespace["alice"].samples) == 4
    assert len(namespace["bob"].prompt_logprobs) == len(b"the sky is")


def check_graphs(namespace: dict[str, Any]) -> None:
    assert namespace["batching"].cuda_graphs.max_tokens == 8192


def check_tracker_logs(namespace: dict[str, Any]) -> None:
    from megascend.apps.tracking.trackers import Trackers

    trackers = Trackers({"lines": {}}, Path("run"), {})
    trackers.log(1, {"loss": 0.5})
    trackers.log_texts(1, {"one?": "two"})
    trackers.close("finished")
    lines = [json.loads(line) for line in Path("run/trackers/lines.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5}, {"step": 1, "answers": {"one?": "two"}}]


def check_loss_is_known(namespace: dict[str, Any]) -> None:
    from megascend.training.batch.losses import resolve

    assert resolve("focal").function is namespace["focal"]


def check_engine_is_known(namespace: dict[str, Any]) -> None:
    from megascend import backends

    assert backends.accepted_settings("bigram") >= {"model", "optimizer", "seed"}


def check_provider_is_known(namespace: dict[str, Any]) -> None:
    from megascend.runtime.bootstrap import providers

    assert "mine" in providers.names("npu")


def check_architecture_is_that_of_the_package(namespace: dict[str, Any]) -> None:
    import parrot  # noqa: F401  registering another of that name is an error

    from megascend.models import registered

    assert registered("parrot") is not None


def check_targets_are_known(namespace: dict[str, Any]) -> None:
    from megascend.training.lora import target_maps

    assert target_maps._by_model_type["my_model_type"] is namespace["layer_targets"]


def check_readme(namespace: dict[str, Any]) -> None:
    assert not namespace["update"].skipped
    assert namespace["result"].loss < 3.0  # 5.8 at first, of 320 tokens
    assert Path("runs/readme/hf/model.safetensors").stat().st_size > 0


def check_two_adapters(namespace: dict[str, Any]) -> None:
    assert namespace["step"].adapters["bob"].grad_norm > 0
    assert Path("runs/lora/merged/model.safetensors").stat().st_size > 0


def check_callback(namespace: dict[str, Any]) -> None:
    from megascend.apps.train.callbacks import TrainerControl

    control, watch = TrainerControl(SimpleNamespace(), 0), namespace["Watch"]()  # type: ignore[reportArgumentType]
    requests = []
    for loss in (2.0, 3.0, 7.0, None):
        control.should_save = False
        watch.on_step(control, {"loss": loss})
        requests.append((control.should_save, control.should_training_stop))
    assert requests == [(False, False), (False, False), (True, False), (False, True)]


def check_reward(namespace: dict[str, Any]) -> None:
    assert namespace["sorted_digits"]("13", {"answer": "134."}) == 0.5


def check_nothing(namespace: dict[str, Any]) -> None:
    """Check nothing: the program only has to run."""


FOLDER: dict[tuple[str, str], tuple[int, Around, Callable[[dict[str, Any]], None]]] = {
    ("README.md", "megascend.bootstrap()"): (1, with_a_small_model, check_readme),
    ("docs/watch.md", "class Watch"): (1, nothing, check_callback),
    ("docs/api/index.md", "megascend.bootstrap()"): (1, nothing, check_nothing),
    ("docs/losses.md", "sample = megascend.Sample.causal"): (
        1,
        lambda folder: {"token_ids": list(range(20))},
        check_sample,
    ),
    ("docs/losses.md", "def reverse_kl"): (1, with_backend, check_own_loss),
    ("docs/lora.md", "megascend.bootstrap()"): (1, with_a_small_model, check_two_adapters),
    ("docs/lora.md", "layers = "): (1, nothing, check_targets),
    ("docs/lora.md", "queue = megascend.AdapterQueue"): (1, with_tenants, check_tenants),
    ("docs/cuda-graphs.md", "batching = megascend.Batching(micro_batch_tokens=8192, cuda_graphs"): (
        1,
        nothing,
        check_graphs,
    ),
    ("docs/sampling.md", "sampler = megascend.Sampler"): (1, with_tenants, check_sampled),
    ("docs/npu.md", "megascend.bootstrap(parallel="): (1, nothing, check_nothing),
    ("docs/parallelism.md", "megascend.Parallel("): (1, nothing, check_nothing),
    ("docs/rl.md", "def sorted_digits"): (1, nothing, check_reward),
    ("docs/reliability.md", "pending = backend.save"): (1, with_backend, check_progress),
    ("docs/extend.md", "import torch"): (1, nothing, check_loss_is_known),
    ("docs/extend.md", "class BigramBackend(megascend.Backend):"): (1, nothing, check_engine_is_known),
    ("docs/extend.md", "class MyProvider"): (1, nothing, check_provider_is_known),
    ("docs/extend.md", "import json"): (1, nothing, check_tracker_logs),
    ("docs/extend.md", "megascend.register_architecture"): (
        *(1, with_packages_from_outside),
        check_architecture_is_that_of_the_package,
    ),
    ("docs/extend.md", "from megascend.training.lora.target_maps"): (1, nothing, check_targets_are_known),
}
"""Programs to run: the number of ranks, a setup that builds the namespace, and a check of the result."""

IN_PYTEST = ("docs/extend.md", "from megascend.config import Parallel")
"""The test of an architecture, called as pytest would call it."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snippets")
    write_tiny_checkpoint(folder / "tiny", "qwen3")
    return folder


@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize("key", FOLDER, ids=lambda key: f"{key[0]}: {key[1]}")
def test_page_program_runs(key: tuple[str, str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, around, check = FOLDER[key]
    program = block(*key)
    monkeypatch.chdir(tmp_path)

    def on_rank() -> None:
        import megascend

        namespace: dict[str, Any] = {"megascend": megascend} | (prepared if world_size > 1 else around(tiny))
        exec(compile("\n" * program.line + program.text, str(ROOT / program.page), "exec"), namespace)
        check(namespace)
        if "backend" in namespace:
            namespace["backend"].close()

    prepared = around(tiny) if world_size > 1 else {}
    run_distributed(on_rank, world_size, init=False)


def test_program_of_engine_single_runs(tiny: Path, tmp_path: Path) -> None:
    """Run it in a process without Megatron."""
    shutil.copytree(tiny / "tiny", tmp_path / "runs" / "quickstart" / "model")
    program = tmp_path / "program.py"
    program.write_text(block("docs/fsdp.md", "backend = megascend.SingleBackend").text)
    completed = run_forked(program, directory=tmp_path, timeout_s=120)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "runs" / "single" / "hf" / "model.safetensors").stat().st_size > 0


@pytest.mark.usefixtures("megatron_imported")
def test_architecture_test_of_a_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    program = block(*IN_PYTEST)
    namespace: dict[str, Any] = {}
    exec(compile("\n" * program.line + program.text, str(ROOT / program.page), "exec"), namespace)
    namespace["test_it_trains_as_in_hugging_face"](None, tmp_path)


# --- run files ---

SETTINGS = {"model": "PATH", "output": "PATH", "data": {"path": "PATH"}}
RL_SETTINGS = {
    "model": "PATH",
    "output": "PATH",
    "rollout": {"prompts": "PATH", "reward": "package.module:function"},
}


@pytest.mark.parametrize("run_file", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_page_run_file_is_valid(run_file: Block) -> None:
    settings = yaml.safe_load(run_file.text)
    is_rl = run_file.page.startswith("docs/rl") or "rollout" in settings
    kind, required = (RlConfig, RL_SETTINGS) if is_rl else (RunConfig, SETTINGS)
    kind.model_validate(required | settings)


# --- commands ---

PROGRAMS = ("megascend", "python", "bash", "torchrun", "pip", "git", "source", "export", "pre-commit", ".ci/run")


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of the indented command lines, without leading variables and trailing comments."""
    commands_by_page = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for line in re.sub(r" \\\n *", " ", text).splitlines():
            if not line.startswith("    "):
                continue
            command = re.sub(r"^(\w+=\S+ )+", "", re.sub(r"\s+# .*| {3,}#.*", "", line.strip()))
            command = re.sub(r" > \S+$", "", command)
            if command.startswith(tuple(f"{program} " for program in PROGRAMS)) or command in PROGRAMS:
                commands_by_page.append((str(page.relative_to(ROOT)), command))
    return commands_by_page


@pytest.mark.parametrize("command", sorted({c for _, c in commands() if c.startswith("megascend ")}))
def test_commands_on_pages_parse(command: str) -> None:
    name, *arguments = shlex.split(command)[1:]
    group: Any = get_command(app)
    group.get_command(None, name).make_context(name, arguments)
