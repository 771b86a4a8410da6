"""Make the tables of docs/ (settings, metrics, options, versions, layouts, figures) when the site is built.

A page has ``<!-- table: NAME -->`` where a table goes; ``docs_hooks.py`` inserts it, by the functions in :data:`TABLES`.

    python scripts/docs_tables.py            # rewrite what is committed: requirements in pyproject.toml, published models
    python scripts/docs_tables.py --check    # exit with 1 if the requirements are out of date
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import BaseModel

from megascend import errors
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
from megascend.models.families.sparse_attention import REFUSED
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
PUBLISHED_COUNTS = DOCS.parent / "benchmarks" / "families" / "published.json"
TORCH_NPU_NAMES = DOCS.parent / "benchmarks" / "integrations" / "torch_npu-names.json"
TORCH_NPU_PROGRAMS = TORCH_NPU_NAMES.with_name("torch_npu-programs.json")
TORCH_NPU_OPERATORS = TORCH_NPU_NAMES.with_name("torch_npu-operators.txt")
MARKED = re.compile(r"^<!-- table: ([\w -]+) -->$", re.MULTILINE)
REQUIREMENTS = re.compile(r"( *# table: ([\w ]+)\n).*?( *# end of table\n)", re.DOTALL)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# --- settings ---


@cache
def settings() -> dict[str, str]:
    """Format the settings by command, a table for each section on the first page that has it; later pages link there."""
    _anchors.clear()
    kinds: dict[str, tuple[str, type[Section], type[Section] | None]] = {
        "settings of train and rl": ("settings.md", TrainerConfig, None),
        "settings of train": ("settings-train.md", RunConfig, TrainerConfig),
        "settings of rl": ("settings-rl.md", RlConfig, TrainerConfig),
        "settings of serve": ("settings-serve.md", ServeConfig, None),
    }
    tables = {}
    for name, (page, kind, base) in kinds.items():
        names = [name for name in kind.model_fields if base is None or name in kind.__annotations__]
        tables[name] = "\n".join(section_tables(page, kind, names))
    return tables


_anchors: dict[type[BaseModel], str] = {}  # sections that have a table already, which others link to


def section_tables(page: str, kind: type[BaseModel], names: Iterable[str], prefix: str = "") -> Iterator[str]:
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
                _anchors[section] = f"{page}#{key.replace('.', '')}"
                nested.append((key, section))
            kind_text = f"{'list of [sections]' if item else '[section]'}({_anchors[section]})"
        else:
            kind_text = type_text(field.annotation, field.metadata, quote="`")
        rows.append([f"`{key}`", kind_text, *default_and_meaning(kind, name)])
    heading = f"## `{prefix.rstrip('.')}`\n\n" if prefix else ""
    yield heading + table(["key", "type", "default", "meaning"], rows)
    for key, section in nested:
        yield from section_tables(page, section, section.model_fields, f"{key}.")


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
            kind_text = f"[`{section.__name__}`](../settings.md#{name})"
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
    for architecture in REFUSED:
        lacking, remedy = architecture.unreleased or ("", "")
        cell = f"refused: [no release of Megatron-Core has its layers](#deepseek-v4-and-glm-53-flash); {remedy}"
        rows.append([f"`{architecture.model_type}`", lacking, cell])
    return table(["`model_type`", "beside a plain decoder", "compared with Hugging Face on the Megatron engine"], rows)


def published_rows(describe: Callable[[str], PublishedModel] | None = None) -> list[list[str]]:
    """Count the published models of tests/models/published: parameters, a layout, and what a rank of it holds.

    Args:
        describe: describes one by its name; default: in a temporary folder, which takes a minute for all.
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
        names = ", ".join([entry["model"], *entry.get("same_configuration", [])])
        rows.append([f"`{model_type}`", names, f"{info.parameter_count:,}", text, *cells])
    return sorted(rows)


def published_models() -> str:
    """Format the published models by the committed counts, which tests/models/test_published.py compares."""
    header = ["`model_type`", "model", "parameters", "published", "layout", "parameters of a rank", "memory of a rank"]
    return table(header, json.loads(PUBLISHED_COUNTS.read_text(encoding="utf-8")))


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
        predicted = [f"{row['seconds']:.3g} s a step", f"{row['tokens_per_second']:,.0f} tokens/s a card"]
        predicted += [] if row["mfu"] is None else [f"MFU {row['mfu']:.0%}"]
        rows.append(
            [
                f"`{name}`",
                f"{row['cards']:,} x {row['title']}",
                f"{row['batch']:,} x {row['length']:,}",
                row["layout"].replace("*", r"\*"),
                ", ".join([*predicted, f"{row['memory_bytes'] / 2**30:.0f} GiB a card"]),
                row["measured"],
            ]
        )
    header = ("recipes/NAME.yaml", "cards", "samples x tokens", "layout", "predicted", "measured")
    return table(header, rows)


def names_of_torch_npu() -> str:
    """Format which of torch_npu's public names the simulated device has."""
    rows = []
    for module, states in json.loads(TORCH_NPU_NAMES.read_text(encoding="utf-8")).items():
        for state, found in states.items():
            if found:
                rows.append([module, f"{state}: {len(found)}", ", ".join(f"`{name}`" for name in found)])
    return table(["module", "", "names"], rows)


def names_of_programs() -> str:
    """Format which names of torch_npu each program uses, and which of them torch_npu or simnpu lacks."""
    content = json.loads(TORCH_NPU_PROGRAMS.read_text(encoding="utf-8"))

    def listed(names: list[str]) -> str:
        return ": ".join(filter(None, (str(len(names)), ", ".join(f"`{name}`" for name in names))))

    rows = []
    for name, program in content["programs"].items():
        used = program["names"]
        missing, nowhere = ([n for n in used if n in content[key]] for key in ("only in torch_npu", "in neither"))
        both = len(used) - len(missing) - len(nowhere)
        version = program["version"] or "this one"
        rows.append([name, version, str(len(used)), str(both), listed(missing), listed(nowhere)])
    return table(
        ["program", "version", "names", "in both", f"only in torch_npu {content['torch_npu']}", "in neither"], rows
    )


def other_parameters() -> str:
    """Format the Python functions of torch_npu that programs use and whose parameters differ in simnpu."""
    content = json.loads(TORCH_NPU_PROGRAMS.read_text(encoding="utf-8"))["other parameters"]
    rows = [[f"`{name}`", *(f"`({text})`" for text in parameters.values())] for name, parameters in content.items()]
    return table(["name", "torch_npu", "simnpu"], rows)


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


def error_classes() -> str:
    """Format the public errors: what each is besides, and when it is raised."""
    rows = []
    for name, error in vars(errors).items():
        if isinstance(error, type) and error.__module__ == errors.__name__ and error is not errors.MegascendError:
            bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not errors.MegascendError)
            rows.append([f"`{name}`", bases, sentence((error.__doc__ or "").split("\n\n")[0].replace("\n", " "))])
    return table(["class", "also a", "raised when"], rows)


# --- commands ---


GUIDES = {
    "init": "train.md#init",
    "train": "train.md",
    "prepare": "data.md#prepared-offline",
    "rl": "rl.md",
    "generate": "use.md#generate",
    "chat": "use.md#chat",
    "eval": "use.md#eval",
    "rollouts": "watch.md#rollouts",
    "serve": "serve.md",
    "plan": "planning.md",
    "run": "integrations/megatron.md",
    "job": "jobs.md",
    "doctor": "process.md#doctor",
    "show-config": "train.md#show-config",
    "new-model": "train.md#new-model",
    "export": "use.md#export",
    "push": "use.md#push",
    "simnpu": "simnpu.md",
}
"""Pages that explain the commands."""


def commands() -> str:
    """Format every command: what it does, its arguments and its options."""
    from typer.main import get_command

    from megascend.apps.cli.main import app

    parts = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = " ".join(option.name.upper() for option in command.params if not option.opts[0].startswith("-"))
        rows = [
            [
                ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts)),
                "required" if parameter.required else default_text(parameter.default),
                sentence((parameter.help or "").replace("\n", " ")),
            ]
            for parameter in command.params
        ]
        usage = " ".join(filter(None, ("megascend", name, arguments, "[OPTIONS]")))
        text = sentence(command.help.split("\n\n")[0].replace("\n", " "))
        heading = f"## {name}\n\n`{usage}`: {text} ([guide]({GUIDES[name]}))."
        parts.append(f"{heading}\n\n{table(['option', 'default', 'meaning'], rows)}")
    return "\n".join(parts)


def default_text(default: Any) -> str:
    """Format the default of an option; none for a flag that is off."""
    empty = default is None or default is False or default in ((), []) or callable(default)
    return "" if empty else f"`{default}`"


def simulated_operators() -> str:
    """Format which of torch_npu's operators simnpu has, from their names (``python -m real_torch_npu VERSION --names``)."""
    from simnpu.operators import OPERATORS

    names = [line for line in TORCH_NPU_OPERATORS.read_text().splitlines() if not line.startswith("#")]
    simulated = {name.partition(".")[0] for name in OPERATORS}
    groups = {True: [n for n in names if n in simulated], False: [n for n in names if n not in simulated]}
    rows = [
        (kind, str(len(groups[key])), ", ".join(f"`{n}`" for n in groups[key]))
        for kind, key in (("there", True), ("raises when looked up", False))
    ]
    return table(("torch_npu 2.13", str(len(names)), "names"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "errors": error_classes,
    "commands": commands,
    "settings of train and rl": lambda: settings()["settings of train and rl"],
    "settings of train": lambda: settings()["settings of train"],
    "settings of rl": lambda: settings()["settings of rl"],
    "settings of constructors": constructor_settings,
    "presets": presets,
    "settings of serve": lambda: settings()["settings of serve"],
    "metrics of train": lambda: metrics(declared_metrics(StepRecord)),
    "metrics of losses": lambda: metrics(LOSS_METRICS),
    "metrics of rl": lambda: metrics(declared_metrics(RlRecord)),
    "metrics of serve": service_metrics,
    "versions": versions,
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
    "names of torch_npu": names_of_torch_npu,
    "names of programs": names_of_programs,
    "other parameters": other_parameters,
    "simulated operators": simulated_operators,
}


PACKAGING: dict[str, Callable[[], str]] = {
    "requirements": requirements,
    "requirements of stacks": requirements_of_stacks,
}


def expanded(page: str) -> str:
    """Return the Markdown of a page with its tables."""
    return MARKED.sub(lambda match: f"\n{TABLES[match[1]]()}\n", page)


def packaging(text: str) -> str:
    """Return pyproject.toml with its requirements as the version table has them."""
    return REQUIREMENTS.sub(lambda match: f"{match[1]}{PACKAGING[match[2]]()}{match[3]}", text)


def main() -> None:
    """Rewrite what is committed, or with --check compare the requirements."""
    before = PROJECT.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if packaging(before) != before:
            sys.exit("pyproject.toml is out of date; run: python scripts/docs_tables.py")
        return
    PROJECT.write_text(packaging(before), encoding="utf-8")
    rows = ",\n ".join(json.dumps(row) for row in published_rows())
    PUBLISHED_COUNTS.write_text(f"[\n {rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
