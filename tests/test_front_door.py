"""The first minutes with megascend: what users type first works, says what it does, and is refused by name where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.forked_programs import run_command, run_forked

SCRIPT = Path(sys.executable).with_name("megascend")
"""The console script: unlike ``python -m``, it does not put the working directory on ``sys.path``."""


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 0, "Usage: megascend"),
        (["-h"], 0, "Usage: megascend"),
        (["help"], 0, "Usage: megascend"),
        (["help", "train"], 0, "Usage: megascend train"),
        (["train", "-h"], 0, "Usage: megascend train"),
        (["train", "x.yaml", "steps=3", "a.b=1"], 2, "with --set steps=3 --set a.b=1"),
        (["rl", "x.yaml", "--steps", "3"], 2, "with --set steps=VALUE"),
        (["train", "optimizer.lr=3"], 2, "with --set optimizer.lr=3"),
        (["serve", "port=3"], 2, "with --set port=3"),
        (["show-config", "steps=3"], 2, "with --set steps=3"),
        (["job", "slurm", "x.yaml", "steps=3"], 2, "with --set steps=3"),
        (["init", "sft", "m", "steps=3"], 2, "with --set steps=3"),
        (["export", "a", "b", "--dtype", "fp8"], 2, "not one of fp32, fp16, bf16"),
    ],
)
def test_command_line_answers_what_users_type_first(
    arguments: list[str], code: int, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from megascend.apps.cli.main import app

    with pytest.raises(SystemExit) as end:
        app(arguments, prog_name="megascend")
    output, errors = capfd.readouterr()
    assert (end.value.code or 0) == code
    assert expected in (errors if code else output)
    assert "Traceback" not in errors


def test_shell_completes_commands() -> None:
    variables = {"_MEGASCEND_COMPLETE": "complete_bash", "COMP_WORDS": "megascend tr", "COMP_CWORD": "1"}
    assert run(sys.executable, "-m", "megascend", **variables).stdout.split() == ["train"]


PLUGIN = """
import megascend
print("plug-in", __name__, flush=True)
megascend.register_loss(megascend.Loss("half", lambda logprobs, inputs: -0.5 * logprobs))
"""


@pytest.mark.skipif(not SCRIPT.is_file(), reason=f"no console script at {SCRIPT}: pip install -e .")
@pytest.mark.parametrize("plugin", ["./plug.py", "plug"])
def test_console_script_imports_plugins_beside_the_run_file(plugin: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "plug.py").write_text(PLUGIN)
    (folder / "data.jsonl").write_text('{"text": "hello"}\n')
    values = {
        "model": "model", "output": "out", "steps": 1, "loss": "half", "plugins": [plugin], "data": {"path": "runs/data.jsonl"},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    # Stops at the missing model, after the plug-ins of a file were found; the loss is known once they are imported.
    completed = run(SCRIPT, "train", "runs/run.yaml", cwd=tmp_path)
    assert completed.returncode == 2
    assert "model" in completed.stderr
    assert "plugins" not in completed.stderr
    program = "import sys; sys.path.remove('');\nfrom megascend.config import load_config\n"
    program += (
        "from megascend.config.plugins import import_plugins\nfrom megascend.training.batch.losses import resolve\n"
    )
    program += "names = load_config('runs/run.yaml').plugins\nfor _ in range(2): import_plugins(names)\n"
    completed = run(sys.executable, "-c", program + "print(resolve('half').name)", cwd=tmp_path)
    assert completed.stdout.count("plug-in") == 1, completed.stdout + completed.stderr
    assert completed.stdout.endswith("half\n")


PROGRAM = """
import json, sys
import torch, megascend

megascend.bootstrap()
assert "torch.cuda" not in str(megascend.bootstrap().changes)  # nothing is patched for an engine that is not used
backend = megascend.SingleBackend(
    model=sys.argv[1], parallel=megascend.Parallel(tensor=1), precision=torch.float32, self_check=False
)
sample = megascend.Sample([1, 2, 3], [-100, 3, 4], [0, 1, 1])
result = backend.forward_backward([sample])
shown, loss = repr(result), result.loss
backend.discard_gradients()
logprobs = backend.forward([sample]).logprobs[0].tolist()
response = megascend.Sample.response([1, 2], [3, 4], [logprobs[1] - 0.3, logprobs[2] + 0.3], [1.0, -2.0])
policy = backend.forward_backward([response], loss="ppo", loss_settings={"clip_low": 0.1, "clip_high": 0.1})
params = megascend.SamplingParams(2, temperature=0.0)
requests = [
    megascend.SampleRequest("text", params),
    megascend.SampleRequest([1, 2], params),
    megascend.SampleRequest([1.5], params),
    megascend.SampleRequest([1], None),
    megascend.SampleRequest([1], megascend.SamplingParams(2, temperature="hot")),
    "text",
]
answers = [(answer.error, len(answer.samples)) for answer in megascend.Sampler(backend).generate(requests)]
try:
    backend.forward_backward([response], loss="ppo", loss_settings={"clip": 0.1})
except megascend.ConfigError as error:
    refused = str(error)
print(json.dumps([loss, shown, policy.loss, policy.metrics, answers, refused]))
"""


def test_readme_program_runs_on_engine_single_by_changing_one_line(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from megascend.testing import write_tiny_checkpoint

    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    completed = run_forked(PROGRAM, checkpoint)
    assert completed.returncode == 0, completed.stderr[-3000:]
    loss, shown, policy_loss, metrics, answers, refused = json.loads(completed.stdout.splitlines()[-1])
    # transformers' loss of the same labels, which ignores -100
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0]
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, torch.tensor([-100, 3, 4]))), rel=1e-5)
    assert f"loss={loss!r}" in shown
    # ratio exp(0.3) is clipped at 1.1 of an advantage of 1; exp(-0.3) at 0.9 of an advantage of -2, whose loss is larger
    assert policy_loss == pytest.approx((-1.1 + 2 * 0.9) / 2, rel=1e-4)
    assert metrics["clip_fraction"] == 1.0
    assert [count for _, count in answers] == [0, 1, 0, 0, 0, 0]
    assert [error is None for error, _ in answers] == [False, True, False, False, False, False]
    assert "'clip'" in refused
    # One line when each phase begins, in order, in a plain program.
    phases = [line for line in completed.stderr.splitlines() if line.startswith("megascend: ")]
    assert [line.split()[1] for line in phases] == ["building"]


def test_phases_of_a_run_are_announced_in_order(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    assert run_command("new-model", checkpoint, "--hidden", "32", "--layers", "1", "--context", "64").returncode == 0
    (tmp_path / "data.jsonl").write_text('{"token_ids": [1, 2, 3, 4]}\n' * 4)
    values = {
        "model": str(checkpoint), "output": "out", "steps": 1, "engine": "megatron", "precision": "float32", "export": False,
        "data": {"path": "data.jsonl", "global_batch_size": 2}, "batching": {"micro_batch_tokens": 64}, "platform": "cpu",
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "megascend", "train", "run.yaml"]
    completed = run(
        *command, cwd=tmp_path, MEGASCEND_CACHE=str(tmp_path / "cache"), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    phases = [
        line.removeprefix("megascend: ") for line in completed.stderr.splitlines() if line.startswith("megascend: ")
    ]
    order = [
        "importing torch",
        "importing transformers",
        "reading",
        "importing Megatron-Core",
        "building",
        "self-check",
    ]
    assert [phase for phase in phases if not phase.startswith(tuple(order))] == []
    places = [next(i for i, start in enumerate(order) if phase.startswith(start)) for phase in phases]
    assert sorted(places) == list(range(len(order)))
    assert places[:3] == [0, 1, 2]  # the self-check runs beside the import of Megatron, and begins whenever it can


@pytest.mark.parametrize("spelling", ["fp16", "float16", "torch.float16"])
def test_run_file_and_api_take_every_spelling_of_a_precision(spelling: str) -> None:
    import torch

    import megascend

    config = megascend.RunConfig(model="m", output="o", data={"path": "d"}, precision=spelling)  # type: ignore[arg-type]
    assert config.precision == "fp16"
    for value in (spelling, torch.float16):
        assert megascend.EngineSpec.of("m", {"precision": value}).precision == "fp16"
    with pytest.raises(megascend.ConfigError, match="precision: Input should be"):
        megascend.EngineSpec.of("m", {"precision": torch.int8})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [3], [-1.0], 1.0), "needs a prompt and tokens"),
        (([1], [], [], 1.0), "needs a prompt and tokens"),
        (([1], [3, 4], [-1.0], 1.0), r"logprobs must have one entry per token of the response \(2\), got 1"),
        (([1], [3, 4], [-1.0, -1.0], [1.0]), "advantage must have one entry"),
        (([1], [3], [float("nan")], 1.0), r"logprobs\[0\] is nan"),
        (([1], [3], [-1.0], float("inf")), r"advantage\[0\] is inf"),
    ],
)
def test_response_that_is_no_sample_is_refused(arguments: tuple, message: str) -> None:
    import megascend

    with pytest.raises(megascend.DataError, match=message):
        megascend.Sample.response(*arguments)
