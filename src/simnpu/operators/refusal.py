"""How an operator says no: with the message of torch_npu or of the kernel below it."""

from __future__ import annotations

from typing import NoReturn

from simnpu.errors import NotSimulatedError


class Refusal:
    """Raises the errors of one operator. Calling it raises what torch_npu itself checks before the kernel."""

    def __init__(self, operator: str, kernel: str) -> None:
        self.operator = operator
        self.kernel_name = kernel

    def __call__(self, message: str) -> NoReturn:
        raise RuntimeError(f"{message} [torch_npu.{self.operator}, simulated by simnpu]")

    def kernel(self, message: str) -> NoReturn:
        """Raise the kernel's refusal: on hardware the message follows ``call aclnn... failed, detail:``."""
        raise RuntimeError(
            f"call {self.kernel_name} failed, detail: {message} [torch_npu.{self.operator}, simulated by simnpu]"
        )


def refuse_unsimulated(operator: str, **arguments: object) -> None:
    """Raise for arguments that torch_npu takes and this simulation does not."""
    if unsupported := [name for name, value in arguments.items() if value is not None]:
        raise NotSimulatedError(f"{operator} with {', '.join(unsupported)} is not simulated by simnpu")
