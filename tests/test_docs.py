"""What the documentation says about the code, where that can be read from both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megascend.bootstrap.mindspeed.arguments import NEEDS_MEGATRON_TRAINING
from simnpu.__main__ import make_parser
from simnpu.settings import FORMER_NAMES

ROOT = Path(__file__).resolve().parent.parent
NPU = (ROOT / "docs" / "npu.md").read_text(encoding="utf-8")


def test_the_refused_options_are_listed() -> None:
    paragraph = NPU[NPU.index("The names refused for `megatron.training`") :].partition("\n\n")[0]
    assert tuple(re.findall(r"`(\w+)`", paragraph)) == NEEDS_MEGATRON_TRAINING


def test_the_examples_of_tests_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "own-tests.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert sum("def test_" in program for program in programs) == 3
    for number, program in enumerate(programs):
        (tmp_path / f"test_example_{number}.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "3 passed" in done.stdout


def test_the_simulated_devices_settings_are_listed() -> None:
    page = (ROOT / "docs" / "simnpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*?)\| `(SIMNPU\w*)` \| `(\w+)` \|", page, re.MULTILINE)
    assert {former: name for _, name, former in rows} == FORMER_NAMES
    documented = {option for cell, *_ in rows for option in re.findall(r"`(--\w+)", cell)}
    parser_options = {option for action in make_parser()._actions for option in action.option_strings}
    assert documented == {option for option in parser_options if option.startswith("--")} - {
        "--help",
        "--check",
        "--version",
    }
    migration = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert all(f"| `{former}` | `{name}` |" in migration for former, name in FORMER_NAMES.items())


PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
OLD = {"migration.md", "CHANGELOG.md"}
"""Pages that speak of what was."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OLD], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`x/y.py` is below the repository, src, src/megascend or src/simnpu; a name in angle brackets or capitals is anybody's."""
    folders = [ROOT, ROOT / "src", ROOT / "src" / "megascend", ROOT / "src" / "simnpu", ROOT / "tests"]
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|sh|md))`", page.read_text(encoding="utf-8")))
    missing = sorted(path for path in named if not any((folder / path).exists() for folder in folders))
    assert missing == [], f"{page.name} names files that are not there"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OLD], ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    from importlib.util import find_spec

    missing = []
    for name in set(re.findall(r"\b((?:megascend|simnpu)(?:\.[a-z_]+){2,})\b", page.read_text(encoding="utf-8"))):
        package, _, last = name.rpartition(".")
        if find_spec(package.split(".")[0]) is None or not _is_there(package, last):
            missing.append(name)
    assert sorted(missing) == [], f"{page.name} names modules that are not there"


def _is_there(package: str, last: str) -> bool:
    """Whether ``package.last`` is a module, or a name in one."""
    path = ROOT / "src" / Path(*package.split("."))
    if (path / f"{last}.py").exists() or (path / last).is_dir():
        return True
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return any(re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")) for file in files if file.exists())


WRITTEN_OUT = {
    "LoRA": "low-rank adaptation",
    "MoE": "mixtures? of experts|models with experts",
    "TP": "tensor",
    "PP": "pipeline",
    "CP": "context",
    "DP": "data parallel",
    "EP": "expert",
    "ETP": "expert tensor",
    "SP": "sequence",
    "KL": "Kullback-Leibler",
    "NCCL": "NVIDIA's collective communications library",
    "HCCL": "Huawei's",
    "FSDP2": "fully sharded|without Megatron",
    "HSDP": "hybrid",
    "CANN": "toolkit",
    "RoPE": "rotary",
}
GUIDES = (
    *("README.md", "docs/index.md", "docs/quickstart.md", "docs/own-data.md", "docs/single.md", "docs/data.md"),
    *(
        "docs/parallelism.md",
        "docs/lora.md",
        "docs/rl.md",
        "docs/reliability.md",
        "docs/weightsync.md",
        "docs/limits.md",
        "docs/features.md",
        "docs/npu.md",
        "docs/npu-acceptance.md",
        "docs/simnpu.md",
        "docs/fsdp.md",
        "docs/own-tests.md",
        "docs/sampling.md",
        "docs/hosts.md",
        "docs/support.md",
        "docs/controller.md",
        "docs/errors.md",
        "docs/architecture.md",
        "cookbook/README.md",
        "docs/cli.md",
        "docs/api.md",
        "docs/engines.md",
        "docs/fsdp-numerics.md",
        "docs/fsdp-internals.md",
    ),
)


@pytest.mark.parametrize("page", GUIDES)
def test_abbreviations_are_written_out_where_they_first_appear(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|^ {4}.*?$|^#.*?$|\]\([^)]*\)|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    bare = []
    for short, long in WRITTEN_OUT.items():
        if first := re.search(rf"(?<![\w-]){short}[2-8]?\b", prose):
            until = prose[: prose.find("\n\n", first.end())].replace("\n", " ")
            if not re.search(long, until, re.IGNORECASE):
                bare.append(short)
    assert bare == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_the_page_of_the_api_has_every_public_name_and_no_other() -> None:
    import megascend
    from megascend.backend import Backend
    from megascend.errors import MegascendError

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = {
        match[1]
        for row in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
        for match in re.finditer(r"`(\w+)[^`]*`", row)
    }
    public = {name: getattr(megascend, name) for name in megascend.__all__ if name != "__version__"}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, MegascendError)}
    methods = {name for name in vars(Backend) if not name.startswith("_")}
    there = (public.keys() - errors) | methods
    assert listed - there == set(), "docs/api.md lists names that are not there"
    assert there - listed == set(), "add a row to docs/api.md for each"
    of_errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert [name for name in errors if f"`{name}`" not in of_errors and name != "MegascendError"] == []


LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "cookbook" / "README.md"]


@pytest.mark.parametrize("page", sorted(LINKING), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if file.startswith("http"):
            continue
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = text[text.index("\nnav:") :]
    listed = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    parts = re.findall(r"^  - ([\w ]+):$", navigation, re.MULTILINE)
    assert parts == ["Getting started", "Guides", "Reference", "Internals", "Measurements"]


def guides() -> list[str]:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    part = navigation.partition("  - Getting started:")[2].partition("  - Reference:")[0]
    return re.findall(r": ([\w/-]+\.md)$", part, re.MULTILINE)


@pytest.mark.parametrize("page", guides())
def test_a_guide_begins_with_what_it_is_for_and_shows_how_to_begin(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert re.match(r"[A-Z`].*\w", lines[2]), "a sentence that says what the page is for"
    assert any(line.startswith(("```", "    ")) for line in lines[3:32]), "a command or a program on the first screen"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As `pip install -e '.[docs]'` and `mkdocs build --strict` do it."""
    from importlib.util import find_spec

    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs or mkdocs-material is not installed: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert 'not included in the "nav"' not in done.stderr
    assert (tmp_path / "site" / "own-data" / "index.html").is_file()


INTEGRATIONS = sorted(page for page in (ROOT / "docs" / "integrations").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", INTEGRATIONS, ids=lambda page: page.name)
def test_the_start_of_every_integration_is_run_by_a_test_that_a_script_runs(page: Path) -> None:
    assert "\n## Five-minute start\n" in page.read_text(encoding="utf-8")
    (test,) = (ROOT / "tests" / "integrations").rglob(f"test_{page.stem}_start.py")
    source = test.read_text(encoding="utf-8")
    assert f'"{page.name}"' in source or f"docs/integrations/{page.name}" in source, f"{test} does not read {page.name}"
    folder = test.parent.relative_to(ROOT)
    needs_environment = "importorskip" in source or "pytest.skip" in source
    script = (ROOT / "scripts" / "test_integrations.sh").read_text(encoding="utf-8")
    assert f" {folder} " in script or not needs_environment, f"scripts/test_integrations.sh does not run {folder}"
