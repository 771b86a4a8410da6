"""Write tables into docs/, between markers: settings, metrics, versions and layouts from code, figures from benchmarks/.

    python scripts/docs_tables.py            # rewrite the pages
    python scripts/docs_tables.py --check    # exit with 1 if a page is out of date

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; :data:`TABLES` has a function for each name. The
requirements in pyproject.toml stand between ``# table: NAME`` and ``# end of table``.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import BaseModel

from megascend.apps.rl.records import RlRecord
from megascend.apps.train.records import StepRecord
from megascend.config import RunConfig, Section, TrainerConfig
from megascend.config.commented import description, type_text
from megascend.config.rl import RlConfig
from megascend.config.rl_presets import PRESETS
from megascend.config.rules import Rule
from megascend.config.section import all_rules, section_in, section_of
from megascend.config.serve import ServeConfig
from megascend.engines.context import EVERY_ENGINE, EngineSpec
from megascend.engines.rules import MEGATRON, MEGATRON_MODEL, ON_TRANSFORMERS
from megascend.models.base import IndexedAttention, LatentAttention, expert_count
from megascend.models.checkpoint_files.info import TRAINED_HEAD
from megascend.models.families.qwen3_vl import UNDECLARED
from megascend.models.memory.parameters import stages
from megascend.models.registry import BUILT_IN
from megascend.runtime.bootstrap.megatron_adaptor import provider as megatron_adaptor_provider
from megascend.runtime.bootstrap.mindspeed import arguments as mindspeed_arguments
from megascend.runtime.bootstrap.mindspeed.tree import ADAPTOR_BRANCHES, BRANCHES
from megascend.runtime.bootstrap.providers import names
from megascend.runtime.bootstrap.versions import PACKAGES, STACKS
from megascend.testing.parity import Case
from megascend.testing.tiny_models import tiny_config
from megascend.training.batch.losses import LOSS_METRICS
from megascend.training.batch.metrics import Metric, declared_metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for its package support

from support.described import PUBLISHED, PublishedModel, describe_published, published_plan
from support.parity_matrix import family_matrix, matrix

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROJECT = DOCS.parent / "pyproject.toml"
MARKED = re.compile(
    r"(<!-- table: (?P<table>[\w ]+) -->\n).*?(<!-- end of table -->)"
    r"|( *# table: (?P<requirements>[\w ]+)\n).*?( *# end of table\n)",
    re.DOTALL,
)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# --- settings ---


def settings(kind: type[Section], base: type[Section] | None = None) -> str:
    """Format the settings of a command, a table for each section; with ``base``, only those that ``kind`` adds or redefines."""
    names = [name for name in kind.model_fields if base is None or name in kind.__annotations__]
    return "\n".join(section_tables(kind, names))


_anchors: dict[type[BaseModel], str] = {}  # sections that have a table already, which others link to


def section_tables(kind: type[BaseModel], names: Iterable[str], prefix: str = "") -> Iterator[str]:
    """Yield the table of a section's settings, then those of the sections within that have none yet."""
    nested: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for name in names:
        field, key = kind.model_fields[name], prefix + name
        annotation = kind.model_fields[name].annotation
        item = section_in(annotation) if get_origin(annotation) in (list, tuple) else None
        section = section_of(kind, name) or item
        if section is not None:
            if section not in _anchors:
                _anchors[section] = key.replace(".", "")
                nested.append((key, section))
            kind_text = f"{'list of [sections]' if item else '[section]'}(#{_anchors[section]})"
        else:
            kind_text = type_text(field.annotation, field.metadata, quote="`")
        rows.append([f"`{key}`", kind_text, *default_and_meaning(kind, name)])
    heading = f"### `{prefix.rstrip('.')}`\n\n" if prefix else ""
    yield heading + table(["key", "type", "default", "meaning"], rows)
    for key, section in nested:
        yield from section_tables(section, section.model_fields, f"{key}.")


def default_and_meaning(kind: type[BaseModel], name: str) -> list[str]:
    """Format the last two columns of a setting."""
    field, section = kind.model_fields[name], section_of(kind, name)
    if field.description is None and section is None:
        raise SystemExit(f"{kind.__name__}.{name} has no description: write Field(description=...)")
    default = (
        "required" if field.is_required() else "" if field.annotation is section else f"`{text_of(field.default)}`"
    )
    return [default, description(kind, name)]


def constructor_settings() -> str:
    """Format the settings of backends' constructors, with links to the sections."""
    rows = []
    for name, field in EngineSpec.model_fields.items():
        kind_text = type_text(field.annotation, field.metadata, quote="`")
        if name in TrainerConfig.model_fields and (section := section_of(EngineSpec, name)) is not None:
            kind_text = f"[`{section.__name__}`](#{name})"
        rows.append([f"`{name}`", kind_text, *default_and_meaning(EngineSpec, name)])
    return table(["setting", "type", "default", "meaning"], rows)


def text_of(value: Any) -> str:
    """Format a default as YAML has it."""
    if isinstance(value, Path) or value == "":
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(text_of(item) for item in value)}]"
    return value if isinstance(value, str) else json.dumps(value)


def sentence(text: str) -> str:
    """Convert reStructuredText's literals to Markdown's, and remove a full stop at the end."""
    return text.replace("``", "`").removesuffix(".")


def presets() -> str:
    """Format the presets of ``objective``: what each sets, with its paper."""
    rows = []
    for name, preset in PRESETS.items():
        values = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in preset.settings.items()
        )
        rows.append([f"`{name}`", values, f"{preset.paper}{f'; {preset.remark}' if preset.remark else ''}"])
    return table(["preset", "sets", "source"], rows)


# --- metrics ---


def metrics(declared: dict[str, Metric]) -> str:
    """Format metrics of metrics.jsonl."""
    return table(
        ["key", "unit", "meaning"], ([f"`{name}`", metric.unit, metric.meaning] for name, metric in declared.items())
    )


def service_metrics() -> str:
    """Format the Prometheus metrics of the service."""
    from types import SimpleNamespace

    from megascend.apps.serve.api.page import ServiceGauges
    from megascend.apps.serve.figures import Figures
    from megascend.apps.serve.samplers.vllm import Pool

    service: Any = SimpleNamespace(
        tenancy=SimpleNamespace(sessions=(), models=()),
        device_memory=lambda: {"allocated": 0, "peak": 0},
        futures=SimpleNamespace(pending_by_kind=dict),
    )
    pool: Any = SimpleNamespace(_servers=(), _failures={})
    families = [*Figures().registry.collect(), *ServiceGauges(service).collect(), *Pool.collect(pool)]
    rows = []
    for family in families:
        unit = next((unit for unit in ("seconds", "bytes") if family.name.removesuffix("_peak").endswith(unit)), "")
        suffix = "_total" if family.type == "counter" else ""
        rows.append([f"`{family.name}{suffix}`", family.type, unit, sentence(family.documentation)])
    return table(["name", "type", "unit", "meaning"], rows)


# --- versions ---


def versions() -> str:
    """Format the supported versions of each stack."""
    rows = ([name, *(ranges_text(stack.requirement(name)) for stack in STACKS)] for name in (*PACKAGES, "torch_npu"))
    branches = {stack.name: "none" for stack in STACKS}
    branches |= {stack: f"`{branch}`" for stack, branch in BRANCHES.items()}
    branches |= {stack: f"`{branch}`, optional" for stack, branch in ADAPTOR_BRANCHES.items()}
    providers = [f"`{names('npu', stack.name)[0]}`" for stack in STACKS]
    npu = [["provider (NPU)", *providers], ["MindSpeed branch (NPU)", *(branches[stack.name] for stack in STACKS)]]
    return table(["", *(f"stack {stack.name}" for stack in STACKS)], [*rows, *npu])


def ranges_text(versions: SpecifierSet) -> str:
    """Format a range of versions, lower bound first: ``>= 0.16.1, < 0.17``."""
    ordered = sorted(versions, key=lambda part: (not part.operator.startswith(">"), part.version))
    return ", ".join(f"{part.operator} {part.version}" for part in ordered)


def requirements() -> str:
    """List what every installation requires, as TOML: for each package of the version table all versions that a row admits."""
    return "".join(f'  "{package}{admitted(package)}",\n' for package in PACKAGES)


def admitted(package: str) -> str:
    """Return the requirement that admits what any row admits of ``package``, by leaving out what lies between two rows."""
    ranges = sorted(bounds(stack.requirement(package)) for stack in STACKS)
    lowest, end = ranges[0]
    left_out = []
    for lower, upper in ranges[1:]:
        if lower > end:
            series = range(end.minor, lower.minor)
            left_out += [f"!={lower.major}.{minor}.*" for minor in series]
            left_out += [f"!={lower.major}.{lower.minor}.{micro}" for micro in range(lower.micro)]
        end = max(end, upper)
    return ",".join([f">={lowest}", f"<{end}", *left_out])


def bounds(versions: SpecifierSet) -> tuple[Version, Version]:
    """Return lower and upper bound of a range of the version table."""
    by_operator = {part.operator: Version(part.version) for part in versions}
    return by_operator[">="], by_operator["<"]


def requirements_of_stacks() -> str:
    """List the extras of the version table, as TOML: a stack each, and torch_npu."""
    lines = []
    for stack in STACKS:
        pins = [f"{package}=={bounds(stack.requirement(package))[0]}" for package in ("megatron-core", "mcore-bridge")]
        ranges = [
            f"{package}{range_text(stack.requirement(package))}"
            for package in ("torch", "transformers", "peft", "numpy")
        ]
        undeclared = [f"{module}; sys_platform == 'linux'" for module in stack.undeclared]
        quoted = ", ".join(f'"{part}"' for part in (*pins, *ranges, *undeclared, *stack.further))
        lines.append(f"stack-{stack.name.replace('.', '-')} = [{quoted}]\n")
    npu = range_text(STACKS[0].requirement("torch_npu"))
    lines.append(f'npu = ["torch_npu{npu}", "scipy", "einops"]  # what MindSpeed imports without declaring it\n')
    return "".join(lines)


def range_text(versions: SpecifierSet) -> str:
    """Format a range as a requirement, lower bound first."""
    lower, upper = bounds(versions)
    return f">={lower},<{upper}"


# --- layouts ---


def compared_layouts() -> str:
    """Format the layouts of the parity tests, with the forms of micro batches that are compared in each."""
    compared: dict[tuple[str, bool], dict[str, None]] = {}
    for case in matrix():
        forms = compared.setdefault((layout_text(case), case.arch.endswith("_moe")), {})
        forms[
            ("packed" if case.packing else "padded") + ("" if case.precision == "fp32" else f" in {case.precision}")
        ] = None
    layouts = dict.fromkeys(layout for layout, _ in compared)
    rows = ([layout, *(", ".join(compared.get((layout, moe), ())) for moe in (False, True))] for layout in layouts)
    return table(["layout", "Qwen2, Qwen3, Llama", "Qwen3-MoE"], rows)


def families() -> str:
    """Format the declared architectures: what is particular about each, and what the tests compare it in."""
    layouts: dict[str, list[str]] = {}
    for case in family_matrix():
        layout, oldest = case.name.partition(": ")[2], BUILT_IN[case.arch].context_core
        newer = f" (Megatron-Core {oldest} and later)" if case.parallel.context > 1 and oldest else ""
        layouts.setdefault(case.arch, []).append(layout + newer)
    rows = []
    for model_type, architecture in sorted(BUILT_IN.items()):
        tiny = architecture.tiny
        parts = [
            "latent attention" if LatentAttention.from_config(tiny) else "",
            "sparse attention" if IndexedAttention.from_config(tiny_config(model_type)) else "",
            "state spaces" if tiny.get("mamba_num_heads") else "",
            "window" if tiny.get("sliding_window") else "",
            "sinks" if model_type == "gpt_oss" else "",
            f"experts ({architecture.router or 'softmax'} scores)" if expert_count(tiny) else "",
            "latent experts" if tiny.get("moe_latent_size") else "",
            "head for multi-token prediction" if architecture.prediction_head else "",
            "vision tower" if architecture.images is not None else "",
        ]
        missing = "not built by mcore-bridge; engines fsdp and single only"
        compared = ", ".join(layouts[model_type]) if architecture.proven else missing
        if architecture.megatron_core is not None:
            compared = f"Megatron-Core {architecture.megatron_core} and later: {compared}"
        if architecture.proven_with_images:
            compared = "with images, in the layouts of [Images](images.md#what-is-trained)"
        rows.append([f"`{model_type}`", ", ".join(filter(None, parts)), compared])
    rows += [[f"`{model_type}`", "vision tower", f"refused: {reason}"] for model_type, reason in UNDECLARED.items()]
    parts = "compressed attention, hyper-connections, experts chosen by token ids"
    rows.append(
        [
            "`deepseek_v4`",
            parts,
            "refused: [no release of Megatron-Core has its layers](#deepseek-v4); engine single only",
        ]
    )
    return table(["`model_type`", "beside a plain decoder", "compared with Hugging Face on the Megatron engine"], rows)


def published_models(describe: Callable[[str], PublishedModel] | None = None) -> str:
    """Format the published models of tests/models/published: counts, a layout, and what a rank of it holds.

    Args:
        describe: describes one by its name; default: in a temporary folder.
    """
    rows = []
    for name, entry in PUBLISHED.items():
        with tempfile.TemporaryDirectory() as temporary:
            model = describe(name) if describe else describe_published(name, Path(temporary))
            info, layout = model.info, entry["layout"]
            cells = ["engines fsdp and single", "", ""]
            if layout is not None:
                topology, memory = published_plan(model, layout)
                per_rank = stages(
                    info.tensors,
                    topology,
                    info.shape.num_layers,
                    info.shape.tied,
                    images=info.architecture.images,
                )
                names = {"tensor": "TP", "pipeline": "PP", "expert": "EP"}
                sizes = [f"{names[axis]}{layout[axis]}" for axis in names if layout[axis] > 1]
                cells = [
                    " x ".join([f"{layout['ranks']} rank{'s' if layout['ranks'] > 1 else ''}", *sizes]),
                    f"{max(stage.total for stage in per_rank) / 1e9:.2f} B",
                    f"{memory.total / 2**30:.1f} GiB",
                ]
        published = entry["parameters"]
        text = f"{published / 1e9:.0f} B" if entry["tolerance"] > 0.001 else f"{published:,}"
        model_type = model.config["model_type"]
        rows.append([f"`{model_type}`", entry["model"], f"{info.parameter_count:,}", text, *cells])
    header = ["`model_type`", "model", "parameters", "published", "layout", "parameters of a rank", "memory of a rank"]
    return table(header, sorted(rows))


def layout_text(case: Case) -> str:
    """Format the parallel sizes of a case that are not 1: ``TP2 x PP2 + SP``."""
    layout = case.parallel
    data = case.world_size // (layout.tensor * layout.pipeline * layout.context)
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline,
        "CP": layout.context,
        "EP": layout.expert,
        "DP": data if layout.expert == 1 else 1,  # experts are divided over data parallel ranks
    }
    sequence = layout.sequence if layout.sequence is not None else case.arch.endswith("_moe") and layout.tensor > 1
    parts = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"
    return parts + (" + SP" if sequence else "")


# --- measurements ---


def planning_figures(name: str) -> Any:
    """Read a file of benchmarks/planning."""
    return json.loads((DOCS.parent / "benchmarks" / "planning" / f"{name}.json").read_text(encoding="utf-8"))


def recipes() -> str:
    """Format the run files of recipes/ with their predicted figures."""
    rows = []
    for name, row in planning_figures("recipes").items():
        adapter = "" if row["lora"] is None else f", LoRA {row['lora']}"
        rows.append(
            [
                f"`recipes/{name}.yaml`",
                f"{row['hub']}: {row['task']}{adapter}",
                f"{row['cards']:,} x {row['title']}",
                f"{row['batch']:,} x {row['length']:,}",
                row["layout"],
                f"{row['seconds']:.3g}",
                f"{row['tokens_per_second']:,.0f}",
                "" if row["mfu"] is None else f"{row['mfu']:.0%}",
                f"{row['memory_bytes'] / 2**30:.0f}",
            ]
        )
    header = (
        "run file",
        "model and task",
        "cards",
        "samples x tokens",
        "layout",
        "s/step",
        "tokens/s a card",
        "MFU",
        "GiB a card",
    )
    return table(header, rows)


def rules(table_of_rules: Iterable[Rule[Any] | tuple[str, Rule[Any]]]) -> str:
    """Format the settings that an engine, a model or another setting excludes."""
    words = {
        "{model}": "the model",
        "{model_type}": "the model",
        "{objectives}": "other losses",
        "{platform.name}": "the platform",
        "engine {engine}": "this engine",
    }

    def text(template: str) -> str:
        return re.sub(r"(engine )?\{[^}]*\}", lambda match: words.get(match[0], "..."), template)

    settings: dict[tuple[str, str], list[str]] = {}
    for entry in table_of_rules:
        prefix, rule = entry if isinstance(entry, tuple) else ("", entry)
        setting, _, reason = rule.text.partition(": ")
        key, _, what = setting.partition(" with ")
        settings.setdefault((text(what), text(reason)), []).append(f"`{prefix}{key}`")
    rows = [[", ".join(keys), what, reason] for (what, reason), keys in settings.items()]
    return table(["setting", "with", "because, and what to do"], rows)


def rules_of_settings() -> str:
    """Format the settings that exclude each other; those of a section that occurs twice under its first name."""
    prefixes: dict[Rule[Any], str] = {}
    for kind in (RunConfig, RlConfig, ServeConfig):
        for prefix, rule in all_rules(kind):
            prefixes.setdefault(rule, prefix)
    return rules((prefix, rule) for rule, prefix in prefixes.items())


TABLES: dict[str, Callable[[], str]] = {
    "settings of train and rl": lambda: settings(TrainerConfig),
    "settings of train": lambda: settings(RunConfig, base=TrainerConfig),
    "settings of rl": lambda: settings(RlConfig, base=TrainerConfig),
    "settings of constructors": constructor_settings,
    "presets": presets,
    "settings of serve": lambda: settings(ServeConfig),
    "metrics of train": lambda: metrics(declared_metrics(StepRecord)),
    "metrics of losses": lambda: metrics(LOSS_METRICS),
    "metrics of rl": lambda: metrics(declared_metrics(RlRecord)),
    "metrics of serve": service_metrics,
    "versions": versions,
    "requirements": requirements,
    "requirements of stacks": requirements_of_stacks,
    "compared layouts": compared_layouts,
    "families": families,
    "published models": published_models,
    "rules of settings": rules_of_settings,
    "rules of mindspeed": lambda: rules(mindspeed_arguments.RULES),
    "rules of megatron adaptor": lambda: rules(megatron_adaptor_provider.RULES),
    "rules of every engine": lambda: rules(EVERY_ENGINE),
    "rules of fsdp": lambda: rules(ON_TRANSFORMERS),
    "rules of megatron": lambda: rules((*MEGATRON, *MEGATRON_MODEL)),
    "rules of families": lambda: rules(
        dict.fromkeys(
            rule
            for family in BUILT_IN.values()
            for rule in (*family.rules, *family.layout_rules, *family.stage_rules, *TRAINED_HEAD)
        )
    ),
    "recipes": recipes,
}


def rewritten(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Return a page with its tables as the code declares them; one that is not in ``tables`` stays."""
    _anchors.clear()

    def block(match: re.Match[str]) -> str:
        name = match["table"] or match["requirements"]
        if name in TABLES and name not in tables:
            return match[0]
        if match["requirements"]:
            return f"{match[4]}{tables[name]()}{match[6]}"
        return f"{match[1]}\n{tables[name]()}\n{match[3]}"

    return MARKED.sub(block, text)


def outdated(tables: Mapping[str, Callable[[], str]] = TABLES) -> dict[Path, str]:
    """Return the pages that differ from what the code declares, with the text that they should have."""
    pages = {page: page.read_text(encoding="utf-8") for page in (PROJECT, *sorted(DOCS.rglob("*.md")))}
    return {page: text for page, before in pages.items() if (text := rewritten(before, tables)) != before}


def main() -> None:
    """Rewrite the pages, or with --check name those that are out of date."""
    pages = outdated()
    if "--check" in sys.argv[1:]:
        if pages:
            names = ", ".join(page.name for page in pages)
            sys.exit(f"out of date: {names}; run: python scripts/docs_tables.py")
        return
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
