"""What ``torch_npu.utils`` offers to training code."""

from __future__ import annotations


def get_cann_version(module: str = "CANN") -> str:
    """Version of the toolkit's stand-in, whatever the module."""
    from megascend.simnpu.identity import SIMULATED_VERSION

    return SIMULATED_VERSION


class FlopsCounter:
    """Counter of floating-point operations; counts nothing, since no kernel runs."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def get_flops(self) -> list[int]:
        """Recorded and traversed operations.

        Raises:
            NotSimulatedError: always; a zero would be taken for a measurement.
        """
        from megascend.simnpu.missing import missing

        raise missing("get_flops", "torch_npu.utils.FlopsCounter")
