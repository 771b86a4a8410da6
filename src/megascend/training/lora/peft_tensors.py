"""Conversion between unsharded factors and the tensors of peft's ``adapter_model.safetensors``. Pure functions.

For fused experts see peft/tuners/lora/layer.py, class ``ParamWrapper``: A is [experts * rank, in] with the expert slowest, B
is [out, rank * experts] with the expert fastest, and of two adapted parameters of one module the first that the module
declares is nested in the second's wrapper (``experts.base_layer``).

Factors of an embedding are parameters named ``lora_embedding_A`` [rank, vocabulary] and ``lora_embedding_B`` [hidden, rank].
If the embedding or output layer is adapted, peft also saves its base weight (``base_layer.weight``).

A scalar head is a full weight (``score.weight``), which peft saves beside the factors for ``modules_to_save``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megascend.errors import CheckpointError
from megascend.training.lora.factors import Factors, head_factors, head_weight
from megascend.training.lora.target_modules import EMBEDDING, HEAD, OUTPUT, is_embedding, matches

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Fused parameters of an ``experts`` module, in the order that transformers declares them."""

_PREFIX = "base_model.model."
_KEY = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_((?P<factor>[AB])\.weight|embedding_(?P<embedding>[AB]))")
_BASE_KEY = re.compile(re.escape(_PREFIX) + rf"(?P<module>(.+\.)?({EMBEDDING}|{OUTPUT}))\.base_layer\.weight")
_HEAD_KEY = f"{_PREFIX}{HEAD}.weight"
_ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)")


def is_expert_parameter(name: str) -> bool:
    """Check whether a projection is a fused parameter of all experts of a layer."""
    parts = name.split(".")
    return parts[-1] in EXPERT_PARAMETERS and parts[-2:-1] == ["experts"]


def to_tensors(factors: Mapping[str, Factors], rank: int) -> dict[str, Tensor]:
    """Convert ``factors`` to PEFT's names and shapes."""
    tensors = {}
    for name, pair in factors.items():
        _check_factors(name, pair, rank)
        if name == HEAD:
            tensors[_HEAD_KEY] = head_weight(pair).clone()
            continue
        a, b = pair.a, pair.b
        if a.ndim == 3:
            # peft keeps one matrix for all experts: rows of A by expert, then rank; columns of B by rank, then expert.
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
        module = _peft_module(name, factors)
        ends = ("lora_embedding_A", "lora_embedding_B") if is_embedding(name) else ("lora_A.weight", "lora_B.weight")
        for end, tensor in zip(ends, (a, b), strict=True):
            # clone: safetensors refuses tensors that share memory, as q, k and v may share one A
            tensors[f"{_PREFIX}{module}.{end}"] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors


def base_layer(key: str) -> str | None:
    """Return the embedding or output layer whose base weight peft saves under ``key``; None for any other key."""
    match = _BASE_KEY.fullmatch(key)
    return match["module"] if match else None


def to_factors(tensors: Mapping[str, Tensor], rank: int, target_parameters: Iterable[str]) -> dict[str, Factors]:
    """Invert :func:`to_tensors`. Skips weights of the base model among ``tensors`` (see ``check_base_weights``).

    ``target_parameters``: of the configuration; the only name of a single pair of an ``experts`` module.
    """
    target_parameters = list(target_parameters)
    factors: dict[str, Factors] = {}
    if (head := tensors.get(_HEAD_KEY)) is not None:
        if head.ndim != 2 or not head.numel():
            raise CheckpointError(f"{WEIGHTS}: {_HEAD_KEY} is {list(head.shape)}; a head has a row for each label")
        factors[HEAD] = head_factors(head.float(), rank)
        tensors = {key: tensor for key, tensor in tensors.items() if key != _HEAD_KEY}
    fused: dict[str, dict[int, Factors]] = {}
    single: dict[str, dict[str, dict[int, Factors]]] = {}
    for module, pair in _pairs(tensors).items():
        # Two adapted parameters of one module are nested wrappers; the depth tells them apart.
        bare = re.sub(r"(\.base_layer)+$", "", module)
        depth = (len(module) - len(bare)) // len(".base_layer")
        expert = _ONE_EXPERT.fullmatch(module)
        if expert:
            projections = single.setdefault(expert["experts"], {})
            projections.setdefault(expert["projection"], {})[int(expert["index"])] = pair
        elif bare.split(".")[-1] == "experts":
            fused.setdefault(bare, {})[depth] = pair
        elif depth:
            raise CheckpointError(f"{WEIGHTS} holds {_PREFIX}{module}.lora_A.weight, an adapter inside another")
        else:
            factors[module] = pair
    for experts, layers in fused.items():
        factors |= _fused_experts(experts, layers, rank, target_parameters)
    for experts, projections in single.items():
        if experts in fused:
            raise CheckpointError(f"{WEIGHTS} holds {experts} both fused and one by one")
        factors |= _single_experts(experts, projections, rank)
    for name, pair in factors.items():
        _check_factors(name, pair, rank, WEIGHTS)
    return factors


def _peft_module(name: str, names: Collection[str]) -> str:
    """Return the module in which PEFT keeps the factors of projection ``name`` if it adapts ``names``."""
    if not is_expert_parameter(name):
        return name
    experts, _, parameter = name.rpartition(".")
    # peft wraps a module once for each adapted parameter, and every further wrapper holds the one before as base_layer.
    outer = EXPERT_PARAMETERS[EXPERT_PARAMETERS.index(parameter) + 1 :]
    return experts + ".base_layer" * sum(f"{experts}.{other}" in names for other in outer)


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return A and B of every module, in float32 and the stored shapes."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if base_layer(key) is not None:
            continue
        match = _KEY.fullmatch(key)
        if match is not None and bool(match["embedding"]) != is_embedding(match["module"]):
            raise CheckpointError(f"{WEIGHTS} holds {key}; lora_embedding_A and B are supported for {EMBEDDING} only")
        if match is None:
            raise CheckpointError(
                f"{WEIGHTS} holds {key}, which is not a factor of plain LoRA ({_PREFIX}LAYER.lora_A.weight or lora_B)"
            )
        if not tensor.is_floating_point() or tensor.ndim != 2:
            raise CheckpointError(
                f"{WEIGHTS}: {key} must be a matrix of floating-point values, found {tensor.dtype} {list(tensor.shape)}"
            )
        pairs.setdefault(match["module"], {})[match["factor"] or match["embedding"]] = tensor.float()
    for module, pair in pairs.items():
        for factor, other in ("AB", "BA"):
            if factor not in pair:
                raise CheckpointError(f"{WEIGHTS} holds lora_{other} of {module}, but no lora_{factor}")
    return {module: Factors(pair["A"], pair["B"]) for module, pair in pairs.items()}


def _fused_experts(
    experts: str, layers: Mapping[int, Factors], rank: int, target_parameters: list[str]
) -> dict[str, Factors]:
    """Unfold and name the pairs of one ``experts`` module.

    Args:
        layers: pairs by depth of nesting, 0 outermost.
    """
    names = [f"{experts}.{p}" for p in EXPERT_PARAMETERS if matches(f"{experts}.{p}", target_parameters)]
    if sorted(layers) != list(range(len(names))):
        raise CheckpointError(
            f"{WEIGHTS} holds {len(layers)} pair(s) of factors of {experts}, but target_parameters of {CONFIG}, "
            f"{target_parameters}, names {len(names)} of its parameters {', '.join(EXPERT_PARAMETERS)}"
        )
    factors = {}
    # The parameter that is declared first is nested deepest.
    for depth, name in zip(sorted(layers, reverse=True), names, strict=True):
        a, b = layers[depth].a, layers[depth].b
        if a.shape[0] % rank or b.shape[1] != a.shape[0]:
            raise CheckpointError(
                f"{WEIGHTS}: the factors of {name} are {list(a.shape)} and {list(b.shape)}; expected experts * r rows "
                f"and as many columns, and r is {rank} in {CONFIG}"
            )
        count = a.shape[0] // rank
        a = a.reshape(count, rank, -1)
        b = b.reshape(b.shape[0], rank, count).permute(2, 0, 1).contiguous()
        factors[name] = Factors(a, b)
    if len(factors) == 2:
        gate_up, down = factors.values()
        # The pairs have no separate names in the file: swapped ones would load if the sizes happen to fit.
        if gate_up.a.shape[-1] != down.b.shape[-2] or gate_up.b.shape[-2] != 2 * down.a.shape[-1]:
            raise CheckpointError(
                f"{WEIGHTS}: gate_up_proj of {experts} would be {_description(gate_up)} and down_proj "
                f"{_description(down)}, which do not fit together"
            )
    return factors


def _single_experts(experts: str, projections: Mapping[str, Mapping[int, Factors]], rank: int) -> dict[str, Factors]:
    """Stack factors of single experts (checkpoints of transformers 4) into factors of the fused parameters."""
    counts = {projection: sorted(pairs) for projection, pairs in projections.items()}
    expected = list(range(1 + max(indices[-1] for indices in counts.values())))
    for projection, indices in counts.items():
        if indices != expected:
            missing = sorted(set(expected) - set(indices))
            raise CheckpointError(f"{WEIGHTS} lacks {projection} of experts {missing} of {experts}")
        for index, pair in projections[projection].items():
            _check_factors(f"{experts}.{index}.{projection}", pair, rank, WEIGHTS)
    factors = {}
    if "gate_proj" in projections or "up_proj" in projections:
        factors[f"{experts}.gate_up_proj"] = _stack([_gate_up(experts, index, projections) for index in expected])
    if "down_proj" in projections:
        factors[f"{experts}.down_proj"] = _stack([projections["down_proj"][index] for index in expected])
    return factors


def _gate_up(experts: str, index: int, projections: Mapping[str, Mapping[int, Factors]]) -> Factors:
    """Join one expert's gate and up projections, which must have the same A."""
    pairs = [projections.get(projection, {}).get(index) for projection in ("gate_proj", "up_proj")]
    gate, up = pairs
    if gate is None or up is None or not torch.equal(gate.a, up.a):
        problem = "only one of gate_proj and up_proj" if gate is None or up is None else "a different A for each"
        raise CheckpointError(
            f"{WEIGHTS} adapts gate_proj and up_proj of {experts}.{index}, one parameter here, with {problem}; train "
            "mlp.experts.gate_up_proj and mlp.experts.down_proj"
        )
    return Factors(gate.a, torch.cat([gate.b, up.b]))


def _stack(pairs: list[Factors]) -> Factors:
    return Factors(torch.stack([pair.a for pair in pairs]), torch.stack([pair.b for pair in pairs]))


def _check_factors(name: str, pair: Factors, rank: int, file: str = "") -> None:
    a, b = pair.a, pair.b
    dims = 3 if is_expert_parameter(name) else 2
    label = f"{file}: {name}" if file else name
    if a.ndim != dims or b.ndim != dims or a.shape[:-2] != b.shape[:-2]:
        raise CheckpointError(f"{label}: A and B need {dims} dimensions, found {_description(pair)}")
    if a.shape[-2] != rank or b.shape[-1] != rank:
        raise CheckpointError(f"{label}: A and B are {_description(pair)}, but the rank is {rank}")
    for factor, tensor in (("A", a), ("B", b)):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise CheckpointError(f"{label}: {bad} of {tensor.numel()} values of {factor} are NaN or infinite")


def _description(pair: Factors) -> str:
    return f"{list(pair.a.shape)} and {list(pair.b.shape)}"
