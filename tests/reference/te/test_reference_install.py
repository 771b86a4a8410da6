"""Installing the package and the redirect, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(code: str) -> str:
    """Return the standard output of ``code`` in a new Python process, which must succeed."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


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
