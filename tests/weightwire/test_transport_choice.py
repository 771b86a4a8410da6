"""Choice of the transport by the locations of the trainer's and the engines' weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from weightwire.errors import ManifestError, TransportError
from weightwire.transports.choice import Location, check, choose, choose_pairs, fitting

A, B = "GPU-aaaa", "GPU-bbbb"


def location_of(
    device: str = "cpu", gpu: str = "", visible: tuple[str, ...] = (), host: str = "one", lends: bool = True
):
    return Location(device, host, f"space of {host}", gpu, visible, lends)


TRAINER = location_of("cuda", A, (A, B))
CASES = {
    "both on the CPU": (location_of(), [location_of()], "gloo"),
    "CPU of another host": (location_of(), [location_of(host="two")], "gloo"),
    "a trainer's GPU, an engine's CPU": (TRAINER, [location_of(host="two")], "gloo"),
    "a GPU each": (TRAINER, [location_of("cuda", B, (B,))], "nccl"),
    "GPUs of two hosts": (TRAINER, [location_of("cuda", "GPU-cccc", ("GPU-cccc",), "two")], "nccl"),
    "GPUs that are not known": (TRAINER, [Location("cuda")], "nccl"),
    "one GPU": (TRAINER, [location_of("cuda", A, (A,))], "cuda_ipc"),
    "one GPU, expandable segments": (
        location_of("cuda", A, (A,), lends=False),
        [location_of("cuda", A, (A,))],
        "shared_memory",
    ),
    "one GPU, and another that does not see it": (
        TRAINER,
        [location_of("cuda", A, (A,)), location_of("cuda", B, (B,))],
        "shared_memory",
    ),
    "two engines on one GPU that sees the trainer's": (TRAINER, [location_of("cuda", B, (B, A))] * 2, "cuda_ipc"),
    "a GPU and a CPU of one host": (TRAINER, [location_of("cuda", B, (B,)), location_of()], "shared_memory"),
    "a trainer's CPU, an engine's GPU": (location_of(), [location_of("cuda", B, (B,))], "shared_memory"),
    "NPUs": (location_of("npu"), [location_of("npu", host="two")], "hccl"),
    "a trainer's NPU, an engine's CPU": (location_of("npu"), [location_of()], "gloo"),
}


def named(receivers: list[Location]) -> dict[str, Location]:
    return {f"engine {number}": location for number, location in enumerate(receivers)}


@pytest.mark.parametrize("case", CASES)
def test_auto_chooses_a_transport_that_reaches_all_members(case: str) -> None:
    sender, receivers, expected = CASES[case]
    assert choose(sender, named(receivers)) == expected
    check(expected, sender, named(receivers))


def test_no_fitting_transport_raises_with_the_remedy() -> None:
    with pytest.raises(TransportError, match=r"engine 0: cuda GPU-bbbb on two.*WEIGHTWIRE_STAGING=cpu"):
        choose(location_of(), named([location_of("cuda", B, (B,), host="two")]))


@pytest.mark.parametrize(
    ("transport", "sender", "receiver", "problem"),
    [
        (
            "gloo",
            TRAINER,
            location_of("cuda", B, (B,)),
            "moves memory of cpu, and engine 0 keeps weights on cuda.*fits: nccl",
        ),
        ("nccl", TRAINER, location_of("cuda", A, (A,)), "needs a GPU for each member.*fits: cuda_ipc, shared_memory"),
        (
            "nccl",
            replace(TRAINER, nccl="2.27.5"),
            replace(location_of("cuda", B, (A, B)), nccl="2.28.9"),
            "needs one version of NCCL, and there are 2.27.5, 2.28.9.*fits: cuda_ipc",
        ),
        (
            "cuda_ipc",
            TRAINER,
            location_of("cuda", B, (B,)),
            "see the trainer's GPU, which engine 0 does not.*fits: nccl",
        ),
        ("cuda_ipc", TRAINER, location_of("cuda", B, (B,), "two"), "needs all members on one machine.*fits: nccl"),
        ("nccl", TRAINER, location_of(), "moves memory of cuda, and engine 0 keeps weights on cpu.*fits: gloo"),
        ("nccl", location_of(), location_of("cuda", B, (B,)), "moves memory of cuda, not of cpu.*fits: shared_memory"),
        ("shared_memory", location_of(), location_of(host="two"), "needs all members on one machine.*fits: gloo"),
    ],
)
def test_a_named_transport_that_does_not_fit_raises_with_those_that_do(transport, sender, receiver, problem) -> None:
    with pytest.raises(TransportError, match=problem):
        check(transport, sender, named([receiver]))


def test_files_reach_every_device_and_are_never_chosen() -> None:
    for sender, receivers, _ in CASES.values():
        check("files", sender, named(receivers))
        assert "files" not in fitting(sender, named(receivers))


def test_locations_survive_json_and_malformed_ones_raise() -> None:
    assert Location.from_json(json.loads(json.dumps(TRAINER.to_json()))) == TRAINER
    cpu = Location.of(torch.device("cpu"))
    assert (cpu.device, cpu.gpu) == ("cpu", "")
    assert cpu.space
    for data in ({}, {"visible": []}, {"visible": [], "device": "cpu", "more": 1}, None):
        with pytest.raises(ManifestError):
            Location.from_json(data)


def test_expandable_segments_keep_cuda_memory_from_being_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    assert not Location.of(torch.device("cpu")).lends


C = "GPU-cccc"
SHARDED = {
    "all on the CPU": ([location_of(), location_of()], [location_of(), location_of(host="two")], "gloo"),
    "a GPU for each member": (
        [location_of("cuda", A, (A,)), location_of("cuda", B, (B,))],
        [location_of("cuda", C, (C,))],
        "nccl",
    ),
    "a rank and a worker on one GPU": (
        [location_of("cuda", A, (A, B)), location_of("cuda", B, (A, B))],
        [location_of("cuda", A, (A, B))],
        "cuda_ipc",
    ),
    "a worker that does not see every rank's GPU": (
        [location_of("cuda", A, (A, B)), location_of("cuda", B, (A, B))],
        [location_of("cuda", A, (A,))],
        "shared_memory",
    ),
    "NPUs": ([location_of("npu")] * 2, [location_of("npu", host="two")], "hccl"),
    "GPUs to a CPU": ([location_of("cuda", A, (A,)), location_of("cuda", B, (B,))], [location_of(host="two")], "gloo"),
}


@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_update_has_a_transport_between_all_members(case: str) -> None:
    trainers, receivers, expected = SHARDED[case]
    ranks = {f"rank {number}": location for number, location in enumerate(trainers)}
    assert choose_pairs(None, ranks, named(receivers)) == expected


def test_a_sharded_update_without_a_transport_is_refused() -> None:
    with pytest.raises(TransportError, match="'files' only broadcasts"):
        choose_pairs("files", {"rank 0": location_of()}, named([location_of()]))
    twice = {f"rank {number}": location_of("cuda", A, (A,)) for number in range(2)}
    with pytest.raises(TransportError, match="nccl needs a GPU for each member"):
        choose_pairs("nccl", twice, named([location_of("cuda", B, (B,))]))
