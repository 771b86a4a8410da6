"""Fast paths of engine fsdp on CUDA: one kernel for packed samples, compiled layers, one sync per step. Needs a CUDA GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megascend.testing.parity import case_checkpoint, hf_reference, token_lists

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

PROGRAM = Path(__file__).with_name("fsdp_program.py")
STEPS = 5


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["all heads", "shared keys"])
def test_one_kernel_is_as_accurate_as_a_call_per_sample(heads, window):
    """Compare both in bf16 with fp64."""
    from megascend.engines.fsdp import attention

    lengths, width, device = (1, 700, 63, 256, 4), 128, torch.device("cuda")
    generator = torch.Generator().manual_seed(3)
    exact = [
        torch.randn(1, count, sum(lengths), width, generator=generator).bfloat16()
        for count in (heads[0], heads[1], heads[1])
    ]
    upstream = torch.randn(1, sum(lengths), heads[0], width, generator=generator).bfloat16()
    many = attention.sample_lengths(lengths, None, device, torch.bfloat16)
    assert many.one_kernel
    assert many.starts is not None
    assert many.starts.tolist() == [0, 1, 701, 764, 1020, 1024]
    one_by_one = attention.SampleLengths(lengths, starts=many.starts, longest=many.longest)

    def run(tensors, lengths):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        query, key, value = inputs
        out, _ = attention.attention(
            torch.nn.Module(), query, key, value, None, sliding_window=window, sample_lengths=lengths
        )
        out.backward(upstream.to(out.device, out.dtype))
        return [out.detach(), *[tensor.grad for tensor in inputs]]

    expected = run([tensor.double() for tensor in exact], one_by_one)
    on_gpu = [tensor.cuda() for tensor in exact]
    for exact_value, kernel, calls in zip(expected, run(on_gpu, many), run(on_gpu, one_by_one), strict=True):
        errors = [
            float((result.cpu().double() - exact_value).norm() / exact_value.norm()) for result in (kernel, calls)
        ]
        print(f"relative errors: one kernel {errors[0]:.1e}, a call a sample {errors[1]:.1e}")
        assert errors[0] <= 2 * errors[1] + 1e-4


def reports_of(checkpoint, cases):
    """Return the report of a process without Megatron, for each case."""
    command = [sys.executable, str(PROGRAM), str(checkpoint), str(STEPS), *cases]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("arch", "cases", "loss", "norm"),
    [
        ("qwen3", ("none", "selective", "none+compile", "full+compile"), 2e-2, 0.1),
        ("qwen3_moe", ("none", "selective", "selective+compile"), 0.15, 0.6),
    ],
)
def test_steps_equal_hugging_face_and_synchronize_once(parity_folder, arch, cases, loss, norm):
    """Train in bf16, plain, recomputed and compiled; from the third step on nothing is compiled."""
    checkpoint = case_checkpoint(parity_folder, arch)
    hugging_face = hf_reference(parity_folder, checkpoint, token_lists())
    for case in reports_of(checkpoint, cases):
        deviations = [
            max(
                abs(value - expected_value) / (scale or abs(expected_value))
                for value, expected_value in zip(case[name], reference, strict=False)
            )
            for name, reference, scale in (("losses", hugging_face.losses, 1), ("norms", hugging_face.grad_norms, None))
        ]
        print(
            f"{arch}, {case['case']}: loss {deviations[0]:.1e}, norm {deviations[1]:.1e}, compiled {case['compiled']}"
        )
        assert len(case["losses"]) == STEPS
        assert deviations[0] <= loss, case
        assert deviations[1] <= norm, case
        assert len(case["waits"]) == 1, case
        assert case["compiled_late"] == 0, case
        assert (case["compiled"] > 0) == ("compile" in case["case"]), case
