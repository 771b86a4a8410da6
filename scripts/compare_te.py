"""Compare the reference Transformer Engine (``megascend.reference.te``) with NVIDIA's, on CUDA.

    python scripts/compare_te.py layers                  # every layer, forward and gradients, fp32 and bf16; attributes
    python scripts/compare_te.py model                   # small Qwen3 and Qwen3-MoE through mcore-bridge, one GPU
    python scripts/compare_te.py model --ranks 2         # the same with TP 2, TP 2 + sequence parallel, EP 2
    python scripts/compare_te.py layers --self --device cpu      # the reference with itself: checks this script

``layers`` runs both implementations in one process: same weights, same input, same output gradient. ``model`` starts
one set of processes with the real package and one with the reference in its place, on the same weights, and compares
losses and the gradients of all parameters, rank by rank.

Figures are relative: |reference - real| / |real| over the whole tensor (2-norms), beside the largest absolute
difference. fp32 is computed without TF32 (``NVIDIA_TF32_OVERRIDE=0``: Transformer Engine's fp32 GEMM uses
TF32 regardless of PyTorch's switch). bf16 rounds at different points in the two, so its bound is loose and the fp32
comparison is the proof. The exit code is 1 if any figure is beyond its bound (``BOUNDS``), an attribute
differs, or a process fails.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read by cuBLAS when it is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    import torch

BOUNDS = {
    ("layers", "fp32"): 2e-5,
    ("layers", "bf16"): 1.5e-2,
    ("model", "fp32"): 2e-4,
    ("model", "bf16"): 5e-2,
    ("moe", "fp32"): 2e-4,
    ("moe", "bf16"): 1.5e-1,  # a token whose router scores nearly tie may go to another expert
}
"""Largest relative difference accepted, by part and precision."""

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
ABSENT = "absent"


@dataclass
class Table:
    """Rows of the comparison; remembers whether one was beyond its bound."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: int = 0

    def tensors(self, label: str, bound: float, reference: dict[str, Any], real: dict[str, Any]) -> None:
        """Add a row for the worst tensor of a group."""
        if reference.keys() != real.keys():
            different = ", ".join(sorted(reference.keys() ^ real.keys()))
            self.rows.append((label, "", "", "", f"FAILED: only one side has {different}"))
            self.failures += 1
            return
        largest = ("", -1.0, 0.0)
        for name, expected in real.items():
            relative, absolute = difference(reference[name], expected)
            if not relative <= largest[1]:  # also catches NaN
                largest = (name, relative, absolute)
        good = largest[1] <= bound
        self.failures += not good
        self.rows.append((label, f"{largest[1]:.1e}", f"{largest[2]:.1e}", f"{bound:.0e}", "" if good else "FAILED "))
        self.rows[-1] = (*self.rows[-1][:4], self.rows[-1][4] + largest[0])

    def equal(self, label: str, reference: Any, real: Any) -> None:
        """Add a row for values that must be equal."""
        good = reference == real
        self.failures += not good
        text = str(real) if good else f"FAILED: reference {reference}, real {real}"
        self.rows.append((label, "same" if good else "", "", "", text))

    def note(self, label: str, text: str) -> None:
        """Add a row with the reason why a case was not compared."""
        self.rows.append((label, "", "", "", text))

    def failed(self, label: str, text: str) -> None:
        """Add a row for a case that failed to run."""
        self.failures += 1
        self.rows.append((label, "", "", "", f"FAILED: {text}"))

    def print(self) -> None:
        header = ("compared", "relative", "absolute", "bound", "worst tensor / value")
        widths = [max(len(row[column]) for row in [header, *self.rows]) for column in range(4)]
        for row in [header, *self.rows]:
            print(*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4], sep="  ")
        print(f"{len(self.rows)} comparisons, {self.failures} failed")


def difference(reference: torch.Tensor, real: torch.Tensor) -> tuple[float, float]:
    """Relative 2-norm and largest absolute difference, in float64."""
    reference, real = reference.detach().cpu().double(), real.detach().cpu().double()
    if reference.shape != real.shape:
        return float("inf"), float("inf")
    if real.numel() == 0:
        return 0.0, 0.0
    gap = reference - real
    norm = real.norm().item()
    return gap.norm().item() / (norm if norm > 0 else 1.0), gap.abs().max().item()


# --- layer by layer ---------------------------------------------------------------------------------------------------


def reference_class(name: str) -> type:
    """Find a class of the reference implementation in any of its modules."""
    package = import_module("megascend.reference.te")
    modules = [package] + [
        import_module(info.name) for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    for module in modules:
        if isinstance(candidate := getattr(module, name, None), type):
            return candidate
    raise AttributeError(f"megascend.reference.te has no class {name}")


def classes(name: str, with_itself: bool) -> tuple[type, type]:
    """Return the reference and the real class of a name in ``transformer_engine.pytorch``."""
    reference = reference_class(name)
    if with_itself:
        return reference, reference
    if name == "FusedAdam":
        return reference, import_module("transformer_engine.pytorch.optimizers").FusedAdam
    return reference, getattr(import_module("transformer_engine.pytorch"), name)


def copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Random values, norm weights around one, the same on both sides."""
    import torch

    targets = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parameter.normal_(1.0 if "norm" in name or (parameter.dim() == 1 and name == "weight") else 0.0, 0.2)
            targets[name].copy_(parameter)


def run_layer(module: torch.nn.Module, inputs: list[torch.Tensor], call: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return outputs, input gradients and parameter gradients for a fixed output gradient."""
    import torch

    inputs = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    outputs = call(module, *inputs)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(out)]
    result = {f"output {index}": out for index, out in enumerate(outputs)}
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    grads = [torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype) for out in outputs]
    differentiable = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in differentiable], [grad for _, grad in differentiable])
    result |= {f"d input {index}": tensor.grad for index, tensor in enumerate(inputs) if tensor.grad is not None}
    return result | {f"d {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class LayerCase:
    """A layer, how it is built and how it is called."""

    name: str
    label: str
    arguments: dict[str, Any]
    inputs: Callable[[Callable[..., torch.Tensor]], list[torch.Tensor]]
    call: Callable[..., Any] = lambda module, x: module(x)
    precisions: tuple[str, ...] = ("fp32", "bf16")


def plain_cases() -> Iterator[LayerCase]:
    """Linear layers and norms on [sequence, batch, hidden] = [96, 2, 128]."""

    def hidden(randn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return [randn(96, 2, 128)]

    for bias in (False, True):
        text = "with bias" if bias else "without bias"
        linear = {"in_features": 128, "out_features": 192, "bias": bias}
        yield LayerCase("Linear", f"Linear {text}", linear, hidden)
        normed = {"eps": 1e-6, "normalization": "RMSNorm", **linear}
        yield LayerCase("LayerNormLinear", f"LayerNormLinear RMSNorm {text}", normed, hidden)
    yield LayerCase("Linear", "Linear return_bias", {**linear, "return_bias": True}, hidden)
    layernorm = {**normed, "normalization": "LayerNorm"}
    yield LayerCase("LayerNormLinear", "LayerNormLinear LayerNorm", layernorm, hidden)
    yield LayerCase(
        "LayerNormLinear", "LayerNormLinear layernorm output", {**normed, "return_layernorm_output": True}, hidden
    )
    yield LayerCase("RMSNorm", "RMSNorm", {"hidden_size": 128, "eps": 1e-6}, hidden)
    yield LayerCase("LayerNorm", "LayerNorm", {"hidden_size": 128, "eps": 1e-6}, hidden)
    splits = [40, 0, 88, 64]
    yield LayerCase(
        "GroupedLinear",
        f"GroupedLinear rows {splits}",
        {"num_gemms": len(splits), "in_features": 128, "out_features": 192, "bias": False},
        lambda randn: [randn(sum(splits), 128)],
        lambda module, x: module(x, splits),
    )


def attention_cases(device: str) -> Iterator[LayerCase]:
    """Causal grouped-query attention, 8 heads in 2 groups, in every layout; windows; packed sequences."""
    import torch

    def arguments(layout: str, **extra: Any) -> dict[str, Any]:
        return {
            "num_attention_heads": 8,
            "kv_channels": 64,
            "num_gqa_groups": 2,
            "attention_dropout": 0.0,
            "qkv_format": layout,
            **extra,
        }

    def qkv(*leading: int) -> Callable[..., list[torch.Tensor]]:
        return lambda randn: [randn(*leading, heads, 64) for heads in (8, 2, 2)]

    for layout, leading in {"sbhd": (128, 2), "bshd": (2, 128)}.items():
        for mask in ("causal", "no_mask"):
            yield LayerCase(
                "DotProductAttention",
                f"DotProductAttention {layout} {mask}",
                arguments(layout, attn_mask_type=mask),
                qkv(*leading),
                lambda module, q, k, v: module(q, k, v),
            )
    yield LayerCase(
        "DotProductAttention",
        "DotProductAttention sbhd window 32",
        arguments("sbhd", attn_mask_type="causal", window_size=(32, 0)),
        qkv(128, 2),
        lambda module, q, k, v: module(q, k, v),
    )
    lengths = [128, 64, 192, 256]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(device=device, dtype=torch.int32)
    packed = {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
        "attn_mask_type": "padding_causal",
    }
    yield LayerCase(
        "DotProductAttention",
        f"DotProductAttention thd {lengths}",
        arguments("thd", attn_mask_type="padding_causal"),
        qkv(sum(lengths)),
        lambda module, q, k, v: module(q, k, v, **packed),
    )


def compare_layers(table: Table, device: str, with_itself: bool) -> None:
    """Compare every case in both precisions, then the optimizer and the attributes."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for case in [*plain_cases(), *attention_cases(device)]:
        for precision in case.precisions:
            torch.manual_seed(1)
            dtype = dtypes[precision]
            label = f"{case.label} {precision}"
            reference_type, real_type = classes(case.name, with_itself)
            weights = {} if case.name == "DotProductAttention" else {"params_dtype": dtype, "device": device}
            real, reference = real_type(**case.arguments, **weights), reference_type(**case.arguments, **weights)
            copy_parameters(real, reference)
            inputs = case.inputs(lambda *size, dtype=dtype: torch.randn(size, device=device).to(dtype))
            try:
                expected = run_layer(real, inputs, case.call)
            except Exception as error:  # noqa: BLE001 - whatever the real one cannot do is reported, not compared
                table.note(label, f"not compared: the real one raised {type(error).__name__}: {str(error)[:120]}")
                continue
            actual = run_layer(reference, inputs, case.call)
            table.tensors(label, BOUNDS["layers", precision], actual, expected)
    compare_adam(table, device, with_itself)
    compare_attributes(table, device, with_itself)


def compare_adam(table: Table, device: str, with_itself: bool) -> None:
    """Five steps of FusedAdam with weight decay in two groups: parameters and both moments."""
    import torch

    results = []
    for kind in classes("FusedAdam", with_itself):
        generator = torch.Generator(device).manual_seed(3)
        parameters = [
            torch.nn.Parameter(torch.randn(64, 33, generator=generator, device=device)),
            torch.nn.Parameter(torch.randn(129, generator=generator, device=device)),
        ]
        groups = [{"params": [parameters[0]], "weight_decay": 0.1}, {"params": [parameters[1]], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
            optimizer.step()
        tensors = {f"parameter {index}": parameter for index, parameter in enumerate(parameters)}
        for index, parameter in enumerate(parameters):
            tensors |= {f"{name} {index}": optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")}
        results.append(tensors)
        step = [group.get("step") for group in optimizer.param_groups]
        results.append([int(value) if value is not None else None for value in step])
    reference, reference_step, real, real_step = results
    table.tensors("FusedAdam 5 steps fp32", BOUNDS["layers", "fp32"], reference, real)
    table.equal("FusedAdam group step", reference_step, real_step)


def compare_attributes(table: Table, device: str, with_itself: bool) -> None:
    """Compare the parameter attributes that Megatron reads (shards, gradient norm, sequence-parallel reduction)."""
    import torch

    modes = {"column": "column", "row": "row", "none": None}
    for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
        for mode_label, mode in modes.items():
            if name == "LayerNormLinear" and mode == "row":
                continue
            for sequence_parallel in (False, True):
                # Megatron never lets GroupedLinear communicate: the token dispatcher does.
                split = mode is not None and name != "GroupedLinear"
                if sequence_parallel and not split:
                    continue
                arguments: dict[str, Any] = {
                    "in_features": 128,
                    "out_features": 128,
                    "bias": True,
                    "parallel_mode": mode,
                    "tp_size": 2 if split else 1,
                    "sequence_parallel": sequence_parallel,
                    "params_dtype": torch.float32,
                    "device": device,
                }
                if name == "GroupedLinear":
                    arguments |= {"num_gemms": 2}
                attributes = []
                label = f"attributes {name} {mode_label}{' sequence parallel' if sequence_parallel else ''}"
                try:
                    for kind in classes(name, with_itself):
                        module = kind(**arguments)
                        attributes.append(
                            {
                                parameter_name: {key: getattr(parameter, key, ABSENT) for key in ATTRIBUTES}
                                | {"shape": tuple(parameter.shape)}
                                for parameter_name, parameter in module.named_parameters()
                            }
                        )
                except Exception as error:  # noqa: BLE001 - a layer that cannot be built is a row of the table
                    table.failed(label, f"{type(error).__name__}: {str(error)[:160]}")
                    continue
                reference, real = attributes
                table.equal(f"{label}: parameters", sorted(reference), sorted(real))
                for parameter_name in sorted(reference.keys() & real.keys()):
                    short = {k: v for k, v in real[parameter_name].items() if v != ABSENT}
                    other = {k: v for k, v in reference[parameter_name].items() if v != ABSENT}
                    table.equal(f"{label}: {parameter_name}", other, short)


# --- the whole model --------------------------------------------------------------------------------------------------

LAYOUTS = {
    1: {"tp1": {}},
    2: {"tp2": {"tp": 2}, "tp2+sp": {"tp": 2, "sp": True}, "tp2+sp+ep2": {"tp": 2, "sp": True, "ep": 2}},
}
MODELS = ("qwen3", "qwen3_moe")
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
"""Wide enough that Transformer Engine takes its fused attention in bf16."""
LENGTH = 256


def model_cases(processes: int) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """(name, architecture, layout, precision). MoE under TP needs sequence parallelism, and EP is MoE's."""
    for layout_name, layout in LAYOUTS[processes].items():
        for arch in MODELS:
            moe = arch == "qwen3_moe"
            if bool(layout.get("ep")) != (moe and processes > 1):
                continue
            for precision in ("fp32", "bf16"):
                yield f"{arch} {layout_name} {precision}", arch, layout, precision


def model_rank(arguments: argparse.Namespace) -> None:
    """Run every case as one rank of one side, and save losses and gradients."""
    import megascend

    megascend.bootstrap(arguments.device).load_megatron()
    import megatron.core.parallel_state as mpu
    import torch
    import torch.distributed as dist
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from transformers import AutoConfig

    torch.backends.cuda.matmul.allow_tf32 = False
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    results = {}
    for name, arch, layout, precision in model_cases(arguments.ranks):
        tp, ep = layout.get("tp", 1), layout.get("ep", 1)
        etp = 1 if ep > 1 else tp
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11)
        checkpoint = arguments.work / arch
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        settings = {
            "params_dtype": dtype,
            "bf16": precision == "bf16",
            "tensor_model_parallel_size": tp,
            "sequence_parallel": layout.get("sp", False),
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
        }
        hf_config = AutoConfig.from_pretrained(checkpoint)
        config = ModelConfig(**{**hf_to_mcore_config(hf_config), **settings})
        models = get_mcore_model(config)
        config.bridge.load_weights(models, str(checkpoint))
        model = models[0].to(device)
        model.train()
        tokens = torch.randint(0, 320, (2, LENGTH + 1), generator=torch.Generator().manual_seed(5)).to(device)
        losses = model(
            input_ids=tokens[:, :-1].contiguous(),
            position_ids=torch.arange(LENGTH, device=device).expand(2, -1),
            attention_mask=None,
            labels=tokens[:, 1:].contiguous(),
        )
        losses.float().mean().backward()
        results[name] = {
            "losses": losses.detach().float().cpu(),
            "gradients": {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None},
        }
        mpu.destroy_model_parallel()
    torch.save(results, arguments.work / f"{arguments.side}-{rank}.pt")
    dist.destroy_process_group()


def start_side(arguments: argparse.Namespace, side: str, work: Path) -> int:
    """Start all ranks of one side, with torchrun for more than one; returns the exit code."""
    command = [sys.executable]
    if arguments.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += [__file__, "model", "--device", arguments.device, "--ranks", str(arguments.ranks)]
    command += ["--work", str(work), "--side", side]
    environment = dict(os.environ)
    if side == "reference":
        environment["MEGASCEND_REFERENCE_TE"] = "1"
    else:
        environment.pop("MEGASCEND_REFERENCE_TE", None)
    return subprocess.run(command, env=environment, check=False).returncode


def as_one_vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Concatenate all tensors, flattened, in the order of their names."""
    import torch

    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])


def compare_model(table: Table, arguments: argparse.Namespace) -> None:
    """Run both sides after each other, then compare every rank's losses and gradients."""
    import torch

    from megascend.testing.tiny_models import write_tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="compare_te_") as folder:
        work = Path(folder)
        for arch in MODELS:
            write_tiny_checkpoint(work / arch, arch, **SHAPE)
        for side in ("real", "reference"):
            if code := start_side(arguments, side, work):
                table.failed(f"model, {side} side", f"exit code {code}")
                return
        for rank in range(arguments.ranks):
            real, reference = (torch.load(work / f"{side}-{rank}.pt") for side in ("real", "reference"))
            for name, arch, _, precision in model_cases(arguments.ranks):
                bound = BOUNDS["moe" if arch == "qwen3_moe" else "model", precision]
                label = f"{name} rank {rank}"
                losses = [{"losses": side[name]["losses"]} for side in (reference, real)]
                table.tensors(f"{label}: losses", bound, *losses)
                vectors = [{"all gradients": as_one_vector(side[name]["gradients"])} for side in (reference, real)]
                names = [sorted(side[name]["gradients"]) for side in (reference, real)]
                table.equal(f"{label}: parameters with a gradient", len(names[0]), len(names[1]))
                table.tensors(f"{label}: gradients as one vector", bound, *vectors)
                table.tensors(
                    f"{label}: worst gradient", 5 * bound, reference[name]["gradients"], real[name]["gradients"]
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("layers", "model"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=tuple(LAYOUTS), default=1, help="model: processes, one GPU each")
    parser.add_argument("--self", action="store_true", dest="with_itself", help="layers: compare with itself")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("real", "reference"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        model_rank(arguments)
        return 0
    table = Table()
    if arguments.part == "layers":
        if arguments.device == "cpu":
            import megascend

            megascend.bootstrap("cpu")
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        compare_layers(table, arguments.device, arguments.with_itself)
    else:
        compare_model(table, arguments)
    table.print()
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
