"""The simulated npu as a torch device: against the CPU's numbers, and against what hardware refuses.

Backward passes run in a forked rank: the first one starts a thread of autograd for the device, and processes forked
after that could not run any.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hccl_ranks import forked
from torch import Tensor, nn

from simnpu import device

pytestmark = pytest.mark.usefixtures("registered")


def same(on_npu: Tensor, on_cpu: Tensor) -> None:
    assert on_npu.device.type == "npu"
    assert on_npu.dtype == on_cpu.dtype
    assert on_npu.stride() == on_cpu.stride()
    torch.testing.assert_close(on_npu.cpu(), on_cpu, rtol=0, atol=0, equal_nan=True)


class Block(nn.Module):
    """Attention written out, since PyTorch's fused attention is another kernel on the CPU than elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        masked = (q @ k.transpose(1, 2)).masked_fill(torch.ones(8, 8, device=x.device).triu(1).bool(), -torch.inf)
        return x + self.out(nn.functional.gelu(masked.softmax(-1) @ v))


def train(device: str, steps: int, **adam: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), Block(16), Block(16), nn.Linear(16, 11)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adam)
    tokens = torch.arange(24).reshape(3, 8).remainder(11).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("adam", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_transformer_trains_to_the_cpus_bits(adam: dict[str, bool]) -> None:
    losses, parameters = forked(lambda: train("npu", 4, **adam))
    expected_losses, expected = forked(lambda: train("cpu", 4, **adam))
    assert losses == expected_losses
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, reference, rtol=0, atol=0)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1.5 * x,
    "mm": lambda x: x @ x.t(),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "gelu": nn.functional.gelu,
    "cat": lambda x: torch.cat([x, x], dim=1),
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(descending=True).values,
    "index": lambda x: x[:, torch.tensor([2, 0])],
    "index_put": lambda x: x.index_put((torch.tensor([1]).to(x.device),), torch.tensor(3.0)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "remainder of a number": lambda x: x % 0.3,
    "integer remainder of a number": lambda x: x.mul(10).long() % 3,
    "fmod, bfloat16": lambda x: torch.fmod(x.to(torch.bfloat16), 2),
    "xlogy": lambda x: torch.xlogy(x, 2.0),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "transposed": lambda x: x.t()[1:].contiguous(),
    "conv1d": lambda x: nn.functional.conv1d(x[None], x[:1, :, None].expand(1, 3, 1).contiguous()),
    "logsumexp": lambda x: x.logsumexp(-1),
    "std": lambda x: x.std(dim=0),
    "float8": lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
    "svd": lambda x: torch.linalg.svdvals(x),
    "sdpa": lambda x: nn.functional.scaled_dot_product_attention(*(x[None, None],) * 3).contiguous(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_gives_the_cpus_bits(name: str) -> None:
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    x = x[:, :3].contiguous() if name == "conv1d" else x
    result, expected = OPERATIONS[name](x.to("npu")), OPERATIONS[name](x)
    if name == "sdpa":  # the CPU has a fused kernel, the npu takes PyTorch's composite
        torch.testing.assert_close(result.cpu(), expected)
    else:
        same(result, expected)


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device="npu")
    x.view(2, 12)[0, 3] = 1
    x.t()[5, 3] = 2
    x[1:3].chunk(2)[1].fill_(3)
    x.as_strided([2], [1], 6).add_(4)
    expected = torch.zeros(4, 6)
    expected[0, 3], expected[3, 5], expected[2], expected[1, :2] = 1, 2, 3, 4
    same(x, expected)
    assert x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x[1].storage_offset() == 6


def test_cpu_and_npu_views_alias() -> None:
    x = torch.arange(6.0, device="npu").reshape(3, 1, 2)[1:]
    view = device.cpu_view(x)
    assert (view.device.type, view.shape, view.stride()) == ("cpu", x.shape, x.stride())
    view.mul_(10)
    assert x.flatten().tolist() == [20, 30, 40, 50]
    device.npu_view(view).zero_()
    assert view.sum() == 0


def test_out_grows_from_empty_and_fills_a_view() -> None:
    x, out = torch.ones(2, 3, device="npu"), torch.empty(0, device="npu")
    assert torch.add(x, 1, out=out) is out
    same(out, torch.full((2, 3), 2.0))
    target = torch.zeros(2, 6, device="npu")
    torch.mul(x, 5, out=target[:, ::2])
    assert target[0].tolist() == [5, 0, 5, 0, 5, 0]
    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.int64, device="npu")
    torch.max(torch.tensor([[1.0, 9.0, 3.0]], device="npu"), dim=1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([9], [1])


def test_cpu_tensors_are_refused_but_scalars_mix() -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.cat([x, torch.ones(3)])
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.add(x, x, out=torch.empty(3))
    same(x + torch.tensor(2.0), torch.full((3,), 3.0))
    with pytest.raises(TypeError, match="npu:0 device type tensor to numpy"):
        x.numpy()


def test_seeds_and_states_give_equal_draws_apart_from_the_cpus() -> None:
    def draw() -> list[Tensor]:
        x = torch.randn(3, device="npu")
        dropped = nn.functional.dropout(torch.ones(64, device="npu"), 0.5)
        return [x, dropped, torch.randperm(9, device="npu"), torch.empty(3, device="npu").uniform_()]

    generator = device.generator()
    torch.manual_seed(5)
    cpu_state, state = torch.get_rng_state(), generator.get_state()
    first = draw()
    assert torch.equal(torch.get_rng_state(), cpu_state)
    generator.set_state(state)
    repeated = draw()
    torch.manual_seed(5)
    seeded = draw()
    for a, b, c in zip(first, repeated, seeded, strict=True):
        same(a, b.cpu())
        same(a, c.cpu())
    assert not torch.equal(first[0], draw()[0])


def test_module_to_keeps_parameters_and_their_attributes() -> None:
    module = nn.Linear(3, 2)
    module.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight = module.weight
    module.to("npu")
    assert module.weight is weight
    assert weight.tensor_model_parallel
    assert weight.device == torch.device("npu:0")
    clone = copy.deepcopy(module)
    same(clone.weight.detach(), weight.detach().cpu())
    assert clone.weight.data_ptr() != weight.data_ptr()
    weight.data = torch.zeros(2, 3, device="npu")
    assert module(torch.ones(1, 3, device="npu")).tolist() == [module.bias.tolist()]


def test_autocast_casts_as_torch_npu_does() -> None:
    x, w = torch.randn(4, 4, device="npu"), torch.randn(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        product = nn.functional.linear(x, w)
        assert product.dtype == torch.bfloat16
        assert product.softmax(-1).dtype == torch.float32
        assert nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        assert (product + product).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    assert nn.functional.linear(x, w).dtype == torch.float32


def test_checkpoint_repeats_the_dropout() -> None:
    def gradient(recompute: bool) -> list[float]:
        torch.manual_seed(1)
        x = torch.ones(32, device="npu", requires_grad=True)
        block = lambda t: nn.functional.dropout(t * 2, 0.5).sin()  # noqa: E731
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert forked(gradient, True) == forked(gradient, False)


def test_save_and_load() -> None:
    x = torch.arange(6.0, device="npu").reshape(2, 3)
    file = io.BytesIO()
    torch.save({"x": x, "row": x[1]}, file)
    file.seek(0)
    loaded = torch.load(file)
    same(loaded["x"], x.cpu())
    assert loaded["row"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"


def test_a_freed_storage_reads_nan_and_can_be_filled_again() -> None:
    x = torch.ones(4, device="npu")
    storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
    storage.resize_(0)
    assert x.untyped_storage().size() == 0
    assert x.isnan().all()
    storage.resize_(size)
    storage.copy_(torch.full((4,), 2.0, device="npu").untyped_storage())
    assert x.tolist() == [2] * 4
    with pytest.raises(RuntimeError, match=f"asked for 64 bytes, created with {size}"):
        storage.resize_(64)


def test_names_and_devices() -> None:
    x = torch.empty(2, device=0)
    assert x.is_npu
    assert x.type() == "torch.npu.FloatTensor"
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.get_device_module("npu") is torch.npu  # type: ignore[attr-defined]
    torch.accelerator.synchronize()
    x.record_stream(torch.Stream("npu"))
    assert torch.ones(2).npu().device == torch.device("npu:0")  # type: ignore[attr-defined]
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert torch.zeros_like(x, device="meta").device.type == "meta"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_code_calls_the_replaced_factories() -> None:
    def factories(x: Tensor) -> Tensor:
        a = torch.empty([2], device=x.device).zero_() + torch.zeros([2], device=x.device)
        b = torch.ones([2], device=x.device) + torch.full([2], 3.0, device=x.device)
        c = torch.rand([2], device=x.device).floor() + torch.randn([2], device=x.device).mul(0)
        d = torch.tensor([1.0, 2.0], device=x.device) + torch.zeros_like(x) + torch.ones_like(x)
        return a + b + c + d + torch.empty_like(x).zero_()

    scripted: Any = torch.jit.script(factories)
    for device_name in ("npu", "cpu"):
        result = scripted(torch.ones(2, device=device_name))
        assert (result.device.type, result.tolist()) == (device_name, [6, 7])


def test_pinned_memory() -> None:
    for pinned in (torch.ones(3).pin_memory(), torch.empty(3, pin_memory=True)):
        assert pinned.is_pinned()
        assert pinned.device.type == "cpu"
        assert pinned.to("npu", non_blocking=True).device.type == "npu"
    assert not torch.ones(3).is_pinned()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="npu", pin_memory=True)


def test_resize_and_set() -> None:
    x = torch.arange(4.0, device="npu")
    x.resize_(2)
    assert x.tolist() == [0, 1]
    x.resize_(6)
    assert x.tolist()[:4] == [0, 1, 2, 3]
    x.set_(torch.ones(3, device="npu"))
    assert x.tolist() == [1, 1, 1]


def test_operators_of_other_libraries_are_refused() -> None:
    library = torch.library.Library("megascend_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    with pytest.raises(NotImplementedError, match=r"megascend_test::twice.*'npu' backend"):
        torch.ops.megascend_test.twice(torch.ones(1, device="npu"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_histograms_of_integers_too(dtype: torch.dtype) -> None:
    experts = torch.tensor([3, 0, 3, 7, 1, 3], dtype=dtype, device="npu")
    counts = torch.histc(experts, bins=8, min=0, max=7)
    assert (counts.dtype, counts.device.type, counts.tolist()) == (dtype, "npu", [1, 1, 0, 3, 0, 0, 0, 1])
    assert torch.histc(experts, bins=2).tolist() == [5, 1]
