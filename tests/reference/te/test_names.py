"""The public names of the real Transformer Engine 2.8 to 2.11 against those of the reference one."""

from __future__ import annotations

import inspect
import json
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


def test_recipes_are_created_and_have_no_effect() -> None:
    recipe = fp8.DelayedScaling(margin=0, fp8_format=fp8.Format.HYBRID)
    assert recipe.fp8_format.value.max_bwd == 57344
    assert recipe.delayed()
    assert not recipe.mxfp8()
    with MODULES["transformer_engine.pytorch"].fp8_autocast(enabled=False, fp8_recipe=recipe):
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
