"""What ``torch_npu.utils`` offers to training code."""

from __future__ import annotations

from simnpu.npu.utils import get_cann_version as get_cann_version


class FlopsCounter:
    """Counter of floating-point operations; counts nothing, since no kernel runs."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def get_flops(self) -> list[int]:
        """Return recorded and traversed operations."""
        from simnpu.errors import missing

        raise missing("get_flops", "torch_npu.utils.FlopsCounter")
