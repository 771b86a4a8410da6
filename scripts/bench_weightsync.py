"""Measure weight updates from a trainer to an engine in two processes, compared with the bare transport in the same run.

    python scripts/bench_weightsync.py                   # two GPUs: NCCL, CUDA IPC; one GPU: CUDA IPC; none: Gloo, shared memory
    python scripts/bench_weightsync.py --gb 8 --bucket-mb 256 --json figures.json

Tensors have Qwen3's shapes in bfloat16 and are on the trainer's device. For every transport:

- bare: the same bytes in large pieces of the transport, nothing else: no filling, no digests;
- update: from the start of filling the first bucket until the receiver has compared the last digest with the trainer's.
  Only the tensors' bytes count. The target on two GPUs is 70 % of the bare transport;
- connect: rendezvous and creation of the transport, before that;
- pause: the time for which the engine would pause: the commit, which copies every tensor into the parameters in
  use, and the messages between the two processes.

Medians of ``--times`` rounds. weightwire and PyTorch are all it needs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from weightwire import digest
from weightwire.group import Listener, join
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of
from weightwire.transports import Setup, make_transport
from weightwire.transports.base import device_types

GIB = 2**30
TIMEOUT_S = 60.0
ON_GPUS, ON_A_CPU = ("nccl", "cuda_ipc"), ("gloo", "shared_memory")
LARGE = {"hidden": 2560, "ffn": 9728, "query": 4096, "key": 1024, "vocabulary": 151936}
"""Qwen3-4B; with 36 layers 8.04 GB."""
SMALL = {"hidden": 512, "ffn": 1536, "query": 1024, "key": 512, "vocabulary": 8192}
"""For a CPU."""


def shapes(gb: float) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3 model of about ``gb`` 10^9 bytes in bfloat16."""
    size = LARGE if gb >= 1 else SMALL
    hidden, ffn, query, key = size["hidden"], size["ffn"], size["query"], size["key"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    ends = {"embed_tokens": (size["vocabulary"], hidden), "norm": (hidden,)}
    rest = gb * 1e9 / 2 - sum(map(math.prod, ends.values()))
    layers = max(1, round(rest / sum(map(math.prod, layer.values()))))
    names = [(f"model.{name}.weight", shape) for name, shape in ends.items()]
    return names + [
        (f"model.layers.{index}.{name}.weight", shape) for index in range(layers) for name, shape in layer.items()
    ]


class Side:
    """Common part of both processes: a device, a pipe to the other one, and the arguments."""

    def __init__(self, pipe: Any, device: str, arguments: argparse.Namespace) -> None:
        self.pipe, self.device, self.arguments = pipe, torch.device(device), arguments
        torch.set_num_threads(1)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)
        self.bucket_bytes = arguments.bucket_mb * 2**20

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def exchange(self, value: Any) -> Any:
        """Give the other side a value and get its own: both are here then."""
        self.pipe.send(value)
        if not self.pipe.poll(TIMEOUT_S * 2):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def bare(self, transport: Any, sends: bool, nbytes: int) -> float:
        """Seconds for ``nbytes``, two pieces under way: of ``--bare-mb`` on GPUs, on a CPU of a bucket's size."""
        piece = min(self.bucket_bytes if self.device.type == "cpu" else self.arguments.bare_mb * 2**20, nbytes)
        buffers = [torch.zeros(piece, dtype=torch.uint8, device=self.device) for _ in range(2)]
        begin = transport.send if sends else transport.receive
        self.synchronise()
        begin(buffers[0]).wait(TIMEOUT_S)
        self.exchange("ready")
        start, works = time.perf_counter(), []
        for number in range(max(1, round(nbytes / piece))):
            if len(works) == 2:
                works.pop(0).wait(TIMEOUT_S)
            works.append(begin(buffers[number % 2]))
        for work in works:
            work.wait(TIMEOUT_S)
        self.exchange("done")
        return (time.perf_counter() - start) * nbytes / (piece * max(1, round(nbytes / piece)))


def trainer(pipe: Any, results: Any, device: str, arguments: argparse.Namespace, transport: str) -> None:
    """Offer and send ``--times`` updates; put the seconds of each into ``results``."""
    side = Side(pipe, device, arguments)
    generator = torch.Generator(side.device).manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, device=side.device, dtype=torch.bfloat16)
        for name, shape in shapes(arguments.gb)
    }
    listener = Listener()
    rounds = []
    for version in range(1, arguments.times + 2):
        manifest = Manifest(version, tuple(map(spec_of, weights, weights.values())), side.bucket_bytes)
        name = listener.new_group(["trainer", "engine"])
        offer = Offer(name, "bench", listener.host, listener.port, 1, 1, transport, TIMEOUT_S, 2 * TIMEOUT_S, manifest)
        side.exchange(offer.to_json())
        seconds = {}
        begin = time.perf_counter()
        sender = Sender.connect(listener, name, manifest, transport=transport, device=side.device, timeout_s=TIMEOUT_S)
        side.synchronise()
        first = time.perf_counter()
        with sender:
            seal = sender.send(weights.items())
            send_end = time.perf_counter()
            side.exchange(seal.to_json())
            verified = time.perf_counter()
        seconds.update(connect=first - begin, send=send_end - first, update=verified - first)
        pause = time.perf_counter()
        side.exchange("commit")
        seconds["pause"] = time.perf_counter() - pause
        seconds["bytes"] = manifest.nbytes
        seconds["bare"] = _bare(side, listener, manifest, transport, sends=True)
        side.exchange("next")
        rounds.append(seconds)
    results.put(rounds[1:])  # the first one warms up
    listener.close()


def engine(pipe: Any, device: str, arguments: argparse.Namespace, transport: str) -> None:
    """Receive, verify and commit, as the trainer asks."""
    side = Side(pipe, device, arguments)
    parameters = {
        name: torch.zeros(shape, device=side.device, dtype=torch.bfloat16) for name, shape in shapes(arguments.gb)
    }

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            parameters[name].copy_(tensor, non_blocking=True)

    receiver = Receiver("engine", device=side.device)
    for _ in range(arguments.times + 1):
        offer = Offer.from_json(_received(pipe))
        receiver.open(offer)
        pipe.send("open")
        seal = Seal.from_json(_received(pipe))
        receiver.verify(seal, TIMEOUT_S)
        pipe.send("verified")
        _received(pipe)
        receiver.commit(offer.update, load)
        receiver.settle(offer.update)
        pipe.send("committed")
        _bare(side, None, offer.manifest, transport, sends=False)
        _received(pipe)
        pipe.send("next")


def _received(pipe: Any) -> Any:
    if not pipe.poll(TIMEOUT_S * 2):
        raise TimeoutError("the other process does not answer")
    return pipe.recv()


def _bare(side: Side, listener: Listener | None, manifest: Manifest, transport: str, sends: bool) -> float:
    """Measure the bare transport in a separate group."""
    if listener is not None:
        address = [listener.host, listener.port, listener.new_group(["trainer", "engine"])]
        side.exchange(address)
    else:
        address = _received(side.pipe)
        side.pipe.send("coming")
    group = join(*address, 0 if sends else 1, TIMEOUT_S)
    medium = make_transport(transport, Setup(group, manifest, side.device, TIMEOUT_S))
    try:
        return side.bare(medium, sends, manifest.nbytes)
    finally:
        medium.close()
        group.close()


def local(device: str, arguments: argparse.Namespace, results: Any) -> None:
    """Measure the digest, a copy and a sum on one device, in GiB/s."""
    target = torch.device(device)
    data = torch.randint(0, 256, (min(arguments.bucket_mb, 1024) * 2**20,), dtype=torch.uint8, device=target)
    other = torch.empty_like(data)

    def rate(function: Callable[[], Any], times: int = 5) -> float:
        function()
        seconds = []
        for _ in range(times):
            if target.type != "cpu":
                torch.get_device_module(target).synchronize(target)
            start = time.perf_counter()
            function()
            if target.type != "cpu":
                torch.get_device_module(target).synchronize(target)
            seconds.append(time.perf_counter() - start)
        return data.numel() / statistics.median(seconds) / GIB

    torch.set_num_threads(1)
    results.put(
        {
            "digest": rate(lambda: digest.digest("multilinear64", data)),
            "copy": rate(lambda: other.copy_(data)),
            "sum": rate(lambda: data.view(torch.int64).sum()),
        }
    )


def pairs(transports: list[str] | None) -> Iterator[tuple[str, str, str]]:
    """Yield (transport, trainer's device, engine's device) for the devices of this machine."""
    gpus = torch.cuda.device_count()
    for transport in transports or (ON_GPUS if gpus else ON_A_CPU):
        kinds = device_types(transport)
        if "cuda" in kinds and gpus >= 2:
            yield transport, "cuda:0", "cuda:1"
        if transport == "cuda_ipc" and gpus >= 1:
            yield transport, "cuda:0", "cuda:0"
        if "cpu" in kinds and (transports or not gpus):
            yield transport, "cpu", "cpu"


def measure(transport: str, first: str, second: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Run both processes; return the rounds."""
    context = multiprocessing.get_context("spawn")
    trainer_pipe, engine_pipe = context.Pipe()
    results = context.Queue()
    processes = [
        context.Process(target=trainer, args=(trainer_pipe, results, first, arguments, transport)),
        context.Process(target=engine, args=(engine_pipe, second, arguments, transport)),
    ]
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + arguments.deadline
        while results.empty():
            if time.monotonic() > until or any(process.exitcode for process in processes):
                raise RuntimeError(
                    f"{transport}: {[process.exitcode for process in processes]} after {arguments.deadline} s"
                )
            time.sleep(0.05)
        rounds = results.get()
        for process in processes:
            process.join(20)
        return rounds
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def measure_local(device: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run :func:`local` in a separate process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=local, args=(device, arguments, results))
    process.start()
    try:
        return results.get(timeout=arguments.deadline)
    finally:
        process.join(20)
        process.kill()


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, help="size of the model in 10^9 bytes (default: 8 with a GPU, 0.2 without)")
    parser.add_argument("--bucket-mb", type=int, nargs="*", help="MiB of a bucket (default: 256, 512; on a CPU 16)")
    parser.add_argument(
        "--bare-mb", type=int, default=1024, help="MiB of a piece of the bare transport on GPUs (default: 1024)"
    )
    parser.add_argument("--times", type=int, default=3, help="rounds, after one to warm up (default: 3)")
    parser.add_argument(
        "--transports", nargs="*", help=f"default: {', '.join(ON_GPUS)} with GPUs, {', '.join(ON_A_CPU)} without"
    )
    parser.add_argument("--deadline", type=float, default=120, help="seconds for one transport (default: 120)")
    parser.add_argument("--json", help="where to write all figures")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    arguments.gb = arguments.gb or (8.04 if gpus else 0.2)
    buckets = arguments.bucket_mb or ([256, 512] if gpus else [16])
    rows, figures = [], {"torch": torch.__version__, "gb": arguments.gb, "rows": []}
    for bucket in buckets:
        arguments.bucket_mb = bucket
        figures[f"alone, {bucket} MiB"] = measure_local("cuda:0" if gpus else "cpu", arguments)
        for transport, first, second in pairs(arguments.transports):
            setup = {"transport": transport, "from": first, "to": second, "bucket_mib": bucket}
            try:
                rounds = measure(transport, first, second, arguments)
            except RuntimeError as error:
                print(f"{setup}: {error}", file=sys.stderr, flush=True)
                figures["rows"].append({**setup, "failed": str(error)})
                continue
            middle = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
            figures["rows"].append({**setup, **middle, "rounds": rounds})
            rows.append((setup, middle))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)
    report(figures, rows)


def report(figures: dict[str, Any], rows: list[tuple[dict[str, Any], dict[str, float]]]) -> None:
    """Print the table."""
    for name, values in figures.items():
        if name.startswith("alone"):
            print(f"{name}: " + ", ".join(f"{part} {rate:.1f} GiB/s" for part, rate in values.items()))
    print("| transport | from, to | bucket MiB | GB | bare GiB/s | update GiB/s | share % | connect ms | pause ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for setup, middle in rows:
        bare, update = (middle["bytes"] / middle[name] / GIB for name in ("bare", "update"))
        print(
            f"| {setup['transport']} | {setup['from']}, {setup['to']} | {setup['bucket_mib']} | {middle['bytes'] / 1e9:.2f} "
            f"| {bare:.1f} | {update:.1f} | {100 * update / bare:.0f} | {1e3 * middle['connect']:.0f} "
            f"| {1e3 * middle['pause']:.1f} |"
        )


if __name__ == "__main__":
    main()
