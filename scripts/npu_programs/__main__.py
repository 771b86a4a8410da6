"""Run programs that nobody here wrote on the simulated Ascend device, and say in a table how each one went.

python scripts/npu_programs [--list] [PROGRAM...]        # default: every program

Fetches nothing: a program runs if its checkout is named, and is reported as missing if not. Small models and data are
made in MEGASCEND_RUN. Programs run unmodified but for the ids of model and data.

MEGASCEND_MINDSPEED      checkout of MindSpeed, branch core_r0.16.0 (twinkle, ms-swift, verl, MindSpeed's own tests)
MEGASCEND_MEGATRON_LM    checkout of Megatron-LM, branch core_r0.16.0 (MindSpeed's own tests)
MEGASCEND_TWINKLE, MEGASCEND_SWIFT, MEGASCEND_VERL       checkouts of those
MEGASCEND_PROGRAMS_DEADLINE                              a factor for every deadline (default: 1)
MEGASCEND_RUN                                            folder of models, data and logs (default: runs/npu_programs)

Each program runs with this interpreter, or with the one that PROGRAM_PYTHON names, in capitals (TWINKLE_PYTHON,
SWIFT_PYTHON, VERL_PYTHON, MINDSPEED_PYTHON, HUGGING_FACE_PYTHON): their requirements exclude each other's.

Ends with 1 if a program failed or is missing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OUT_OF_TIME = 124  # exit code of timeout
RANKS = "8"

words = str.split

VERL_MODULES = words("""verl.utils.device verl.plugin.platform.platform_npu verl.models.transformers.npu_patch
verl.utils.megatron_utils verl.utils.megatron.optimizer verl.utils.megatron.tensor_parallel
verl.utils.megatron.sequence_parallel verl.utils.megatron.pipeline_parallel verl.models.mcore
verl.models.mcore.model_forward verl.models.mcore.weight_converter verl.utils.profiler.mstx_profile
verl.utils.checkpoint.megatron_checkpoint_manager verl.workers.engine.mindspeed.transformer_impl
verl.workers.engine.megatron.transformer_impl verl.workers.engine.fsdp.transformer_impl verl.workers.engine_workers
""")

SWIFT_SETTINGS = words("""--model_type qwen3 --template qwen3 --tuner_type lora --lora_rank 8 --lora_alpha 32
--target_modules all-linear --tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 1
--global_batch_size 2 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --finetune true
--cross_entropy_loss_fusion true --lr 1e-4 --lr_warmup_fraction 0.05 --min_lr 1e-5 --train_iters 10 --max_length 256
--save_steps 100 --save_safetensors true --no_save_optim true --no_save_rng true --logging_steps 1
--dataloader_num_workers 0 --dataset_num_proc 1 --gradient_accumulation_fusion false --masked_softmax_fusion false
""")
"""examples/ascend/train/qwen3/qwen3_lora_megatron.sh, but for ten steps and shorter samples."""


@dataclass(frozen=True)
class Result:
    verdict: str  # OK, or what is wrong
    figures: str = ""


@dataclass(frozen=True)
class Program:
    """One row of the table."""

    name: str
    family: str  # whose interpreter: FAMILY_PYTHON
    command: Callable[[str, Path], list[str]]  # interpreter, run folder -> what to run on the simulated device
    judge: Callable[[str], Result]  # by its log, if it ended with 0
    deadline: int  # seconds, on two cores
    checkouts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()  # what goes on PYTHONPATH: a variable's name, and a folder below it
    environment: Mapping[str, str] = field(default_factory=dict)


def result_line(log: str) -> Result:
    """Parse the line "RESULT ok FIGURES", which our launch files print."""
    results = re.findall(r"^RESULT (ok|.*?:|not all) (.*)$", log, re.MULTILINE)
    if not results:
        return Result("FAILED (no result)")
    verdict, figures = results[-1]
    return Result("OK" if verdict == "ok" else f"FAILED ({verdict})", figures)


def last_step(pattern: str, steps: int) -> Callable[[str], Result]:
    """Build a judge: OK if a line matches for every step; figures from the groups ``loss`` and ``norm`` of first and last."""

    def judge(log: str) -> Result:
        matches = list(re.finditer(pattern, log))
        if len(matches) < steps:
            return Result(f"FAILED ({len(matches)} of {steps} steps)")
        first, last = matches[0], matches[-1]
        figures = f"{steps} steps, loss {first['loss']} -> {last['loss']}, grad norm {first['norm']} -> {last['norm']}"
        return Result("OK" if "nan" not in figures.lower() else "FAILED (NaN)", figures)

    return judge


def twinkle(recipe: str, model: str) -> Program:
    def command(python: str, run: Path) -> list[str]:
        path = Path(os.environ["MEGASCEND_TWINKLE"], "cookbook", "megatron", "ascend", f"{recipe}.py")
        ids = [f"MODEL_ID={run / 'models' / model}", f"DATASET_ID={run / 'data' / 'self_cognition.jsonl'}"]
        return [*torchrun(python, RANKS), str(FOLDER / "run_with_ids.py"), str(path), *ids]

    pattern = r"metric: \{'loss': '(?P<loss>[^']+)', 'grad_norm': '(?P<norm>[^']+)'"
    return Program(
        name=f"twinkle_{recipe}",
        family="TWINKLE",
        command=command,
        judge=last_step(pattern, 10),
        deadline=900,
        checkouts=("MEGASCEND_TWINKLE", "MEGASCEND_MINDSPEED"),
        paths=("MEGASCEND_TWINKLE/src", "MEGASCEND_MINDSPEED"),
    )


def swift(precision: str) -> Program:
    def command(python: str, run: Path) -> list[str]:
        start = "from swift.cli._megatron.main import cli_main; cli_main()"
        ids = ["--model", str(run / "models" / "qwen3"), "--dataset", str(run / "data" / "messages.jsonl")]
        kind = {"bf16": ["--bf16", "true", "--torch_dtype", "bfloat16"], "fp16": ["--fp16", "true"]}[precision]
        return [
            python,
            "-c",
            start,
            "sft",
            *ids,
            *SWIFT_SETTINGS,
            *kind,
            "--output_dir",
            str(run / f"swift_{precision}"),
        ]

    return Program(
        name=f"swift_lora_{precision}",
        family="SWIFT",
        command=command,
        judge=last_step(r"\{'loss': (?P<loss>[^,]+), 'grad_norm': (?P<norm>[^,]+)", 10),
        deadline=900,
        checkouts=("MEGASCEND_SWIFT", "MEGASCEND_MINDSPEED"),
        paths=("MEGASCEND_SWIFT", "MEGASCEND_MINDSPEED"),
        environment={"NPROC_PER_NODE": "2"},
    )


def hugging_face(method: str, model: str = "qwen3") -> Program:
    def command(python: str, run: Path) -> list[str]:
        return [*torchrun(python, "2"), str(FOLDER / "train_hugging_face.py"), method, str(run / "models" / model)]

    name = method if model == "qwen3" else f"{method}_{model}"
    return Program(name, "HUGGING_FACE", command, result_line, 300)


def torchrun(python: str, ranks: str) -> list[str]:
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]


PROGRAMS = [
    twinkle("tp_npu", "qwen3"),
    twinkle("tp_moe_npu", "qwen3_moe"),
    twinkle("tp_moe_cp_npu", "qwen3_moe"),
    swift("bf16"),
    swift("fp16"),
    *map(hugging_face, ("ddp", "fsdp1", "fsdp2", "accelerate_fp32", "accelerate_bf16", "accelerate_fp16")),
    *map(hugging_face, ("trainer", "trainer_npu_fused")),
    hugging_face("fsdp2", "qwen3_moe"),
    Program(
        name="verl_imports",
        family="VERL",
        command=lambda python, run: [python, str(FOLDER / "import_modules.py"), *VERL_MODULES],
        judge=result_line,
        deadline=300,
        checkouts=("MEGASCEND_VERL", "MEGASCEND_MINDSPEED"),
        paths=("MEGASCEND_VERL", "MEGASCEND_MINDSPEED"),
    ),
    Program(
        name="mindspeed_tests",
        family="MINDSPEED",
        command=lambda python, run: [
            *[python, str(FOLDER / "mindspeed_tests.py")],
            *[os.environ["MEGASCEND_MINDSPEED"], str(run / "mindspeed_tests")],
        ],
        judge=result_line,
        deadline=7200,
        checkouts=("MEGASCEND_MINDSPEED", "MEGASCEND_MEGATRON_LM"),
        paths=("MEGASCEND_MEGATRON_LM", "MEGASCEND_MINDSPEED"),
        environment={"SIMNPU_DEVICE_NAME": "Ascend910B3", "PYTHONDONTWRITEBYTECODE": "1"},
    ),
]


def prepare(run: Path) -> None:
    """Make two small models, two small data files, and the metadata that MindSpeed would have if pip had installed it."""
    for arch in ("qwen3", "qwen3_moe"):
        if not (out := run / "models" / arch).exists():
            shape = ["--arch", arch, "--hidden", "64", "--layers", "2", "--ffn", "64"]
            subprocess.run([sys.executable, "-m", "megascend.cli.main", "new-model", str(out), *shape], check=True)
    data = run / "data"
    data.mkdir(parents=True, exist_ok=True)
    questions = [
        (f"Who are you, number {i}?", f"I am {{{{NAME}}}}, made by {{{{AUTHOR}}}}. {'Yes. ' * (i % 5)}")
        for i in range(256)
    ]
    rows = [{"query": question, "response": answer, "tag": "en"} for question, answer in questions]
    write_lines(data / "self_cognition.jsonl", rows)
    roles = ("user", "assistant")
    talks = [
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)]} for pair in questions[:64]
    ]
    write_lines(data / "messages.jsonl", talks)
    info = run / "metadata" / "mindspeed-0.16.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_one(program: Program, run: Path) -> tuple[Result, float]:
    if absent := [name for name in program.checkouts if not Path(os.environ.get(name, "/nowhere")).is_dir()]:
        return Result(f"MISSING (set {', '.join(absent)})"), 0.0
    prepare(run)
    python = os.environ.get(f"{program.family}_PYTHON", sys.executable)
    deadline = round(program.deadline * float(os.environ.get("MEGASCEND_PROGRAMS_DEADLINE", "1")))
    start = ["timeout", "--kill-after=60", str(deadline), python, "-m", "simnpu", "--"]
    log, started = run / "logs" / f"{program.name}.log", time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        completed = subprocess.run(
            [*start, *program.command(python, run)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=run,
            env=environment(program, run),
            check=False,
        )
    seconds = time.monotonic() - started
    if completed.returncode == OUT_OF_TIME:
        return Result(f"FAILED (not done after {deadline} s)"), seconds
    if completed.returncode:
        return Result(f"FAILED (exit code {completed.returncode})"), seconds
    return program.judge(log.read_text(errors="replace")), seconds


def environment(program: Program, run: Path) -> dict[str, str]:
    paths = [str(FOLDER), str(FOLDER.parent.parent / "src"), str(run / "metadata")]
    for path in program.paths:
        variable, _, below = path.partition("/")
        paths.append(str(Path(os.environ[variable], below)))
    cards = ",".join(map(str, range(8)))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ASCEND_RT_VISIBLE_DEVICES": cards,
        "PROGRAM_FOLDER": str(run / program.name),
        **program.environment,
    }


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    if "-h" in sys.argv or "--help" in sys.argv:
        sys.exit(print(__doc__))
    if "--list" in sys.argv:
        sys.exit(print(*(program.name for program in PROGRAMS), sep="\n"))
    if unknown := set(names) - {program.name for program in PROGRAMS}:
        sys.exit(f"no program {', '.join(sorted(unknown))}; --list shows them")
    run = Path(os.environ.get("MEGASCEND_RUN", "runs/npu_programs")).resolve()
    print(f"{'program':<22}  {'seconds':>7}  {'verdict':<36}  figures")
    failed = False
    for program in PROGRAMS:
        if names and program.name not in names:
            continue
        result, seconds = run_one(program, run)
        failed = failed or result.verdict != "OK"
        print(f"{program.name:<22}  {seconds:>7.0f}  {result.verdict:<36}  {result.figures}", flush=True)
    print(f"logs: {run / 'logs'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
