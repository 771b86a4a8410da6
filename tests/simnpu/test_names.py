"""Names that programs use of ``torch_npu``, ``torch.npu``, ``torch.ops.npu`` and ``torchair`` beside the operators."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from simnpu.errors import ConfigError, NotSimulatedError
from simnpu.settings import NAME_VARIABLE

pytestmark = pytest.mark.usefixtures("sim_npu")


@pytest.fixture
def torch_npu() -> Any:
    import torch_npu

    return torch_npu


def test_the_device_can_be_named_after_a_chip(torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import acl

    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    assert torch_npu.npu.get_device_name() == "Simulated Ascend (CPU memory, simnpu)"
    assert (acl.get_soc_name(), torch_npu.npu.get_soc_version()) == ("Ascend910B1", 220)
    assert torch_npu.npu.get_device_properties().cube_core_num == 0  # nothing says which chip
    for alias in ("Ascend910B3", "910B3"):
        monkeypatch.setenv(NAME_VARIABLE, alias)
        properties = torch_npu.npu.get_device_properties(0)
        assert torch_npu.npu.get_device_name(0)[:10] == "Ascend910B"  # as MindSpeed's tests ask
        assert properties.name == torch_npu.npu.get_device_name() == acl.get_soc_name() == "Ascend910B3"
        assert torch_npu.npu.get_soc_version() == torch_npu._C._npu_get_soc_version() == 223
        assert (properties.cube_core_num, properties.vector_core_num) == (20, 40)
    assert torch_npu.__version__.endswith("+simnpu")  # whatever it is called
    monkeypatch.setenv(NAME_VARIABLE, "A100")
    with pytest.raises(ConfigError, match=r"SIMNPU_DEVICE_NAME='A100': expected one of Ascend910B1"):
        torch_npu.npu.get_device_name()


def test_operators_are_found_in_torchs_dispatcher(torch_npu: Any) -> None:
    from simnpu.operators import OPERATORS

    names = {name.partition(".")[0] for name in OPERATORS}
    assert all(getattr(torch_npu, name) is getattr(torch.ops.npu, name) for name in names)
    x = torch.tensor([[3.0, 4.0]]).npu().requires_grad_()
    gamma = torch.ones(2).npu()
    for call in (torch.ops.npu.npu_rms_norm, torch.ops.npu.npu_rms_norm.default):
        result = call(x, gamma, epsilon=0.0)[0]
        torch.testing.assert_close(result.detach().cpu(), x.detach().cpu() / 12.5**0.5)
        (gradient,) = torch.autograd.grad(result[0, 0], x)
        # d(x0 / r) / dx with r = sqrt((x0^2 + x1^2) / 2)
        expected = torch.tensor([[1 / 12.5**0.5 - 9 / 2 / 12.5**1.5, -12 / 2 / 12.5**1.5]])
        torch.testing.assert_close(gradient.cpu(), expected)
    w = torch.ones(2, 2, 3).npu()
    by_list = torch.ops.npu.npu_grouped_matmul([x.detach()], [w[0], w[1]], group_list=[1, 1], split_item=2)
    by_tensor = torch.ops.npu.npu_grouped_matmul(
        [x.detach()], [w], group_list=torch.tensor([1, 1]).npu(), split_item=2, group_type=0
    )
    assert by_list[0].tolist() == by_tensor[0].tolist() == [[7.0, 7.0, 7.0]]
    q = torch.ones(2, 1, 4).npu()
    assert len(torch.ops.npu.npu_fusion_attention(q, q, q, 1, "SBH")) == 7
    assert torch.ops.npu.npu_apply_adam_w.overloads() == ["default", "out"]
    with pytest.raises(AttributeError, match="npu_fold_proteins"):
        _ = torch.ops.npu.npu_fold_proteins


def test_patch_getenv_has_what_ms_swift_looks_for(torch_npu: Any) -> None:
    from torch_npu.utils import patch_getenv

    assert patch_getenv._orig_environ_get("PATH") == os.environ["PATH"]
    assert os.getenv.__module__ != patch_getenv.__name__  # reads stay unlogged, so there is nothing for it to undo
    patch_getenv._log_once("PATH", "value")


def test_torchairs_options_are_kept(torch_npu: Any) -> None:
    import torchair
    from torchair.configs.compiler_config import CompilerConfig

    config = CompilerConfig()
    config.debug.graph_dump.type = "pbtxt"
    config.mode = "reduce-overhead"
    assert config.debug.graph_dump.type == "pbtxt"
    assert callable(torchair.get_npu_backend(compiler_config=config))


def test_memory_of_other_processes_and_the_toolkit(torch_npu: Any) -> None:
    from torch_npu.utils import collect_env

    torch.npu.ipc_collect()
    torch.npu.memory._set_allocator_settings("expandable_segments:True")
    assert torch.version.cann == collect_env.get_cann_version() == torch_npu.utils.get_cann_version() == "0.0.0+simnpu"


def test_an_unknown_name_is_named(torch_npu: Any) -> None:
    for namespace, path in ((torch_npu, "torch_npu"), (torch.npu, "torch.npu"), (torch_npu.optim, "torch_npu.optim")):
        assert not hasattr(namespace, "fold_proteins")
        with pytest.raises(NotSimulatedError, match=rf"{path}\.fold_proteins: .* not simulated by simnpu"):
            _ = namespace.fold_proteins


def test_switches_are_kept_and_shown(torch_npu: Any) -> None:
    npu = torch_npu.npu
    npu.set_sync_debug_mode("warn")
    assert npu.get_sync_debug_mode() == 1
    with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
        npu.set_sync_debug_mode("loud")
    npu.set_sync_debug_mode(0)
    npu.set_mm_bmm_format_nd(False)
    assert not npu.get_mm_bmm_format_nd()
    assert npu.CubeMathType(1).name == "ALLOW_FP32_DOWN_PRECISION"
    assert npu.get_device_limit(0) == {"cube_core_num": 24, "vector_core_num": 48}
    stream = npu.Stream()
    npu.set_stream_limit(stream, cube_num=3)
    assert npu.get_stream_limit(stream) == {"cube_core_num": 3, "vector_core_num": 48}
    npu.reset_stream_limit(stream)
    assert npu.get_stream_limit(stream)["cube_core_num"] == 24
    npu.set_per_process_memory_fraction(0.5)
    assert npu.get_per_process_memory_fraction() == 0.5
    npu.set_per_process_memory_fraction(1.0)
    allocated = torch.zeros(256, device="npu")
    nested = npu.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    assert nested["current"] >= allocated.nbytes
    assert npu.memory_cached() >= allocated.nbytes
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert npu.is_autocast_enabled()
        assert npu.get_autocast_dtype() == torch.bfloat16
    assert not npu.is_autocast_enabled()
    mstx = npu.mstx
    assert [mstx.range_push("a"), mstx.range_push("b"), mstx.range_pop(), mstx.range_pop(), mstx.range_pop()] == [
        0,
        1,
        1,
        0,
        -1,
    ]
    with mstx.annotate("step"):
        assert mstx.annotate("call")(max)(1, 2) == 2


def test_options_and_arguments_are_torch_npus(torch_npu: Any) -> None:
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options
    assert hasattr(options, "hccl_config")  # MindSpeed names its groups for the profiler only then
    options().hccl_config["group_name"] = "tp"
    assert options().hccl_config == options.hccl_config == {}
    with pytest.raises(NotSimulatedError, match="dynamic=False"):
        torch_npu.npu.amp.GradScaler(2.0**16, 2.0, 0.5, 2000, False)
    assert torch_npu.npu.get_device_name(device_name=0) == torch_npu.npu.get_device_properties(device_name=0).name
    assert torch_npu.npu.is_bf16_supported(including_emulation=True)


def test_overflow_is_looked_for_as_on_a_910b(torch_npu: Any) -> None:
    from torch_npu.npu.utils import is_support_inf_nan, npu_check_overflow

    assert is_support_inf_nan()
    assert npu_check_overflow(torch.tensor([1.0, float("inf")]).npu())
    assert not npu_check_overflow(torch.ones(2).npu())
    with pytest.raises(RuntimeError, match="please use npu_check_overflow"):
        torch_npu.npu.get_npu_overflow_flag()
    with pytest.warns(UserWarning, match="clear_npu_overflow_flag is useless"):
        torch_npu.npu.clear_npu_overflow_flag()


def test_an_extension_is_answered_although_transfer_to_npu_was_not_imported(torch_npu: Any) -> None:
    """MindSpeed's test of this operator imports torch_npu alone; a compiler was called for it."""
    from torch.utils.cpp_extension import load

    built = load(name="npu_dropout_add_layer_norm", sources=["nothing.cpp"], extra_ldflags=["-ltorch_npu"])
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    weight, bias = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    rows, columns = torch.rand(2, 3, generator=generator), torch.rand(8, generator=generator)
    tensors = [t.npu() for t in (x, weight, residual, bias, rows, columns)]
    total = x.double() * rows.double()[..., None] * columns.double() + residual.double()
    for root in (False, True):
        out, before, mask = built.npu_dropout_add_layer_norm(*tensors, 0.0, 1e-5, True, False, root, True)
        centred = total if root else total - total.mean(-1, keepdim=True)
        expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        expected = expected if root else expected + bias.double()
        torch.testing.assert_close(out.cpu().double(), expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(before.cpu().double(), total, atol=1e-6, rtol=1e-6)
        assert mask.all()
    _, before, mask = built.npu_dropout_add_layer_norm(
        *tensors[:2], None, None, None, None, 0.25, 1e-5, True, True, True, True
    )
    torch.testing.assert_close(before.cpu(), x * mask.cpu() / 0.75)
