"""Installing the package and the redirect, each in a fresh process; the real megatron-core and mcore-bridge on top."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda is real here")


def run(code: str) -> str:
    """Return the standard output of ``code`` in a new Python process, which must succeed."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@CPU_ONLY
@pytest.mark.nightly  # covered: every test of engine megatron, whose bootstrap makes these calls
def test_real_megatron_core_and_mcore_bridge_import() -> None:
    out = run(
        """
        from megascend.reference import te as reference_te
        from megascend.runtime.bootstrap.stub_modules import install_missing_leaves
        from megascend.runtime.bootstrap.reference import cuda_redirect
        changes = reference_te.install() + cuda_redirect.install()
        install_missing_leaves()
        assert changes and reference_te.is_installed()
        assert reference_te.install() == cuda_redirect.install() == []

        import mcore_bridge.model, mcore_bridge.bridge, mcore_bridge.tuners
        from megatron.core.extensions import transformer_engine as extension
        from megatron.core.optimizer import Adam
        from megatron.core.utils import get_te_version
        from megascend.reference.te.linear import Linear
        from megascend.reference.te.optimizers import FusedAdam
        assert extension.HAVE_TE and issubclass(extension.TELinear, Linear) and Adam is FusedAdam
        assert extension.TEGroupedLinear is not None and extension.fused_permute is None
        assert str(get_te_version()) == "2.8.0"
        assert len(cuda_redirect.patch_moe_device_checks()) == 2 and cuda_redirect.patch_moe_device_checks() == []
        import importlib.util
        assert importlib.util.find_spec("transformer_engine").name == "transformer_engine"
        import transformer_engine.pytorch as te
        assert not hasattr(te, "transformers")
        try:
            te.transformers
        except AttributeError as error:
            assert "has no transformer_engine.pytorch.transformers" in str(error), error

        import peft, torch
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 2
        print("done")
        """
    )
    assert out.splitlines()[-1] == "done"


def test_importing_the_subpackage_imports_neither_torch_nor_megatron() -> None:
    run(
        """
        import sys, megascend.reference.te
        assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "megatron", "transformer_engine")]
        """
    )


def test_late_install_error_names_the_modules() -> None:
    run(
        """
        import sys, types
        from megascend import errors
        from megascend.reference import te as reference_te
        sys.modules["megatron.core"] = sys.modules["mcore_bridge"] = types.ModuleType("early")
        try:
            reference_te.install()
        except errors.ImportOrderError as error:
            assert "megatron.core, mcore_bridge" in str(error) and "bootstrap" in str(error)
        else:
            raise SystemExit("no error")
        assert not reference_te.is_installed()
        """
    )


def test_missing_features_raise_named_errors() -> None:
    run(
        """
        from megascend import errors
        from megascend.reference import te as reference_te
        reference_te.install()
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
        from transformer_engine.pytorch.router import fused_moe_aux_loss

        def refusal(call):
            try:
                call()
            except errors.PlatformError as error:
                return str(error)
            raise SystemExit(f"{call} did not raise")

        def autocast():
            with te.fp8_autocast(enabled=True):
                pass

        assert "fp8" in refusal(autocast)
        assert "moe_router_fusion" in refusal(fused_moe_aux_loss)
        assert "te_rng_tracker" in refusal(CudaRNGStatesTracker)
        with te.fp8_autocast(enabled=False), te.fp8_model_init(enabled=False):
            assert te.fp8.FP8GlobalStateManager.is_fp8_enabled() is False
        """
    )
