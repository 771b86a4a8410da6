"""Linear attention (gated delta rule) of transformers' models: whether it keeps packed samples apart, and its decoding state.

transformers' modules call two functions of their Python module: a causal convolution over queries, keys and values, and the
gated delta rule. At import transformers replaces them by those of the packages ``causal_conv1d`` and ``fla`` where they are
installed (on the CPU :mod:`megascend.reference.fla` takes their place); its own do not know samples' borders. ``fla`` has a
convolution too, which :func:`use_convolution_of_fla` takes where ``causal_conv1d``, which must be compiled, is missing. A layer's
decoding state is the convolution's last inputs and the matrix of each head, whatever the length of the row; one token more is
computed by :func:`decoding_functions`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megascend.changes import patch, patched
from megascend.engines.common.key_values import DecodeStep, Prefill
from megascend.errors import ConfigError
from megascend.models.families.nemotron import step_limits
from megascend.reference import fla as reference_fla
from megascend.reference.fla.convolution import causal_conv1d_fn, causal_conv1d_update
from megascend.reference.fla.delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from megascend.training.kernels.host_copy import to_device

KIND = "linear_attention"
"""Entry of ``layer_types``."""
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Names of the two functions in transformers' modules."""
BORDERS = {DELTA_RULE: "cu_seqlens", CONVOLUTION: "seq_idx"}
"""Argument for samples' borders, by function."""
PACKAGE = "flash-linear-attention"
"""Distribution of ``fla``, whose functions know samples' borders."""
MARK = "__megascend_knows_borders__"
"""Attribute of a function of ours in place of transformers'."""
BORDERS_KEYWORD = "cu_seq_lens_q"
"""Keyword of a module's forward pass that becomes the delta rule's ``cu_seqlens``; ``seq_idx`` keeps its name."""
KERNEL_PACKAGES = ("fla", "causal_conv1d")
"""Packages whose functions run on accelerators only."""
STEP_LIMITS = "time_step_limit"
"""Attribute of transformers' state spaces with the smallest and largest step."""
STATES_ARE_KEPT = "sampling: states of linear attention are kept"


def forward_code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward pass, without decorators."""
    # transformers decorates many forward methods; the wrapper's code shows nothing of theirs.
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def forward_owner(module: nn.Module) -> ModuleType:
    """Return the Python module in which a module's forward pass, perhaps of a base class, looks functions up."""
    return sys.modules[inspect.unwrap(type(module).forward).__module__]


def delta_rule_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules of gated delta rules: those whose forward pass calls the two functions."""
    return [module for module in root.modules() if _calls_both(forward_code(module))]


def _calls_both(code: CodeType | None) -> bool:
    # By the functions that the code calls, not by class: families copy the module, and these functions are replaced.
    return code is not None and {CONVOLUTION, DELTA_RULE} <= set(code.co_names)


def packing_problem(module: nn.Module) -> Literal["none", "package", "module"]:
    """Return what keeps a module from keeping packed samples apart: nothing, a missing :data:`PACKAGE`, or the module itself."""
    code = forward_code(module)
    if code is None or not _calls_both(code):
        return "module"
    # The forward pass takes the delta rule's borders out of its keywords by name, and passes seq_idx on with the rest of them.
    if BORDERS_KEYWORD not in code.co_consts or not code.co_flags & inspect.CO_VARKEYWORDS:
        return "module"
    problem: Literal["none", "package"] = "none"
    for name, argument in BORDERS.items():
        function = getattr(forward_owner(module), name, None)
        variables = _replacement(function)
        if hasattr(function, MARK):
            continue
        if variables is None:
            return "module"
        # transformers drops arguments that a replacement does not have.
        if not variables["is_new_implementation"] or argument not in variables["applicable_params"]:
            problem = "package"
    return problem


def check_activation(model: nn.Module) -> None:
    """Raise ConfigError for a model whose convolutions have another activation than their kernels have."""
    for module in model.modules():
        activation = getattr(module, "activation", None)
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves and isinstance(activation, str) and activation not in ("silu", "swish"):
            settings = model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]
            name = next((name for name, value in settings.items() if value == activation), "hidden_act")
            raise ConfigError(
                f"{name}: {activation} with {settings['model_type']}: kernels of causal convolutions have silu only; correct "
                "config.json"
            )


def use_convolution_of_fla(model: nn.Module) -> None:
    """Let the linear attention of a transformers model convolve by ``fla`` where transformers has not found ``causal_conv1d``."""
    for owner in dict.fromkeys(map(forward_owner, delta_rule_modules(model))):
        before = getattr(owner, CONVOLUTION)
        variables = _replacement(before)
        # Not transformers' wrapper: ours, from an earlier model. A new implementation: causal_conv1d, or the reference.
        if variables is None or variables["is_new_implementation"]:
            continue
        try:
            convolve = import_module("fla.modules.convolution").causal_conv1d
        except ImportError:
            # Not refused here: without packing no borders are needed, and with it packing_problem() names the package.
            return
        patch(owner, CONVOLUTION, _convolution_of_fla(before, convolve), "fla's convolution knows samples' borders")


def compute_fp32_exactly(model: nn.Module) -> None:
    """Let the linear attention of a transformers model compute fp32 by :mod:`megascend.reference.fla` where ``fla`` computes it.

    Its kernels multiply fp32 in TF32. The functions are those of the process: models in other dtypes keep the kernels.
    """
    for owner in dict.fromkeys(map(forward_owner, delta_rule_modules(model))):
        before = getattr(owner, DELTA_RULE)
        implementation = (_replacement(before) or {}).get("implementation")
        if getattr(implementation, "__module__", "").split(".")[0] in KERNEL_PACKAGES:
            patch(owner, DELTA_RULE, _exact_in_fp32(before), "fp32 is computed in fp32, not in TF32")


def correct_steps(model: nn.Module) -> None:
    """Let the state spaces of a Nemotron-H model limit their steps by ``time_step_limit``, as its authors do.

    transformers takes ``time_step_min`` for the smallest step (huggingface/transformers#48989).
    """
    config: Any = model.config
    if config.model_type != "nemotron_h":
        return
    limits = step_limits(config.to_dict())
    for module in model.modules():
        if hasattr(module, STEP_LIMITS):
            patch(module, STEP_LIMITS, limits, "steps of state spaces are those of the configuration")


def _exact_in_fp32(before: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(chunk_gated_delta_rule).parameters

    def by_dtype(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        if query.dtype != torch.float32:
            return before(query, key, value, **kwargs)
        # transformers passes the keywords of the model's forward on, and drops those that a function does not have.
        options = {name: option for name, option in kwargs.items() if name in parameters}
        return chunk_gated_delta_rule(query, key, value, **options)

    setattr(by_dtype, MARK, True)
    return by_dtype


def _convolution_of_fla(before: Callable[..., Any], convolve: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        # By the tensor's device: the self-check computes a slice of the model on the CPU in a process whose model is on a GPU.
        if x.device.type != "cpu":
            # transformers' modules pass the delta rule's keywords to the convolution, too: fla takes starts where causal_conv1d
            # takes seq_idx. Its tokens come before channels.
            starts = kwargs.get(BORDERS_KEYWORD)
            out = convolve(x=x.transpose(1, 2), weight=weight, bias=bias, activation=activation, cu_seqlens=starts)
            return out[0].transpose(1, 2)
        if seq_idx is None:
            return before(x, weight, bias, activation=activation)
        return causal_conv1d_fn(x, weight, bias, seq_idx, activation)

    setattr(causal_conv1d, MARK, True)
    return causal_conv1d


def _replacement(function: Any) -> Mapping[str, Any] | None:
    """Return the closure of transformers' wrapper of a function, which holds its implementation; None for another function."""
    # transformers chooses at import, and the choice is nowhere but in the wrapper's closure.
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return variables if {"is_new_implementation", "applicable_params"} <= variables.keys() else None


@contextlib.contextmanager
def on_the_cpu(model: nn.Module) -> Iterator[None]:
    """Let the linear attention of a transformers model run on the CPU within the context, even if it has CUDA kernels.

    Complete rows are computed by transformers' own functions, packed samples by :mod:`megascend.reference.fla`.
    """
    with contextlib.ExitStack() as stack:
        for owner in dict.fromkeys(map(forward_owner, delta_rule_modules(model))):
            for function in BORDERS:
                variables = _replacement(getattr(owner, function)) or {}
                if getattr(variables.get("implementation"), "__module__", "").split(".")[0] in KERNEL_PACKAGES:
                    # Other implementations, transformers' own and the reference, run on the CPU unchanged.
                    portable = _portable(function, variables["torch_function"])
                    stack.enter_context(patched(owner, function, portable, "self-check: the slice is on the CPU"))
        yield


def _portable(function: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, **kwargs: Any) -> Any:
        if function == CONVOLUTION and seq_idx is not None:
            return causal_conv1d_fn(*args, seq_idx=seq_idx, activation=kwargs["activation"])
        if function == DELTA_RULE and cu_seqlens is not None:
            names = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
            return chunk_gated_delta_rule(*args, cu_seqlens=cu_seqlens, **{name: kwargs[name] for name in names})
        return plain(*args, **kwargs)

    return compute


def covered_kinds(model: Any) -> tuple[str, ...]:
    """Return :data:`KIND` if all such layers of a model are gated delta rules, whose state :func:`cached_delta_rules` keeps."""
    kinds: list[str] = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    # Other kinds of linear attention have the same entry in layer_types, and states that nothing here would keep.
    return (KIND,) if len(delta_rule_modules(model)) == kinds.count(KIND) else ()


@dataclass(frozen=True)
class DecodingFunctions:
    """Functions that compute one token of each row from the row's states.

    Attributes:
        convolve: takes x [rows, channels], the state [rows, channels, taps], which it updates in place, weight [channels, taps],
            bias and activation; returns the outputs, as x.
        delta_rule: :func:`megascend.reference.fla.delta_rule.fused_recurrent_gated_delta_rule`, or a function of its arguments.
    """

    convolve: Callable[[Tensor, Tensor, Tensor, Tensor | None, str | None], Tensor]
    delta_rule: Callable[..., tuple[Tensor, Tensor | None]]


@functools.cache
def decoding_functions(device_type: str) -> DecodingFunctions:
    """Return ``fla``'s kernels for decoding on GPUs where it is installed, else the reference functions, which run anywhere.

    The kernels compute in fp32 without matrix products, so that models in fp32 are decoded by them too.
    """
    if device_type == "cuda" and not reference_fla.is_installed():
        with contextlib.suppress(ImportError):
            update = import_module("fla.modules.convolution").causal_conv1d_update
            rule = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
            return DecodingFunctions(functools.partial(_convolve_by_fla, update), rule)
    return DecodingFunctions(_convolve_by_reference, fused_recurrent_gated_delta_rule)


def _convolve_by_fla(
    update: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    # The kernel takes the state as contiguous, and would update a copy of another.
    assert state.is_contiguous()
    return update(x=x, cache=state, weight=weight, bias=bias, activation=activation)[0]


def _convolve_by_reference(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    return causal_conv1d_update(x.unsqueeze(-1), state, weight, bias, activation).squeeze(-1)


@dataclass(frozen=True)
class LayerState:
    """The states of one layer of linear attention in a micro batch that fills the cache or grows its rows.

    Attributes:
        cached: use of the cache.
        layer: number of the layer.
    """

    cached: Prefill | DecodeStep
    layer: int

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        compute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Convolve tokens [batch, tokens, channels] with those before them; ``compute`` does it for complete samples."""
        cached, key = self.cached, (self.layer, "convolution")
        if isinstance(cached, DecodeStep):
            count = cached.rows.stop - cached.rows.start
            # Tokens after the rows' are padding, copies of the last one: they must not enter its state a second time.
            new, state = x.flatten(0, 1), cached.cache.state(key, cached.rows)
            out = decoding_functions(x.device.type).convolve(new[:count], state, weight, bias, activation)
            return nn.functional.pad(out, (0, 0, 0, len(new) - count)).view(x.shape)
        # One more than the next token needs: fla's kernel shifts its own input into the state.
        taps = weight.shape[1]
        for row, inputs in zip(cached.rows, cached.split(x.flatten(0, 1)), strict=True):
            # Before a sample's first token are zeros.
            last = nn.functional.pad(inputs, (0, 0, taps, 0))[len(inputs) :]
            cached.cache.fill_state(key, row, last.transpose(0, 1), len(inputs))
        return compute(x)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
        *,
        normalise: bool,
    ) -> Tensor:
        """Compute the gated delta rule of tokens, and keep their rows' states after them.

        Args:
            q, k, v, g, beta: see :func:`megascend.reference.fla.delta_rule.chunk_gated_delta_rule`.
            compute: computes complete samples with other ``g`` and ``beta``, and returns their final states too.
            normalise: queries and keys are not normalised yet.
        """
        cached, key = self.cached, (self.layer, "delta rule")
        if isinstance(cached, DecodeStep):
            count = cached.rows.stop - cached.rows.start
            # A view of the cache, which copy_() below writes to; each row's token is a sequence of length 1.
            state = cached.cache.state(key, cached.rows)
            rows: list[Any] = [x.flatten(0, 1)[:count].unsqueeze(1) for x in (q, k, v, g, beta)]
            names = ("q", "k", "v", "g", "beta")
            out, after = decoding_functions(v.device.type).delta_rule(
                **dict(zip(names, rows, strict=True)),
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=normalise,
            )
            assert after is not None
            state.copy_(after)
            padding = v.shape[0] * v.shape[1] - count
            return nn.functional.pad(out.squeeze(1), (0, 0, 0, 0, 0, padding)).view(v.shape)
        if cached.lengths != cached.padded_lengths:
            # Padding must not change a sample's final state: it neither decays it nor writes to it.
            pairs = zip(cached.lengths, cached.padded_lengths, strict=True)
            padding = torch.cat([torch.arange(padded) >= length for length, padded in pairs])
            padding = to_device(padding, g.device).view(g.shape[:2]).unsqueeze(-1)
            g, beta = g.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        # Complete samples are computed as in training, whose kernels return the states on demand.
        out, final = compute(g, beta)
        assert final is not None
        for row, state, length in zip(cached.rows, final, cached.lengths, strict=True):
            cached.cache.fill_state(key, row, state.float(), length)
        return out


class CurrentLayer:
    """The layer of linear attention that is running, for functions that are called without their module.

    Args:
        cached: returns the micro batch's use of the cache, or None.
    """

    def __init__(self, cached: Callable[[], Prefill | DecodeStep | None]) -> None:
        self._cached = cached
        self.state: LayerState | None = None

    @contextlib.contextmanager
    def watching(self, modules: Sequence[nn.Module], layer: Callable[[Any], int]) -> Iterator[None]:
        """Set :attr:`state` while one of the modules runs, within the context; ``layer`` returns a module's number."""

        def enter(module: nn.Module, inputs: Any) -> None:
            cached = self._cached()
            self.state = None if cached is None else LayerState(cached, layer(module))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.state = None

        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(enter).remove)
                # Also after an error: another model's layer that runs next must not write to this one's state.
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


@contextlib.contextmanager
def cached_delta_rules(model: nn.Module, cached: Callable[[], Prefill | DecodeStep | None]) -> Iterator[None]:
    """Keep the states of a transformers model's linear attention within the context.

    Args:
        cached: returns the current micro batch's use of the cache; with None it runs as before.
    """
    modules = delta_rule_modules(model)
    current = CurrentLayer(cached)
    with contextlib.ExitStack() as stack:
        stack.enter_context(current.watching(modules, lambda module: module.layer_idx))
        # Functions of the process: other models' layers find no current layer.
        for owner in dict.fromkeys(map(forward_owner, modules)):
            for function, wrap in ((CONVOLUTION, _convolution), (DELTA_RULE, delta_rule)):
                stack.enter_context(patched(owner, function, wrap(current, getattr(owner, function)), STATES_ARE_KEPT))
        yield


def _convolution(current: CurrentLayer, before: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            return before(x.transpose(1, 2), weight, bias, *args, activation=activation, **kwargs).transpose(1, 2)

        if current.state is None:
            return before(x, weight, bias, *args, activation=activation, **kwargs)
        return current.state.convolve(x.transpose(1, 2), weight, bias, activation, compute).transpose(1, 2)

    return causal_conv1d_fn


def delta_rule(current: CurrentLayer, before: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of fla's ``chunk_gated_delta_rule`` that keeps the states of the current layer, if there is one."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        def compute(g: Tensor, beta: Tensor, states: bool = True) -> tuple[Tensor, Tensor | None]:
            return before(
                q,
                k,
                v,
                g=g,
                beta=beta,
                output_final_state=states,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **kwargs,
            )

        if current.state is None:
            return compute(g, beta, output_final_state)
        # Nobody reads the second value: transformers' own cache is off, and mcore-bridge ignores it.
        return current.state.delta_rule(q, k, v, g, beta, compute, normalise=use_qk_l2norm_in_kernel), None

    return chunk_gated_delta_rule
