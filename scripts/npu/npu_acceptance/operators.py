"""Section ``operators``: every fused operator that megascend and MindSpeed call, forward and backward, on one card."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from npu_acceptance import attention, dense, experts
from npu_acceptance.compare import NAMES, Case, run_case
from npu_acceptance.plan import Settings
from npu_acceptance.records import Results, failed, left_out


def run(settings: Settings, results: Results) -> None:
    """Measure every case in every dtype that its kernel supports."""
    import torch

    npu = import_module("torch_npu")
    device = torch.device("npu", 0)
    torch.npu.set_device(device)  # type: ignore[attr-defined]
    for family in (dense, experts, attention):
        for case in family.cases(settings.quick):
            measure(case, npu, device, results)


def measure(case: Case, npu: Any, device: Any, results: Results) -> None:
    """Measure all dtypes of a case; record an exception of the operator as a failure and go on to the next dtype."""
    if absent := [name for name in case.needs if not hasattr(npu, name)]:
        results.add(left_out(case.name, f"torch_npu lacks {', '.join(absent)}"))
        return
    for dtype in case.dtypes:
        try:
            results.extend(run_case(case, dtype, npu, device))
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
        ) as error:  # all that a kernel's call raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            results.add(failed(f"{case.name}, {NAMES[dtype]}", reason))
