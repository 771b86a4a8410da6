"""Registries of what run files name: what is built in, and what :func:`megascend.register_engine` and its like add.

A row has what is known without importing torch. The module that it names, or for a loss :mod:`megascend.training.batch.losses`,
has the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, TypeVar

from megascend.errors import ConfigError

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name, in the order in which messages list them.

    Args:
        kind: what they are, for messages.
        function: function with which a plug-in registers another one.
        built_in: the entries of this package.
    """

    def __init__(self, kind: str, function: str, built_in: Mapping[str, Entry]) -> None:
        super().__init__(built_in)
        self.kind, self.function = kind, function

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry; raise ConfigError if another one has its name. The same one again changes nothing."""
        # A plug-in may be imported under two names.
        if self.setdefault(name, entry) != entry:
            raise ConfigError(
                f"{self.function.rpartition('.')[2]}: another {self.kind} is called {name!r}; names in use: {', '.join(self)}"
            )

    def require(self, name: str, setting: str | None = None) -> Entry:
        """Return an entry; raise ConfigError, which lists those that exist, if there is none of this name.

        Args:
            setting: setting that has the name; default: the kind.
        """
        check_registered(self.kind, name, self, self.function, setting)
        return self[name]


def check_registered(kind: str, name: str, names: Iterable[str], function: str, setting: str | None = None) -> None:
    """Raise ConfigError if ``name`` is not among ``names``. Arguments as of :class:`Registry`."""
    names = list(names)
    if name not in names:
        matches = get_close_matches(name, names, 1)
        advice = f", did you mean {matches[0]}? Known" if matches else "; known"
        raise ConfigError(
            f"{setting or kind}: unknown {kind} {name!r}{advice}: {', '.join(names)}. Register yours on every rank "
            f"({function}; a run file names the module under plugins)"
        )


def load(entry: Any) -> Any:
    """Return what an entry holds, imported if it is an import path, ``module:attribute``."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)


# --- engines ---


@dataclass(frozen=True)
class EngineEntry:
    """An engine.

    Attributes:
        backend: subclass of :class:`megascend.Backend`, or function that returns one; or the import path of a built-in one.
        megatron: it runs on Megatron-Core, so a provider patches the process for the platform. For other engines nothing is
            patched, replaced or redirected, and Megatron is not imported.
        packages: packages of the version table that must be installed in a supported version; with ``megatron`` all of them.
        always_pads: micro batches are padded whatever ``batching.packing`` is.
        contiguous: a context parallel rank holds consecutive tokens of a sequence.
        memory: formulas that estimate a rank's memory: of Megatron-Core's stages, of FSDP2's shards, or of a whole model; None:
            not estimated.
        second_model: its backend can hold a frozen model of another architecture beside the trained one.
    """

    backend: Callable[..., Any] | str
    megatron: bool = False
    packages: tuple[str, ...] = ("torch", "transformers")
    always_pads: bool = False
    contiguous: bool = False
    memory: Literal["stages", "shards", "whole"] | None = None
    second_model: bool = False


ENGINES = Registry(
    "engine",
    "megascend.register_engine",
    {
        "megatron": EngineEntry("megascend.backends:MegatronBackend", megatron=True, memory="stages"),
        "single": EngineEntry("megascend.backends:SingleBackend", always_pads=True, memory="whole", second_model=True),
        "fsdp": EngineEntry("megascend.backends:FsdpBackend", contiguous=True, memory="shards", second_model=True),
    },
)


# --- providers ---


@dataclass(frozen=True)
class ProviderEntry:
    """A provider, which prepares a process for Megatron-Core on a device.

    Attributes:
        factory: creates the provider; or its import path, ``module:attribute``.
        platforms: names of supported platforms; empty: all.
        packages: top-level packages that it imports and that patch other packages, or are detected by them.
        stacks: names of supported rows of the version table; empty: all.
    """

    factory: Callable[..., Any] | str
    platforms: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()


PROVIDERS = Registry(
    "provider",
    "megascend.register_provider",
    {
        "mindspeed": ProviderEntry(
            "megascend.runtime.bootstrap.mindspeed:MindSpeed", ("npu",), ("mindspeed",), ("0.16", "0.15")
        ),
        "megatron_adaptor": ProviderEntry(
            "megascend.runtime.bootstrap.megatron_adaptor:MegatronAdaptor",
            ("npu",),
            ("megatron_adaptor", "mindspeed"),
            ("0.19", "0.18"),
        ),
        "transformer_engine": ProviderEntry("megascend.runtime.bootstrap.providers:TransformerEngine", ("cuda",)),
        "reference": ProviderEntry("megascend.runtime.bootstrap.reference:Reference", ("cpu", "cuda")),
    },
)


# --- trackers ---


@dataclass(frozen=True)
class TrackerEntry:
    """An experiment tracker.

    Attributes:
        open: opens it (:class:`megascend.Tracker`); or the import path of a built-in one.
        package: module that must be installed, or None.
        extra: extra of megascend that installs the package, or None.
    """

    open: Callable[..., Any] | str
    package: str | None = None
    extra: str | None = None


TRACKERS = Registry(
    "tracker",
    "megascend.register_tracker",
    {
        "tensorboard": TrackerEntry("megascend.apps.tracking.built_in:TensorBoard", "tensorboard", "track"),
        "wandb": TrackerEntry("megascend.apps.tracking.built_in:Wandb", "wandb", "wandb"),
        "swanlab": TrackerEntry("megascend.apps.tracking.built_in:SwanLab", "swanlab", "swanlab"),
        "trackio": TrackerEntry("megascend.apps.tracking.built_in:Trackio", "trackio", "trackio"),
        "mlflow": TrackerEntry("megascend.apps.tracking.built_in:Mlflow", "mlflow", "mlflow"),
    },
)


# --- losses ---

LossUnit = Literal["token", "sample", "pair"]


@dataclass(frozen=True)
class BuiltInLoss:
    """Declaration of a built-in loss; attributes as of :class:`megascend.Loss`."""

    per: LossUnit = "token"
    requires: tuple[str, ...] = ()
    of: Literal["logprobs", "values"] = "logprobs"


_OF_SAMPLED_TOKENS = BuiltInLoss(requires=("old_logprobs", "advantages"))
_OF_A_TEACHER = BuiltInLoss(requires=("candidates",))
_OF_LABELS = BuiltInLoss("sample", ("label",), "values")

LOSSES: Registry[Any] = Registry(
    "loss",
    "megascend.register_loss",
    {
        "cross_entropy": BuiltInLoss(),
        "importance_sampling": _OF_SAMPLED_TOKENS,
        "ppo": _OF_SAMPLED_TOKENS,
        "cispo": _OF_SAMPLED_TOKENS,
        "gspo": _OF_SAMPLED_TOKENS,
        "dro": _OF_SAMPLED_TOKENS,
        "stable_reinforce": _OF_SAMPLED_TOKENS,
        "dpo": BuiltInLoss("pair", ("ref_logprobs",)),
        "orpo": BuiltInLoss("pair"),
        "simpo": BuiltInLoss("pair"),
        "kto": BuiltInLoss("sample", ("ref_logprobs", "label")),
        "value": BuiltInLoss(requires=("returns",), of="values"),
        "clipped_value": BuiltInLoss(requires=("returns", "old_values"), of="values"),
        "bradley_terry": BuiltInLoss("pair", of="values"),
        "single_label_classification": _OF_LABELS,
        "multi_label_classification": _OF_LABELS,
        "regression": _OF_LABELS,
        "forward_kl": _OF_A_TEACHER,
        "reverse_kl": _OF_A_TEACHER,
        "jsd": _OF_A_TEACHER,
    },
)
"""Each is the function of its name in ``training/batch/losses.py`` or ``policy_losses.py``, which put a :class:`Loss` here."""
BUILT_IN_LOSSES = frozenset(LOSSES)


def losses_of_data() -> list[str]:
    """Return the losses that ``loss`` of a run file names: those of what data has, and those with sections for the rest."""
    fields = {"ref_logprobs", "label"}
    of_data = [name for name, loss in LOSSES.items() if loss.of == "logprobs" and fields.issuperset(loss.requires)]
    return [*of_data, "bradley_terry", "classification"]


def losses_of_responses(fields: Sequence[str] = ("old_logprobs", "advantages")) -> list[str]:
    """Return the losses that learn from sampled responses, whose tokens have these fields."""
    return [
        name
        for name, loss in LOSSES.items()
        if loss.per == "token" and loss.of == "logprobs" and {*fields}.issuperset(loss.requires)
    ]


def check_loss_of_responses(name: str, *, reference: bool) -> None:
    """Raise ConfigError for a loss that is unknown, or cannot learn from sampled responses.

    Args:
        reference: the run has a reference model, so that samples have ``ref_logprobs``.
    """
    fields = ("old_logprobs", "advantages", *(["ref_logprobs"] if reference else []))
    names = losses_of_responses(fields)
    if name not in LOSSES or name in names:
        check_registered("loss of sampled responses", name, names, LOSSES.function, "objective.loss")
        return
    missing = [field for field in LOSSES[name].requires if field not in fields]
    needs = ", ".join(missing) or f"one of {LOSSES[name].of} per {LOSSES[name].per}"
    remedy = "; set reference: for ref_logprobs" if missing == ["ref_logprobs"] else ""
    raise ConfigError(
        f"objective.loss: {name} needs {needs}; responses have {' and '.join(fields)}, token by token{remedy}"
    )


# --- inference engines ---


@dataclass(frozen=True)
class InferenceEngineEntry:
    """An inference engine of ``megascend rl``.

    Attributes:
        make: import path of the function that makes its client (:data:`megascend.apps.rl.engines.MakeEngine`).
        content: what it is, for documentation.
        is_server: it runs before the run, at the address that is the entry, and takes signed requests.
        copies: copies of the model's weights that it holds in the memory of rank 0's host.
        returns_experts: it can return the experts that it chose for each token.
    """

    make: str
    content: str
    is_server: bool = False
    copies: int = 0
    returns_experts: bool = True


_CLIENTS = "megascend.apps.rl.engines"
INFERENCE_ENGINES = {
    # Copies: the weights in use, and those of an update until it takes effect.
    "local": InferenceEngineEntry(
        f"{_CLIENTS}:local_engine", "transformers in a process beside rank 0", copies=2, returns_experts=False
    ),
    "vllm": InferenceEngineEntry(
        f"{_CLIENTS}:started_vllm_engine", "a vLLM server that the run starts on rank 0's host"
    ),
    "http://HOST:PORT": InferenceEngineEntry(f"{_CLIENTS}:vllm_engine", "a vLLM server", is_server=True),
}
"""By their entries in ``engines``, of servers by the form of the address."""


def inference_engine(name: str) -> InferenceEngineEntry:
    """Return the row of an entry of ``engines``; raise ConfigError if there is none."""
    scheme, separator, host = name.partition("://")
    form = f"{scheme}://HOST:PORT" if separator and host.strip("/") else name
    if form not in INFERENCE_ENGINES:
        raise ConfigError(
            f"engines: {name!r} is none of {', '.join(INFERENCE_ENGINES)}; an SGLang server may only be teacher.engine"
        )
    return INFERENCE_ENGINES[form]


# --- formats of data ---

_FILES = "megascend.apps.data.files"
TEXT_FORMAT = f"{_FILES}:TEXT"
DATA_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson"), f"{_FILES}:JSONL"),
    ".json": f"{_FILES}:JSON",
    **dict.fromkeys((".csv", ".tsv"), f"{_FILES}:CSV"),
    ".parquet": f"{_FILES}:PARQUET",
    ".arrow": f"{_FILES}:ARROW",
    **dict.fromkeys((".txt", ".md", ".rst"), TEXT_FORMAT),
}
"""Formats of the files that are read, by their endings: import path of the :class:`megascend.apps.data.files.Format`."""
COMPRESSIONS = (".gz", ".bz2", ".zst")
"""Second endings that files of all formats without a table may have."""
