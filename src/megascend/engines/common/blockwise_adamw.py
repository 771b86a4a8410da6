"""AdamW with moments of 8 bits, quantised in blocks with a common scale (Dettmers et al. 2022, arXiv:2110.02861).

Plain PyTorch on every device; bitsandbytes has no kernels for NPUs. torchao's ``AdamW8bit`` (0.18.0, torch 2.13) was measured in
its place, and misses these bounds:

- exact resume: of a first moment that is written as fp32 and read again, 51 % of the values differ (here none);
- values: 0.6 % of second moments are rounded to 0 beside first moments that are not, so that 50 steps at a learning rate of
  1e-3, with gradients of four decades, end up to 14.3 away from AdamW in fp32 (here 0.02);
- memory: only tensors of complete blocks are quantised, which the shards of a distributed optimizer are not;
- NPUs: its step is a ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BLOCK = 256
"""Consecutive values with a common scale."""
CHUNK = 2**22
"""Values of a parameter that are dequantised at a time: a step has temporaries of this size, not of the largest parameter's."""
SMALLEST_SCALE = 2.0**-100
"""Below it, products of codes and scales would lose bits as denormal numbers, and quantising them again would change them."""
QUANTISED = "quantised"
"""Key of a parameter group: True for 8-bit moments, False for fp32."""


def dynamic_codes(*, signed: bool) -> Tensor:
    """Return the 256 values of the code in [-1, 1], or in (0, 1], ascending.

    They are bitsandbytes' dynamic codes: seven decades, each with twice the values of the one below it. Unsigned ones begin with
    1e-7 in place of 0: a second moment that is rounded to 0 beside a first moment that is not would be a division by ``eps``.
    """
    values = [0.0 if signed else 1e-7, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        centres = ((borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += centres + ([-centre for centre in centres] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def _codes(device: torch.device, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the values of all codes, and the borders between them."""
    codes = dynamic_codes(signed=signed)
    return codes.to(device), ((codes[1:] + codes[:-1]) / 2).to(device)


class BlockwiseMoment:
    """A moment of a parameter: a code of 8 bits for each value, and an fp32 scale for each block.

    The value of largest magnitude of a block is its scale, with its sign, and has the code 1, exactly. Quantising the values of
    :meth:`read` therefore gives the same codes and scales, bit for bit: a checkpoint of fp32 values restores them.

    Args:
        main: the parameter; the moment is 0.
        signed: values may be negative.
    """

    def __init__(self, main: Tensor, *, signed: bool) -> None:
        self.count, self._shape, self._signed = main.numel(), main.shape, signed
        blocks = -(-self.count // BLOCK)
        self.codes = torch.zeros((blocks, BLOCK), dtype=torch.uint8, device=main.device)
        self.scales = torch.zeros((blocks, 1), dtype=torch.float32, device=main.device)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the values ``[start, stop)`` of the flattened moment in fp32; ``start`` is a multiple of BLOCK."""
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        table, _ = _codes(self.codes.device, signed=self._signed)
        values = table[self.codes[blocks].int()].mul_(self.scales[blocks])
        return values.view(-1)[: stop - start]

    def write(self, start: int, values: Tensor) -> None:
        """Quantise ``values``, which begin at ``start``, a multiple of BLOCK, and end with a block or with the moment."""
        blocks = slice(start // BLOCK, -(-(start + values.numel()) // BLOCK))
        rows = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        # First moments below it are 0; second moments are rounded up.
        floor = 0.0 if self._signed else SMALLEST_SCALE
        scales = torch.where(scales.abs() < SMALLEST_SCALE, scales.sign() * floor, scales)
        _, borders = _codes(self.codes.device, signed=self._signed)
        # A block of zeros has the scale 0.
        normalised = rows / torch.where(scales == 0, 1.0, scales)
        self.codes[blocks] = torch.searchsorted(borders, normalised, out_int32=True).to(torch.uint8)
        self.scales[blocks] = scales

    def on_host(self) -> Tensor:
        """Return the values in fp32, in host memory, since the device may have no memory for them."""
        values = torch.empty(self.count, dtype=torch.float32)
        for start in range(0, self.count, CHUNK):
            stop = min(start + CHUNK, self.count)
            values[start:stop] = self.read(start, stop)
        return values.view(self._shape)

    def fill(self, values: Tensor) -> None:
        """Quantise ``values``, of any device."""
        flat = values.view(-1)
        for start in range(0, self.count, CHUNK):
            self.write(start, flat[start : start + CHUNK].to(self.codes.device))


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW over contiguous fp32 main parameters. Every step updates all parameters that have a gradient.

    Args:
        param_groups: groups in torch's form, with a key QUANTISED.
        lr, betas, eps: of groups that do not set them.
    """

    def __init__(
        self, param_groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([dict(group) for group in param_groups], defaults)
        self._loaded: list[tuple[BlockwiseMoment, Tensor]] = []

    def create_state(self) -> None:
        """Allocate the moments of all parameters, as the first step would; a no-op if they exist."""
        for group in self.param_groups:
            for main in group["params"]:
                self._moments(main, group)

    def _moments(self, main: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state = self.state[main]
        if not state:
            if group[QUANTISED]:
                state["exp_avg"] = BlockwiseMoment(main, signed=True)
                state["exp_avg_sq"] = BlockwiseMoment(main, signed=False)
            else:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(main), torch.zeros_like(main)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "losses are computed before a step"
        for group in self.param_groups:
            group["step"] = count = int(group.get("step", 0)) + 1
            for main in group["params"]:
                if main.grad is None or not main.numel():
                    continue
                moments = self._moments(main, group)
                values, grad = main.view(-1), main.grad.reshape(-1)
                if not group[QUANTISED]:
                    _update(group, count, values, grad, moments["exp_avg"].view(-1), moments["exp_avg_sq"].view(-1))
                    continue
                for start in range(0, main.numel(), CHUNK):
                    stop = min(start + CHUNK, main.numel())
                    first, second = moments["exp_avg"].read(start, stop), moments["exp_avg_sq"].read(start, stop)
                    _update(group, count, values[start:stop], grad[start:stop], first, second)
                    moments["exp_avg"].write(start, first)
                    moments["exp_avg_sq"].write(start, second)

    def set_updates(self, count: int) -> None:
        """Set the number of steps so far, for the bias correction."""
        for group in self.param_groups:
            group["step"] = count

    def checkpoint_tensors(self, main: Tensor, *, loading: bool) -> dict[str, Tensor]:
        """Return the moments of a parameter in fp32: live tensors, or copies in host memory of those with 8 bits.

        Args:
            loading: the copies will be filled; :meth:`finish_loading` quantises them.
        """
        tensors = {}
        for name, moment in self.state[main].items():
            if isinstance(moment, Tensor):
                tensors[name] = moment
                continue
            tensors[name] = moment.on_host()
            if loading:
                self._loaded.append((moment, tensors[name]))
        return tensors

    def begin_loading(self) -> None:
        """Forget copies of a load that failed."""
        self._loaded.clear()

    def finish_loading(self) -> None:
        """Quantise the copies that have been filled since :meth:`begin_loading`."""
        for moment, values in self._loaded:
            moment.fill(values)
        self._loaded.clear()


def _update(
    group: Mapping[str, Any], count: int, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Update values and fp32 moments in place; ``count``: steps including this one."""
    beta1, beta2 = group["betas"]
    adamw(
        [values],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],  # max_exp_avg_sqs, for amsgrad only
        [torch.tensor(float(count - 1))],
        foreach=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
