"""The torch.cuda redirect, installed in this process and undone after every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megascend.runtime.bootstrap.reference import cuda_redirect
from support.forked_programs import run_forked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda is real here")


@pytest.fixture
def redirect() -> Iterator[None]:
    installed = bool(cuda_redirect.install())  # False if an earlier test bootstrapped the process
    try:
        yield
    finally:
        if installed:
            cuda_redirect.uninstall()


@pytest.mark.usefixtures("redirect")
class TestRedirect:
    def test_availability_is_unchanged(self) -> None:
        assert torch.cuda.is_available() is False
        assert torch.cuda.device_count() == 0

    def test_second_install_does_nothing(self) -> None:
        assert cuda_redirect.install() == []

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 3)])
    def test_all_forms_of_cuda_devices_mean_cpu(self, device: object) -> None:
        assert torch.zeros(2, device=device).tolist() == [0.0, 0.0]  # type: ignore[call-overload]
        assert torch.ones(2).to(device).device.type == "cpu"  # type: ignore[call-overload]
        assert torch.ones(2).to(device=device, dtype=torch.bfloat16).dtype == torch.bfloat16  # type: ignore[call-overload]

    def test_current_device_is_accepted_as_a_device(self) -> None:
        device = torch.cuda.current_device()
        assert torch.empty(1, device=device).to(device).device.type == "cpu"
        assert torch.nn.Linear(2, 2).to(device).cuda(device).weight.device.type == "cpu"

    def test_to_still_casts_dtypes(self) -> None:
        x = torch.ones(2)
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
        assert x.cuda().pin_memory().data_ptr() == x.data_ptr()

    def test_type_names(self) -> None:
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type(torch.int64).dtype == torch.int64

    def test_pinned_factories(self) -> None:
        assert torch.empty(2, pin_memory=True).shape == (2,)

    def test_meta_device_still_works(self) -> None:
        with torch.device("meta"):
            assert torch.arange(3).is_meta
        assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]

    def test_random_state_is_the_cpu_generator(self) -> None:
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        draws = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), draws)
        torch.cuda.default_generators[0].set_state(torch.cuda.random.get_rng_state("cuda"))
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(7)), draws)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), draws)

    def test_streams_and_events(self) -> None:
        stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        with torch.cuda.stream(stream):
            start.record()
            torch.ones(1).record_stream(stream)
            end.record(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.nvtx.range("outer"):
            assert torch.cuda.nvtx.range_push("inner") == 1
            torch.cuda.nvtx.mark("here")
            assert torch.cuda.nvtx.range_pop() == 1
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("unpaired"))
        assert start.elapsed_time(end) >= 0


def test_uninstall_restores_everything() -> None:
    """Run in a separate process, because this one may be bootstrapped."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); from {__name__} import install_and_uninstall as f; f()"
    completed = run_forked(code, Path(__file__).parent)
    assert completed.returncode == 0, completed.stderr


def install_and_uninstall() -> None:
    names = ("zeros", "empty", "tensor")
    before = [getattr(torch, name) for name in names] + [torch.Tensor.to, torch.cuda.Stream, torch.Tensor.type]
    cuda_redirect.install()
    assert torch.Tensor.to is not before[3]
    cuda_redirect.uninstall()
    after = [getattr(torch, name) for name in names] + [torch.Tensor.to, torch.cuda.Stream, torch.Tensor.type]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert "to" not in vars(torch.Tensor)
