"""Operators of dense layers against their formulas: norm, rotary embedding, activation, softmax, plain products, Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from npu_acceptance.compare import Case, Tensors, normal

EPSILON = 1e-6
ADAM = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
STEP = 7


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases, or those used in every layer if ``quick``."""
    yield rms_norm((16, 4, 256))
    yield rotary("half")
    yield swiglu()
    yield matmul()
    if quick:
        return
    yield rms_norm((8, 2, 4, 128))  # of queries and keys, over a head
    yield rotary("interleave")
    yield log_softmax()
    yield masked_softmax()
    yield adam()


def rms_norm(shape: tuple[int, ...]) -> Case:
    """Build a case of Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467."""

    def inputs(generator: torch.Generator) -> Tensors:
        return {"x": normal(generator, *shape), "gamma": 1 + 0.1 * normal(generator, shape[-1])}

    def formula(tensors: Tensors) -> Tensor:
        x = tensors["x"]
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * tensors["gamma"]

    return Case(
        f"rms_norm {list(shape)}",
        inputs,
        lambda npu, tensors: npu.npu_rms_norm(tensors["x"], tensors["gamma"], epsilon=EPSILON)[0],
        formula,
        leaves=("x", "gamma"),
    )


def rotary(mode: str) -> Case:
    """Build a case of Su et al., RoFormer, arXiv:2104.09864: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    neighbours = mode == "interleave"

    def inputs(generator: torch.Generator) -> Tensors:
        angle = normal(generator, 64, 1, 1, 32)
        angle = angle.repeat_interleave(2, -1) if neighbours else torch.cat((angle, angle), -1)
        return {"x": normal(generator, 64, 2, 4, 64), "cos": angle.cos(), "sin": angle.sin()}

    def formula(tensors: Tensors) -> Tensor:
        x, cos, sin = tensors["x"], tensors["cos"], tensors["sin"]
        a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
        turned = torch.stack((-b, a), -1).flatten(-2) if neighbours else torch.cat((-b, a), -1)
        return x * cos + turned * sin

    def operator(npu: Any, tensors: Tensors) -> Tensor:
        options = {"rotary_mode": mode} if neighbours else {}  # older versions take no mode: halves
        return npu.npu_rotary_mul(tensors["x"], tensors["cos"], tensors["sin"], **options)

    return Case(f"rotary_mul {mode}", inputs, operator, formula, leaves=("x",))


def swiglu() -> Case:
    """Build a case of Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202."""

    def formula(tensors: Tensors) -> Tensor:
        gate, up = tensors["x"].chunk(2, -1)
        return functional.silu(gate) * up

    return Case(
        "swiglu",
        lambda generator: {"x": normal(generator, 32, 4, 512)},
        lambda npu, tensors: npu.npu_swiglu(tensors["x"], dim=-1),
        formula,
        leaves=("x",),
    )


def matmul() -> Case:
    """Build a case of a plain product, which reveals HF32 (11 bits of a float32)."""

    def inputs(generator: torch.Generator) -> Tensors:
        return {"x": normal(generator, 192, 512), "weight": normal(generator, 256, 512)}

    return Case(
        "matmul [192, 512] x [512, 256]",
        inputs,
        lambda npu, tensors: tensors["x"] @ tensors["weight"].t(),
        lambda tensors: tensors["x"] @ tensors["weight"].t(),
        leaves=("x", "weight"),
    )


def log_softmax() -> Case:
    """Build a case of log_softmax, on which the output head's loss depends."""
    return Case(
        "log_softmax of 4096 classes",
        lambda generator: {"x": 4 * normal(generator, 32, 4096)},
        lambda npu, tensors: functional.log_softmax(tensors["x"], -1),
        lambda tensors: functional.log_softmax(tensors["x"], -1),
        leaves=("x",),
        dtypes=(torch.float32,),
    )


def masked_softmax() -> Case:
    """Build a case of softmax(x / 2) where the mask is False; hidden scores become -10000."""

    def inputs(generator: torch.Generator) -> Tensors:
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1).expand(2, 1, 64, 64).contiguous()
        return {"x": normal(generator, 2, 4, 64, 64), "mask": hidden}

    return Case(
        "scaled_masked_softmax",
        inputs,
        lambda npu, tensors: npu.npu_scaled_masked_softmax(tensors["x"], tensors["mask"], 0.5, False),
        lambda tensors: (tensors["x"] * 0.5).masked_fill(tensors["mask"], -10000.0).softmax(-1),
        needs=("npu_scaled_masked_softmax",),
        leaves=("x",),
        dtypes=(torch.float16, torch.bfloat16),
    )


def adam() -> Case:
    """Build a case of Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2."""

    def inputs(generator: torch.Generator) -> Tensors:
        tensors = {name: normal(generator, 1000) for name in ("parameter", "gradient", "first")}
        return tensors | {"second": normal(generator, 1000).square()}

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        state = tuple(tensors[name].clone() for name in ("parameter", "first", "second"))
        powers = ADAM["beta1"] ** STEP, ADAM["beta2"] ** STEP
        settings = ADAM["lr"], ADAM["weight_decay"], ADAM["beta1"], ADAM["beta2"], ADAM["epsilon"]
        npu.npu_apply_adam_w(*powers, *settings, tensors["gradient"], None, False, False, out=state)
        return dict(zip(("parameter", "first moment", "second moment"), state, strict=True))

    def formula(tensors: Tensors) -> Tensors:
        beta1, beta2, gradient = ADAM["beta1"], ADAM["beta2"], tensors["gradient"]
        first = beta1 * tensors["first"] + (1 - beta1) * gradient
        second = beta2 * tensors["second"] + (1 - beta2) * gradient.square()
        update = first / (1 - beta1**STEP) / ((second / (1 - beta2**STEP)).sqrt() + ADAM["epsilon"])
        decayed = tensors["parameter"] * (1 - ADAM["lr"] * ADAM["weight_decay"])
        return {"parameter": decayed - ADAM["lr"] * update, "first moment": first, "second moment": second}

    return Case("apply_adam_w", inputs, operator, formula, needs=("npu_apply_adam_w",), dtypes=(torch.float32,))
