"""Names that programs use of ``torch_npu``, ``torch.npu``, ``torch.ops.npu`` and ``torchair`` beside the operators."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megascend.errors import ConfigError
from megascend.simnpu.environment import NAME_VARIABLE
from megascend.simnpu.missing import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")


@pytest.fixture
def torch_npu() -> Any:
    import torch_npu

    return torch_npu


def test_the_device_can_be_named_after_a_chip(torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import acl

    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    assert torch_npu.npu.get_device_name() == "Simulated Ascend (CPU memory, megascend.simnpu)"
    assert (acl.get_soc_name(), torch_npu.npu.get_soc_version()) == ("Ascend910B1", 220)
    assert torch_npu.npu.get_device_properties().cube_core_num == 0  # nothing says which chip
    for given in ("Ascend910B3", "910B3"):
        monkeypatch.setenv(NAME_VARIABLE, given)
        properties = torch_npu.npu.get_device_properties(0)
        assert torch_npu.npu.get_device_name(0)[:10] == "Ascend910B"  # as MindSpeed's tests ask
        assert properties.name == torch_npu.npu.get_device_name() == acl.get_soc_name() == "Ascend910B3"
        assert torch_npu.npu.get_soc_version() == torch_npu._C._npu_get_soc_version() == 223
        assert (properties.cube_core_num, properties.vector_core_num) == (20, 40)
    assert torch_npu.__version__.endswith("+simnpu")  # whatever it is called
    monkeypatch.setenv(NAME_VARIABLE, "A100")
    with pytest.raises(ConfigError, match=r"MEGASCEND_SIMNPU_DEVICE_NAME='A100': expected one of Ascend910B1"):
        torch_npu.npu.get_device_name()


def test_operators_are_found_in_torchs_dispatcher(torch_npu: Any) -> None:
    from megascend.simnpu.operators import OPERATORS

    assert all(hasattr(torch.ops.npu, name) for name in OPERATORS)
    x = torch.tensor([[3.0, 4.0]]).npu().requires_grad_()
    gamma = torch.ones(2).npu()
    for call in (torch.ops.npu.npu_rms_norm, torch.ops.npu.npu_rms_norm.default):
        found = call(x, gamma, epsilon=0.0)[0]
        torch.testing.assert_close(found.detach().cpu(), x.detach().cpu() / 12.5**0.5)
        (gradient,) = torch.autograd.grad(found[0, 0], x)
        # d(x0 / r) / dx with r = sqrt((x0^2 + x1^2) / 2)
        expected = torch.tensor([[1 / 12.5**0.5 - 9 / 2 / 12.5**1.5, -12 / 2 / 12.5**1.5]])
        torch.testing.assert_close(gradient.cpu(), expected)
    w = torch.ones(1, 2, 3).npu()
    by_list = torch.ops.npu.npu_grouped_matmul([x.detach()], [w], group_list=[1], split_item=2, group_type=0)
    by_tensor = torch.ops.npu.npu_grouped_matmul(
        [x.detach()], [w], group_list=torch.tensor([1]).npu(), split_item=2, group_type=0
    )
    assert by_list[0].tolist() == by_tensor[0].tolist() == [[7.0, 7.0, 7.0]]
    q = torch.ones(2, 1, 4).npu()
    assert len(torch.ops.npu.npu_fusion_attention(q, q, q, 1, "SBH")) == 7
    assert "Tensor(" in str(torch.ops.npu.npu_apply_adam_w.default._schema)  # it says what it writes to
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
    for place, where in ((torch_npu, "torch_npu"), (torch.npu, "torch.npu"), (torch_npu.optim, "torch_npu.optim")):
        assert not hasattr(place, "fold_proteins")
        with pytest.raises(NotSimulatedError, match=rf"{where}\.fold_proteins: .* not simulated by megascend\.simnpu"):
            _ = place.fold_proteins
