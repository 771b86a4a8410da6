"""Several simulated devices in one process: tensors, copies, refusals, streams, random states and memory of each.

What a test runs is forked, since the current device and what was allocated belong to the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hccl_ranks import forked
from torch import Tensor, nn

from simnpu.errors import ConfigError

pytestmark = pytest.mark.usefixtures("three_devices", "registered")


@pytest.fixture
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMNPU_DEVICES", "3")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def npu() -> Any:
    return vars(torch)["npu"]


CONSTRUCTORS: dict[str, Callable[[Any], Tensor]] = {
    "ones": lambda d: torch.ones(2, device=d),
    "empty": lambda d: torch.empty(2, device=d),
    "empty_strided": lambda d: torch.empty_strided((2,), (1,), device=d),
    "zeros": lambda d: torch.zeros(2, device=d),
    "full": lambda d: torch.full((2,), 1.0, device=d),
    "arange": lambda d: torch.arange(2, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 2, device=d),
    "eye": lambda d: torch.eye(2, device=d),
    "tensor": lambda d: torch.tensor([1.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
    "asarray": lambda d: torch.asarray([1.0], device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "randn": lambda d: torch.randn(2, device=d),
    "randint": lambda d: torch.randint(5, (2,), device=d),
    "randperm": lambda d: torch.randperm(2, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (2,), device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(1, device=d),
    "tril_indices": lambda d: torch.tril_indices(2, 2, device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(2), device=d),
    "new_zeros": lambda d: torch.ones(2).new_zeros(2, device=d),
    "new_tensor": lambda d: torch.ones(2).new_tensor([1.0], device=d),
    "to": lambda d: torch.ones(2).to(d),
    "to with a type": lambda d: torch.ones(2).to(device=d, dtype=torch.bfloat16),
    "module": lambda d: nn.Linear(2, 2).to(d).weight.data,
    "made there": lambda d: nn.Linear(2, 2, device=d).weight.data,
    "default": lambda d: _with_default(d, lambda: torch.tensor([1.0])),
    "context": lambda d: _in_context(d, lambda: torch.tensor([1.0]) + torch.ones(1)),
    "storage": lambda d: torch.empty(0, device=d).set_(torch.UntypedStorage(8, device=d)),
}


def _in_context(target_device: Any, make: Callable[[], Tensor]) -> Tensor:
    with torch.device(target_device):
        return make()


def _with_default(device: Any, make: Callable[[], Tensor]) -> Tensor:
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_makes_tensors_where_it_is_told(name: str) -> None:
    def body() -> list[str]:
        make = CONSTRUCTORS[name]
        devices = [str(make("npu:1").device), str(make(torch.device("npu", 2)).device), str(make("npu").device)]
        npu().set_device(1)
        devices += [str(make("npu").device), str(make(torch.device("npu")).device), str(make("npu:0").device)]
        with npu().device(2):
            devices.append(str(make("npu").device))
        return [*devices, str(make("npu").device)]

    device_1, device_2, device_0 = "npu:1", "npu:2", "npu:0"
    assert forked(body) == [device_1, device_2, device_0, device_1, device_1, device_0, device_2, device_1]


def test_operators_stay_on_their_device_and_views_too() -> None:
    x = torch.arange(12.0, device="npu:1").reshape(3, 4)
    results = [x + 1, x @ x.t(), x[1:], x.t(), x.view(-1), x.topk(2).values, x.to(torch.bfloat16), x.clone()]
    results += [torch.cat([x, x]), x.add_(1), torch._foreach_mul([x], 2.0)[0], torch.zeros_like(x), x.new_ones(2)]
    results += [nn.functional.dropout(x), torch.add(x, 1, out=torch.empty(0, device="npu:1")), x.sigmoid().bernoulli()]
    assert {str(result.device) for result in results} == {"npu:1"}
    assert x[0].untyped_storage().device == torch.device("npu:1")
    assert (x.get_device(), x.cpu().device.type) == (1, "cpu")


def test_copies_between_devices() -> None:
    x = torch.arange(4.0, device="npu:1")
    y = x.to("npu:2")
    x.add_(1)
    assert (str(y.device), y.tolist(), x.tolist()) == ("npu:2", [0, 1, 2, 3], [1, 2, 3, 4])
    assert y.copy_(x).tolist() == [1, 2, 3, 4]
    assert str(y.device) == "npu:2"
    assert x.to("npu:1") is x
    torch._foreach_copy_([x, y], [torch.zeros(4, device="npu:2"), torch.ones(4)])
    assert (x.tolist(), y.tolist()) == ([0] * 4, [1] * 4)


@pytest.mark.parametrize(
    "operate",
    [
        lambda a, b: a + b,
        lambda a, b: b @ a,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.add(a, a, out=b),
        lambda a, b: a.add_(b),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch._foreach_add([a, b], [b, b]),
        lambda a, b: nn.functional.linear(a, b),
    ],
)
def test_two_devices_do_not_meet_in_an_operator(operate: Callable[[Tensor, Tensor], Any]) -> None:
    a, b = torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device="npu:1")
    with pytest.raises(
        RuntimeError, match=r"Expected all tensors to be on the same device.*npu:0 and npu:1|npu:1 and npu:0"
    ):
        operate(a, b)


def test_lists_may_lie_on_several_devices_place_by_place() -> None:
    a, b = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    torch._foreach_add_([a, b], [a, b])
    assert [str(t.device) for t in torch._foreach_norm([a, b])] == ["npu:0", "npu:1"]
    assert (a + 0).tolist() == (b + 0).tolist() == [2, 2]
    assert nn.utils.clip_grad_norm_(_with_gradients([a, b]), 1.0).item() == pytest.approx(4)


def _with_gradients(tensors: list[Tensor]) -> list[Tensor]:
    parameters = [nn.Parameter(t.clone()) for t in tensors]
    for parameter, gradient in zip(parameters, tensors, strict=True):
        parameter.grad = gradient
    return parameters


def train(first: str, second: str) -> tuple[list[float], list[Tensor]]:
    """Train two layers, one device each, and a gradient that several paths add to."""
    torch.manual_seed(0)
    layer_1, layer_2 = nn.Linear(8, 8).to(first), nn.Linear(8, 8).to(second)
    optimizer = torch.optim.AdamW([*layer_1.parameters(), *layer_2.parameters()], lr=1e-2)
    losses = []
    for step in range(3):
        hidden = torch.utils.checkpoint.checkpoint(
            layer_1, torch.arange(16.0).view(2, 8).to(first), use_reentrant=step == 1
        )
        moved = hidden.to(second)
        loss = (layer_2(moved) * moved + moved).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in (*layer_1.parameters(), *layer_2.parameters())]


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("devices", [("npu:1", "npu:2"), ("npu:0", "npu:1"), ("npu:2", "npu:2")])
def test_a_model_over_devices_trains_to_the_cpus_bits(devices: tuple[str, str]) -> None:
    losses, parameters = forked(train, *devices)
    expected_losses, expected = forked(train, "cpu", "cpu")
    assert losses == expected_losses
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, reference, rtol=0, atol=0)


def test_the_current_device_belongs_to_a_thread() -> None:
    def body() -> tuple[Any, ...]:
        indices: list[int] = []
        npu().set_device("npu:2")
        thread = threading.Thread(target=lambda: indices.append(npu().current_device()))
        thread.start()
        thread.join()
        with npu().device(torch.device("npu:1")), npu().device(-1), npu().device(None):
            inside = npu().current_device()
        with torch.accelerator.device_index(0):
            inner = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index("npu:1")
        return indices, inside, inner, npu().current_device(), torch.accelerator.device_count()

    assert forked(body) == ([0], 1, 0, 1, 3)


def test_random_states_are_of_a_device() -> None:
    def body() -> None:
        torch.manual_seed(3)
        draws = [torch.rand(4, device=f"npu:{i}").tolist() for i in range(3)]
        assert draws[0] == draws[1] == draws[2]
        npu().manual_seed(9)  # of the current device alone
        assert torch.rand(4, device="npu:0").tolist() != torch.rand(4, device="npu:1").tolist()
        state, before = npu().get_rng_state(1), npu().get_rng_state("npu:2")
        first = torch.rand(4, device="npu:1")
        npu().set_rng_state(state, 1)
        assert torch.equal(first, torch.rand(4, device="npu:1"))
        assert torch.equal(before, npu().get_rng_state(2))
        with torch.random.fork_rng([1], device_type="npu"):
            torch.rand(4, device="npu:1")
        npu().default_generators[1].manual_seed(5)
        seeded = torch.rand(2, device="npu:1").tolist()
        with npu().device(1):
            npu().manual_seed(5)
            assert torch.rand(2, device="npu").tolist() == seeded

    forked(body)


def test_a_generator_of_a_device() -> None:
    for target_device in ("npu", "npu:2", torch.device("npu:1")):
        device_generator = torch.Generator(device=target_device).manual_seed(7)
        assert isinstance(device_generator, torch.Generator)
        assert device_generator.device == torch.device("npu", torch.device(target_device).index or 0)
        sample = torch.randn(3, generator=device_generator, device=target_device)
        assert sample.device == device_generator.device
        assert torch.equal(sample.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(7)))
        assert torch.randperm(9, generator=device_generator, device=target_device).device == device_generator.device
    assert torch.Generator().device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)


def test_streams_and_events_of_a_device() -> None:
    def body() -> None:
        stream_1, stream_2 = npu().Stream("npu:1"), npu().Stream(device=2)
        assert (stream_1.device, stream_2.device_index) == (torch.device("npu:1"), 2)
        assert npu().current_stream(1) == npu().default_stream("npu:1")
        with npu().stream(stream_1):
            assert npu().current_device() == 1
            assert npu().current_stream() == stream_1 != npu().current_stream(2)
            assert torch.accelerator.current_stream() == stream_1
            torch.accelerator.current_stream().wait_event(stream_2.record_event())
        assert npu().current_device() == 0
        assert isinstance(stream_1, torch.Stream)
        assert issubclass(npu().Stream, torch.Stream)
        event = torch.Event("npu", enable_timing=True)
        event.record(torch.accelerator.current_stream(1))
        assert event.device == torch.device("npu:1")
        later = torch.npu.Event(enable_timing=True)  # type: ignore[attr-defined]
        later.record()
        assert event.elapsed_time(later) >= 0
        with torch.Stream("npu:2") as entered:
            assert torch.accelerator.current_stream() == entered
        assert torch.accelerator.current_device_index() == 0
        assert torch.Stream("cpu").device.type == "cpu"
        torch.ones(1, device="npu:1").record_stream(stream_1)
        torch.accelerator.synchronize(1)

    forked(body)


def test_memory_is_counted_for_each_device() -> None:
    def body() -> None:
        before, other_device = npu().memory_allocated(1), npu().memory_allocated(2)
        first = npu().memory_allocated()
        x = torch.zeros(1000, device="npu:1")
        y = x[10:].view(-1)
        del x  # the view keeps the storage
        z = torch.zeros(250, device="npu:2")
        assert npu().memory_allocated(1) - before == 4000
        assert npu().memory_allocated("npu:2") == torch.accelerator.memory_allocated(2) == other_device + 1000
        assert npu().memory_allocated() == first
        y.untyped_storage().resize_(0)
        assert npu().memory_allocated(1) == before
        y.untyped_storage().resize_(4000)
        del y
        assert npu().memory_allocated(1) == before
        assert npu().max_memory_allocated(1) == before + 4000
        npu().reset_peak_memory_stats(1)
        torch.accelerator.reset_peak_memory_stats(2)
        assert (npu().max_memory_allocated(1), torch.accelerator.max_memory_allocated(2)) == (
            before,
            other_device + 1000,
        )
        weight = torch.zeros(250, device="npu:1", requires_grad=True)
        product = (weight * 2).exp()  # saved for backward
        assert (
            npu().memory_allocated(1)
            == torch.accelerator.memory_stats(1)["allocated_bytes.all.current"]
            == before + 2000
        )
        del product
        assert npu().memory_allocated(1) - before == 1000
        free, total = torch.accelerator.get_memory_info(1)
        assert 0 < free <= total
        assert z.device.index == 2

    forked(body)


@pytest.mark.parametrize(("visible", "count"), [("0,2", 2), ("1", 1), ("", 0), (None, 3)])
def test_the_number_of_visible_devices(visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert (npu().device_count(), torch.accelerator.device_count(), npu().is_available()) == (count, count, count > 0)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        for call in (
            lambda: torch.ones(1, device="npu:3"),
            lambda: torch.ones(1).to("npu:7"),
            lambda: npu().set_device(3),
            lambda: npu().Stream("npu:5"),
        ):
            with pytest.raises(RuntimeError, match=r"Invalid device ID.*sees 3 .*ASCEND_RT_VISIBLE_DEVICES"):
                call()

    forked(body)
    for text in ("0,x", "1,1"):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
        with pytest.raises(ConfigError, match="ASCEND_RT_VISIBLE_DEVICES"):
            npu().device_count()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="this host has 3"):
        npu().device_count()
