"""The public names of the real Transformer Engine 2.8 to 2.11 against those of the reference one; peft's LoRA on its layers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megascend.errors import ConfigError, PlatformError
from megascend.reference.te import attention, fp8
from megascend.reference.te.package import build_modules

REAL = json.loads((Path(__file__).parent / "transformer_engine_names.json").read_text())
HELPERS = {"load_framework_extension", "torch_version"}  # what its pytorch package itself is built with
MODULES = build_modules()
WITHOUT_FP8 = {"fp8_autocast", "autocast", "fp8_model_init", "quantized_model_init"}


@pytest.mark.parametrize("module", sorted({module for names in REAL.values() for module in names}))
def test_every_public_name_exists(module: str) -> None:
    names = {name for version in REAL.values() for name in version[module]} - HELPERS
    assert names
    missing = sorted(name for name in names if not hasattr(MODULES[module], name))
    assert not missing


def refusals() -> list[tuple[str, str]]:
    """Return (module, name) of every placeholder."""
    placeholders = []
    for module, contents in MODULES.items():
        for name, value in vars(contents).items():
            if name.startswith("__"):
                continue
            if getattr(value, "__module__", None) == "megascend.reference.te.unsupported":
                placeholders.append((module, name))
    return placeholders


def test_placeholder_errors_name_the_feature() -> None:
    assert len({name for _, name in refusals()}) > 80
    for module, name in refusals():
        value = getattr(MODULES[module], name)
        with pytest.raises(PlatformError, match=rf"does not support (te_)?{name}\b"):
            value()
        if inspect.isclass(value):
            assert not isinstance(torch.nn.Linear(1, 1), value)
            with pytest.raises(AttributeError, match=f"does not support {name}, which has no MEMBER"):
                _ = value.MEMBER


@pytest.mark.parametrize("name", sorted(WITHOUT_FP8))
def test_quantisation_contexts_accept_only_false(name: str) -> None:
    context = getattr(MODULES["transformer_engine.pytorch"], name)
    with context(enabled=False):
        pass
    with pytest.raises(PlatformError, match=rf"{name}\(enabled=True\)"), context():
        pass


def test_fp8_queries_return_false() -> None:
    te = MODULES["transformer_engine.pytorch"]
    for name in ("is_fp8_available", "is_mxfp8_available", "is_nvfp4_available", "is_fp8_block_scaling_available"):
        assert getattr(te, name)() is False
        assert getattr(te, name)(return_reason=True) == (
            False,
            "the reference Transformer Engine has no fp8 and no fp4",
        )
    assert te.fp8.check_fp8_support()[0] is False
    assert te.is_bf16_available() is True


def test_padding_and_unpadding_round_trip() -> None:
    counts = [3, 0, 4, 9]
    rows = torch.randn(sum(counts), 5, requires_grad=True)
    padded, sizes = fp8.Fp8Padding(4, align_size=4)(rows, counts)
    assert sizes == [4, 0, 4, 12]
    assert torch.equal(padded[3], torch.zeros(5))
    assert torch.equal(padded[4:8], rows[3:7])
    back = fp8.Fp8Unpadding(4, align_size=4)(padded, counts)
    assert torch.equal(back, rows)
    (gradient,) = torch.autograd.grad((back * torch.arange(16.0)[:, None]).sum(), rows)
    assert torch.equal(gradient, torch.arange(16.0)[:, None].expand(-1, 5))
    with pytest.raises(ConfigError, match="20 rows, and it has 16"):
        fp8.Fp8Unpadding(4, align_size=4)(rows, counts)
    with pytest.raises(PlatformError, match="align_size"):
        fp8.Fp8Padding(4)(rows, counts)


@pytest.mark.parametrize("window", [11, (1,), (1, 2, 3), ("1", 2)])
def test_invalid_window_raises_config_error(window: object) -> None:
    with pytest.raises(ConfigError, match="window_size must be None or two integers"):
        attention.DotProductAttention(2, 4, window_size=window)  # type: ignore[arg-type]


def test_default_window_depends_on_the_mask() -> None:
    """Check that the default window depends on the mask type, as in the real Transformer Engine."""
    assert attention.DotProductAttention(2, 4).window_size == (-1, 0)
    assert attention.DotProductAttention(2, 4, attn_mask_type="padding").window_size == (-1, -1)


PEFT = """
import megascend.reference.te
megascend.reference.te.install()
import peft, torch
import transformer_engine.pytorch as te
from peft.tuners.lora.te import TeLinear

torch.manual_seed(0)
model = torch.nn.Sequential(te.LayerNormLinear(8, 16, normalization="RMSNorm"), te.Linear(16, 4))
x = torch.randn(6, 8)
plain = model(x)
settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0", "1"], init_lora_weights=False)
model = peft.get_peft_model(model, settings)
layers = [module for module in model.modules() if isinstance(module, TeLinear)]
assert len(layers) == 2 and sum(parameter.requires_grad for parameter in model.parameters()) == 4
first, second = layers
def with_adapter(layer, x):  # the formula of LoRA, alpha / r = 2
    return layer.base_layer(x) + 2 * x @ layer.lora_A.default.weight.T @ layer.lora_B.default.weight.T
torch.testing.assert_close(model(x), with_adapter(second, with_adapter(first, x)))
with model.disable_adapter():
    torch.testing.assert_close(model(x), plain)
before = model(x).square().mean().item()
optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
for _ in range(5):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss.item() < before
print("done")
"""


@pytest.mark.nightly  # covered: training/lora/test_parity_with_peft.py
def test_lora_of_peft_on_the_layers() -> None:
    """Train LoRA of peft 0.20, whose layer for Transformer Engine's layers looks LayerNormMLP up."""
    pytest.importorskip("peft.tuners.lora.te")
    completed = subprocess.run([sys.executable, "-c", PEFT], capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1] == "done"
