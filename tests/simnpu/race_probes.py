"""Programs with and without a synchronisation, on two ranks in strict mode: ``race_probes.py RANK STORE`` prints what each reads.

Each probe takes ``synchronised`` and returns the tensor, or number, that it read.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

from simnpu.errors import StreamRaceWarning

PROBES: dict[str, Callable[[bool], Any]] = {}


def probe(function: Callable[[bool], Any]) -> Callable[[bool], Any]:
    PROBES[function.__name__] = function
    return function


def ready(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return [value, value], which every stream may read."""
    tensor = torch.full((2,), value, dtype=dtype, device="npu")
    torch.npu.synchronize()
    return tensor


@probe
def stream_waits_for_stream(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), torch.full((2,), 3.0, device="npu")
    if synchronised:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
        return y.cpu()


@probe
def stream_waits_for_event(synchronised: bool) -> torch.Tensor:
    side, x, event = torch.npu.Stream(), ready(3), torch.npu.Event()
    with torch.npu.stream(side):
        y = x * 2
        event.record()
    if synchronised:
        torch.npu.current_stream().wait_event(event)
    return (y + 0).cpu()


@probe
def event_is_recorded_after_the_work(synchronised: bool) -> torch.Tensor:
    side, x, event = torch.npu.Stream(), ready(3), torch.npu.Event()
    with torch.npu.stream(side):
        if not synchronised:
            event.record()
        y = x * 2
        if synchronised:
            event.record()
    event.wait()
    return y.cpu()


@probe
def waiting_is_transitive(synchronised: bool) -> torch.Tensor:
    first, second, x = torch.npu.Stream(), torch.npu.Stream(), ready(3)
    with torch.npu.stream(first):
        y = x * 2
    if synchronised:
        second.wait_stream(first)
    torch.npu.current_stream().wait_stream(second)
    return y.cpu()


@probe
def nested_streams(synchronised: bool) -> torch.Tensor:
    outer, inner, x = torch.npu.Stream(), torch.npu.Stream(), ready(3)
    with torch.npu.stream(outer):
        with torch.npu.stream(inner):
            y = x * 2
        if synchronised:
            outer.wait_stream(inner)
        z = y * 1
    outer.synchronize()
    return z.cpu()


@probe
def item_waits_for_the_current_stream_only(synchronised: bool) -> float:
    side, x = torch.npu.Stream(), ready(3)
    with torch.npu.stream(side):
        y = x.sum()
        if synchronised:
            return y.item()
    return y.item()


@probe
def overwritten_while_another_stream_reads(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(6)
    with torch.npu.stream(side):
        y = x + 0
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    x.zero_()
    torch.npu.synchronize()
    return y.cpu()


@probe
def overwritten_while_another_stream_writes(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(1)
    with torch.npu.stream(side):
        x.zero_()
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    x.fill_(6)
    return x.cpu()


@probe
def freed_while_another_stream_reads(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(6)
    with torch.npu.stream(side):
        y = x + 0
    if synchronised:
        x.record_stream(side)
    del x
    torch.zeros(2, device="npu")
    torch.npu.synchronize()
    return y.cpu()


@probe
def resized_while_another_stream_reads(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(6)
    with torch.npu.stream(side):
        y = x - 0
    if synchronised:
        x.record_stream(side)
    x.untyped_storage().resize_(0)  # as FSDP frees parameters
    x.untyped_storage().resize_(8)
    x.zero_()
    torch.npu.synchronize()
    return y.cpu()


@probe
def copy_to_pinned_memory(synchronised: bool) -> torch.Tensor:
    host, event = torch.zeros(2, pin_memory=True), torch.npu.Event()
    host.copy_(ready(6), non_blocking=True)
    event.record()
    if synchronised:
        event.synchronize()
    return host.clone()


@probe
def non_blocking_to_cpu(synchronised: bool) -> torch.Tensor:
    host = ready(6).to("cpu", non_blocking=True)
    if synchronised:
        torch.npu.current_stream().synchronize()
    return host.clone()


@probe
def overwritten_during_a_copy_to_the_host(synchronised: bool) -> torch.Tensor:
    side, x, host = torch.npu.Stream(), ready(6), torch.zeros(2, pin_memory=True)
    with torch.npu.stream(side):
        host.copy_(x, non_blocking=True)
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    x.zero_()
    torch.npu.synchronize()
    return host.clone()


@probe
def host_memory_back_to_the_device(synchronised: bool) -> torch.Tensor:
    side, host = torch.npu.Stream(), torch.zeros(2, pin_memory=True)
    host.copy_(ready(6), non_blocking=True)
    if synchronised:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        return host.to("npu", non_blocking=True).cpu()


@probe
def pinned_memory_changed_during_a_copy(synchronised: bool) -> torch.Tensor:
    host = torch.full((2,), 6.0).pin_memory()
    x = host.to("npu", non_blocking=True)
    if synchronised:
        torch.npu.current_stream().synchronize()
    host.zero_()
    return (x + 0).cpu()


@probe
def pageable_memory_needs_no_synchronisation(synchronised: bool) -> torch.Tensor:
    host, back = torch.full((2,), 6.0), torch.zeros(2)
    x = host.to("npu", non_blocking=True)
    host.zero_()
    back.copy_(x, non_blocking=True)
    return back.clone()


@probe
def integers(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(3, torch.int64)
    with torch.npu.stream(side):
        y = x * 2
    if synchronised:
        side.synchronize()
    return y.cpu()


@probe
def two_streams_read_the_same(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(3)
    with torch.npu.stream(side):
        y = x * 1
    if synchronised:
        y.record_stream(side)
    return (x * 2).cpu()


@probe
def parts_of_one_buffer(synchronised: bool) -> torch.Tensor:
    side, buffer = torch.npu.Stream(), torch.full((4,), 6.0, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        buffer[:2].zero_()
    return buffer[2:].cpu()


@probe
def fused_operator(synchronised: bool) -> torch.Tensor:
    side, x, weight = torch.npu.Stream(), ready(12), ready(6)
    with torch.npu.stream(side):
        y = x.view(1, 2) / 2
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    return torch_npu.npu_rms_norm(y, weight)[0].round().flatten().cpu()


@probe
def backward_of_work_on_another_stream(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(3).requires_grad_()
    with torch.npu.stream(side):
        loss = (x * x).sum()
    loss.backward()  # autograd waits by itself
    assert x.grad is not None
    return x.grad.cpu()


@probe
def all_reduce(synchronised: bool) -> torch.Tensor:
    x = ready(3)
    work = dist.all_reduce(x, async_op=True)
    if synchronised:
        work.wait()
    y = x + 0
    work.wait()
    return y.cpu()


@probe
def all_reduce_is_waited_for_by_another_stream(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(3)
    work = dist.all_reduce(x, async_op=True)
    with torch.npu.stream(side):
        work.wait()
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    return (x + 0).cpu()


@probe
def all_gather_input_is_overwritten(synchronised: bool) -> torch.Tensor:
    x, gathered = ready(6), torch.zeros(4, device="npu")
    work = dist.all_gather_into_tensor(gathered, x, async_op=True)
    if synchronised:
        work.wait()
    x.zero_()
    work.wait()
    return gathered[:2].cpu()


@probe
def changed_in_place_during_all_reduce(synchronised: bool) -> torch.Tensor:
    x = ready(6)
    work = dist.all_reduce(x, async_op=True)
    if synchronised:
        work.wait()
    x /= 2
    work.wait()
    return x.cpu()


@probe
def all_reduce_of_what_another_stream_writes(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(0)
    with torch.npu.stream(side):
        x.fill_(3)
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    dist.all_reduce(x)
    return x.cpu()


@probe
def receive(synchronised: bool) -> torch.Tensor:
    x, other = ready(6), ready(0)
    operations = [dist.P2POp(dist.isend, x, 1 - dist.get_rank()), dist.P2POp(dist.irecv, other, 1 - dist.get_rank())]
    works = dist.batch_isend_irecv(operations)
    if synchronised:
        for work in works:
            work.wait()
    y = other + 0
    for work in works:
        work.wait()
    return y.cpu()


@probe
def broadcast_is_read_at_its_root(synchronised: bool) -> torch.Tensor:
    x = ready(6)
    work = dist.broadcast(x, src=0, async_op=True)
    if synchronised or dist.get_rank() == 1:
        work.wait()
    y = x + 0
    work.wait()
    return y.cpu()


@probe
def barrier_waits_for_the_device(synchronised: bool) -> torch.Tensor:
    side, x = torch.npu.Stream(), ready(3)
    with torch.npu.stream(side):
        y = x * 2
    if synchronised:
        dist.barrier()
    result = y.cpu()
    dist.barrier()
    return result


def main(rank: int, store: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for name, function in PROBES.items():
        for synchronised in (True, False):
            torch.npu.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                value = function(synchronised)
            values = value.tolist() if isinstance(value, torch.Tensor) else [value]
            races = [str(w.message) for w in caught if w.category is StreamRaceWarning and w.filename == __file__]
            print(json.dumps([name, synchronised, values, races]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
