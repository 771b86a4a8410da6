"""Every cookbook script, started by its shell script through torchrun: it runs, and what it trains learns."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.forked_programs import run_command, run_forked

ROOT = Path(__file__).parent.parent
DEADLINE_S = 150
STEP = re.compile(r"^step (\d+)/(\d+)  loss ([\d.]+)  grad norm ([\d.]+)  ([\d,]+) tokens/s", re.MULTILINE)

STEP_OF_TENANTS = re.compile(r"^step (\d+)/\d+((?:  [a-z]+ [\d.]+){4})  [\d,]+ tokens/s", re.MULTILINE)
ROW = re.compile(r"^(copy|shift|count|phrase|\(base model\)) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", re.MULTILINE)

TENANTS = ("copy", "shift", "count", "phrase")

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def run(
    script: str,
    folder: Path,
    *arguments: str,
    deadline_s: float = DEADLINE_S,
    fails: bool = False,
    kill_after: str = "",
    **environment: str,
) -> str:
    """Run a shell script of the cookbook with a deadline for all its processes; return its output. It succeeds, or ``fails``.

    Args:
        kill_after: kill all its processes at an output line with this prefix.
    """
    path = os.pathsep.join([str(ROOT / "src"), *(entry for entry in sys.path if entry)])
    variables = {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEGASCEND_RUN": str(folder)}
    process = subprocess.Popen(
        ["bash", str(ROOT / "cookbook" / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | variables | environment,
        start_new_session=True,
    )
    output = ""
    try:
        if kill_after:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                if line.startswith(kill_after):
                    for child in [process, *psutil.Process(process.pid).children(recursive=True)]:
                        child.kill()  # torchrun's ranks run in separate sessions
                    break
            else:
                raise AssertionError(f"no line begins with {kill_after!r}: {output[-6000:]}")
        output += process.communicate(timeout=deadline_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode != 0) == fails, output[-6000:]
    return output


def assert_learned(output: str, steps: int) -> None:
    """Check that every step is logged and finite, the loss has fallen, and the last line reports it."""
    steps_logged = [(int(number), float(loss), float(norm)) for number, _, loss, norm, _ in STEP.findall(output)]
    assert [number for number, *_ in steps_logged] == list(range(1, steps + 1)), output[-6000:]
    assert all(math.isfinite(loss) and norm > 0 for _, loss, norm in steps_logged)
    losses = [loss for _, loss, _ in steps_logged]
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0], losses
    assert output.strip().splitlines()[-1].startswith("learned: loss ")


@pytest.mark.nightly  # two ranks: test_scripts_train_on_own_data_and_resume_after_kill
@pytest.mark.parametrize(
    ("script", "layout"),
    [
        ("dense_tp_pp_dp.sh", "4 ranks = tensor 2 x context 1 x data 1 x pipeline 2"),
        ("moe_ep.sh", "experts: expert tensor 1 x expert 2 x data 2 x pipeline 1"),
    ],
)
def test_cookbook_script_learns_on_four_ranks(script: str, layout: str, tmp_path: Path) -> None:
    output = run(script, tmp_path, "--steps", "10", NPROC="4")
    assert layout in output
    assert_learned(output, 10)


FORKED = """
import contextlib, io, runpy, sys
import megascend
from megascend.testing import run_distributed

megascend.bootstrap("cpu").load_megatron()
import megascend.engines.megatron.engine
import megascend.engines.step.step

def on_rank(*more):
    sys.argv, output = [*sys.argv[1:], *more], io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return output.getvalue()

if __name__ == "__main__":
    print(run_distributed(on_rank, 2, init=False, timeout_s=120)[0], "RESUMED")
    print(run_distributed(on_rank, 2, "--resume", init=False, timeout_s=120)[0])
"""


def test_moe_script_learns_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    """Run the script of moe_ep.sh on forked ranks; nightly tests run the shell scripts."""
    model, output = tmp_path / "model", tmp_path / "output"
    created = run_command("new-model", model, "--arch", "qwen3_moe", "--experts", "8", "--layers", "2")
    assert created.returncode == 0, created.stderr
    files = ("--model", model, "--output", output)
    script = ("cookbook/moe_ep.py", "--tensor", "1", *files, "--steps", "10", "--save-every", "6")
    completed = run_forked(FORKED, *script, directory=ROOT)
    assert completed.returncode == 0, completed.stderr[-6000:]
    complete, resumed = completed.stdout.split("RESUMED")
    assert "experts: expert tensor 1 x expert 2 x data 1 x pipeline 1" in complete
    assert_learned(complete, 10)
    steps = [[step_match[:4] for step_match in STEP.findall(part)] for part in (complete, resumed)]
    assert steps[1] == steps[0][6:]
    assert (output / "hf" / "model.safetensors").is_file()


CONVERSATIONS = [
    [
        ("system", "Answer in one word."),
        ("user", f"{word}?"),
        ("assistant", word.upper()),
        ("user", "ok"),
        ("assistant", "good"),
    ]
    for word in ("one", "two", "red", "blue", "up", "down", "left", "right")
]


def own_data(path: Path) -> Path:
    """Write conversations with a system message, two turns each, as JSON."""
    turns = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in CONVERSATIONS]
    path.write_text(json.dumps(turns))
    return path


SHORT = ("--max-length", "128", "--micro-batch-tokens", "256")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("dense_tp_pp_dp.sh", ("--tensor", "1", *SHORT)),
        ("moe_ep.sh", ("--tensor", "1", *SHORT)),
        ("fsdp_moe.sh", ("--recompute", *SHORT)),
        ("long_context_cp.sh", ("--length", "128")),
    ],
)
def test_scripts_train_on_own_data_and_resume_after_kill(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    data = own_data(tmp_path / "own.json").name  # relative to the working directory of the script
    arguments = (*arguments, "--batch", "4", "--steps", "12", "--data", data, "--save-every", "2")
    complete = run(script, tmp_path, *arguments, "--output", "whole", NPROC="2")
    assert_learned(complete, 12)
    killed = ("--output", "killed")
    run(script, tmp_path, *arguments, *killed, NPROC="2", kill_after="step 7/12", fails=True)
    output = run(script, tmp_path, *arguments, *killed, "--resume", NPROC="2")
    losses = {number: (loss, norm) for number, _, loss, norm, _ in STEP.findall(complete)}
    resumed = {number: (loss, norm) for number, _, loss, norm, _ in STEP.findall(output)}
    assert {"9", "10", "11", "12"} <= resumed.keys()
    assert "1" not in resumed
    assert resumed == {number: losses[number] for number in resumed}
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0].keys() | weights[1].keys())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "hf").num_parameters() > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("tinker_rl.sh", "reward of the first three steps"),
        ("tinker_supervised.sh", "learned: loss"),
        ("tinker_preference.sh", "learned: loss"),
        ("tinker_two_tenants.sh", "learned: each tenant its own answer"),
    ],
)
def test_tinker_scripts_learn_and_stop_their_server(script: str, says: str, tmp_path: Path) -> None:
    """Check that scripts named ``tinker_*`` start a server with a small model, and stop it."""
    output = run(script, tmp_path, deadline_s=240)
    assert re.search(f"^{says}", output, re.MULTILINE), output
    address = re.search(r"http://[\d.]+:(\d+)", (tmp_path / "tinker-server.log").read_text())
    assert address is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address[1])), timeout=5)
    for script in (ROOT / "cookbook").rglob("*.py"):
        assert not re.search(r'default=Path\("(?!runs/)', script.read_text()), f"{script}: a path in the repository"


@pytest.mark.nightly
def test_tenants_train_on_separate_data_and_resume(tmp_path: Path) -> None:
    data = own_data(tmp_path / "own.json")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"abc {n}"}) + "\n" for n in range(9)))
    sources = ("--data", f"ada={data}", "--data", f"bob={tmp_path / 'texts.jsonl'}")
    options = (*sources, "--steps", "8", "--save-every", "2")
    output = run("multi_lora.sh", tmp_path, *options)
    table = {
        name: float(loss) for name, loss in re.findall(r"^(ada|bob|\(base model\)) +([\d.]+) ", output, re.MULTILINE)
    }
    assert table["ada"] < table["(base model)"], output[-2000:]
    assert f"adapters in {tmp_path / 'adapters'}" in output.strip().splitlines()[-1]
    killed = ("--output", str(tmp_path / "killed"))
    run("multi_lora.sh", tmp_path, *options, *killed, kill_after="step 5/8", fails=True)
    resumed = run("multi_lora.sh", tmp_path, *options, *killed, "--resume")
    losses = [
        dict(re.findall(r"^step (\d)/8  (ada [\d.]+  bob [\d.]+)", text, re.MULTILINE)) for text in (output, resumed)
    ]
    assert {"7", "8"} <= losses[1].keys() < losses[0].keys()
    assert losses[1].items() <= losses[0].items()
    for name in ("ada", "bob"):
        files = [tmp_path / folder / name / "adapter_model.safetensors" for folder in ("adapters", "killed")]
        reference, resumed_weights = map(load_file, files)
        assert all(
            torch.equal(reference[key], resumed_weights[key]) for key in reference.keys() | resumed_weights.keys()
        )


def tenants_and_losses(output: str) -> dict[str, list[float]]:
    """Parse the final table: losses of each task by adapter."""
    table = {name: [float(loss) for loss in losses] for name, *losses in ROW.findall(output)}
    assert list(table) == [*TENANTS, "(base model)"], output[-6000:]
    return table


@pytest.mark.nightly
def test_every_tenant_learns_only_its_task(tmp_path: Path) -> None:
    steps = 45
    output = run("multi_lora.sh", tmp_path, "--steps", str(steps))
    assert "tensor 2" in output
    assert [int(number) for number, _ in STEP_OF_TENANTS.findall(output)] == list(range(1, steps + 1)), output[-6000:]
    table = tenants_and_losses(output)
    for task, name in enumerate(TENANTS):
        other_losses = [row[task] for other, row in table.items() if other != name]
        assert table[name][task] < 0.5 * min(other_losses), output[-2000:]
    assert output.strip().splitlines()[-1].startswith("each adapter has learned its own task")
    for name in TENANTS:
        assert (tmp_path / "adapters" / name / "adapter_model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_async_grpo_raises_the_reward(engine: str, tmp_path: Path) -> None:
    """Check that the reward rises; the script itself fails otherwise."""
    python = Path(os.environ.get("MEGASCEND_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if engine == "vllm" and not os.access(python, os.X_OK):
        pytest.skip(f"no vLLM: {python} is missing (bash scripts/vllm_env.sh; MEGASCEND_VLLM_PYTHON names another one)")
    chosen = ("--engine", engine, "--vllm-python", str(python), "--steps", "45", "--output", str(tmp_path / "out"))
    output = run("async_grpo.sh", tmp_path, *chosen, "--tensor", "2", deadline_s=900, NPROC="2")
    before, after = map(float, re.findall(r"reward on new prompts: ([\d.]+) before, ([\d.]+) after", output)[0])
    assert after > before + 0.05
    assert re.search(r"^step 1/45  reward [\d.]+  lag 0.0  mismatch \d.\de-0[6-9]", output, re.MULTILINE), output
    assert (tmp_path / "out" / "async_grpo.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf").num_parameters() > 0
