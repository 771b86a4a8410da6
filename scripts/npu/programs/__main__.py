"""Run programs that nobody here wrote on the simulated Ascend device, and say in a table how each one went.

python scripts/npu/programs [--list] [PROGRAM...]        # default: every program

Fetches nothing: a program runs if its checkout is named, and is reported as missing if not. Small models and data are
made in MEGASCEND_RUN. Programs run unmodified but for the ids of model and data.

MEGASCEND_MINDSPEED      checkout of MindSpeed, branch core_r0.16.0, or core_r0.18.0 on stack 0.18 (twinkle, ms-swift, verl,
                         MindSpeed's own tests)
MEGASCEND_MEGATRON_LM    checkout of Megatron-LM, branch core_r0.16.0 (MindSpeed's own tests)
MEGASCEND_TWINKLE, MEGASCEND_SWIFT, MEGASCEND_VERL       checkouts of those
MEGASCEND_VERL_ADAPTOR   checkout of verl with the engine ``megatron_adaptor`` (verl#7142), for stack 0.18
MEGASCEND_PROGRAMS_DEADLINE                              a factor for every deadline (default: 1)
MEGASCEND_RUN                                            folder of models, data and logs (default: runs/npu_programs)

Each program runs with this interpreter, or with the one that PROGRAM_PYTHON names, in capitals (TWINKLE_PYTHON,
SWIFT_PYTHON, VERL_PYTHON, MINDSPEED_PYTHON, HUGGING_FACE_PYTHON): their requirements exclude each other's.

This interpreter's megatron-core decides the stack, which the others must have too. From 0.17 on, the stand-ins for
MegatronAdaptor and TransformerEngineNPU in tests/doubles are on the path of every program that has a checkout.

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
from importlib import metadata
from pathlib import Path

from packaging.version import Version

FOLDER = Path(__file__).resolve().parent
OUT_OF_TIME = 124  # exit code of timeout
RANKS = "8"
ADAPTOR_PACKAGES = FOLDER.parents[2] / "tests" / "doubles" / "adaptor_packages"
ON_ADAPTOR = Version(metadata.version("megatron-core")) >= Version("0.17")
"""Megatron-Core is patched by MegatronAdaptor, and MindSpeed imports it."""

words = str.split

VERL_MODULES = words("""verl.utils.device verl.plugin.platform.platform_npu verl.models.transformers.npu_patch
verl.utils.megatron_utils verl.utils.megatron.optimizer verl.utils.megatron.tensor_parallel
verl.utils.megatron.sequence_parallel verl.utils.megatron.pipeline_parallel verl.models.mcore
verl.models.mcore.model_forward verl.models.mcore.weight_converter verl.utils.profiler.mstx_profile
verl.utils.checkpoint.megatron_checkpoint_manager verl.workers.engine.mindspeed.transformer_impl
verl.workers.engine.megatron.transformer_impl verl.workers.engine.fsdp.transformer_impl verl.workers.engine_workers
""")

SWIFT_SETTINGS = words("""--model_type qwen3 --template qwen3 --tensor_model_parallel_size 2 --sequence_parallel true
--micro_batch_size 1 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --finetune true
--cross_entropy_loss_fusion true --lr_warmup_fraction 0.05 --train_iters 10 --max_length 256 --save_steps 100
--save_safetensors true --no_save_optim true --no_save_rng true --logging_steps 1 --dataloader_num_workers 0
--dataset_num_proc 1 --moe_grouped_gemm false
""")
"""MindSpeed core_r0.18.0 refuses ``moe_grouped_gemm``, which ms-swift sets for every model. Ours has no experts."""
SWIFT_METHODS = {
    "lora": words("""--tuner_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear --global_batch_size 2 --lr 1e-4
--min_lr 1e-5 --gradient_accumulation_fusion false --masked_softmax_fusion false
"""),
    "full": words("""--tuner_type full --pipeline_model_parallel_size 2 --packing true --global_batch_size 4 --lr 1e-5
--min_lr 1e-6 --cross_entropy_fusion_impl native --attention_backend flash
"""),
}
"""examples/ascend/train/qwen3/qwen3_lora_megatron.sh and megatron/train_sft_full.sh, but for ten steps and shorter samples."""

VERL_SETTINGS = words("""data.train_batch_size=8 data.pad_mode=no_padding data.truncation=error data.use_dynamic_bsz=True
data.max_token_len_per_gpu=2048 data.messages_key=messages data.num_workers=0 data.ignore_input_ids_mismatch=True
model=hf_model model.use_remove_padding=True optim=megatron optim.lr=1e-4 optim.lr_warmup_steps_ratio=0.2
optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 optim.lr_warmup_init=0 optim.lr_decay_style=cosine
optim.min_lr=1e-6 engine.tensor_model_parallel_size=2 engine.use_mbridge=True engine.vanilla_mbridge=True
trainer.save_freq=-1 trainer.test_freq=-1 trainer.logger=[console] trainer.total_epochs=2 trainer.total_training_steps=10
trainer.resume_mode=disable
""")
"""tests/special_e2e/sft/run_sft_engine.sh with backend megatron, but for ten steps of a smaller batch at a higher rate."""


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
        loss, norm = (f"{float(first[name]):.6g} -> {float(last[name]):.6g}" for name in ("loss", "norm"))
        figures = f"{steps} steps, loss {loss}, grad norm {norm}"
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


def swift(method: str, precision: str, ranks: str) -> Program:
    name = f"swift_{method}_{precision}"

    def command(python: str, run: Path) -> list[str]:
        start = [python, "-c", "from swift.cli._megatron.main import cli_main; cli_main()", "sft"]
        ids = ["--model", str(run / "models" / "qwen3"), "--dataset", str(run / "data" / "messages.jsonl")]
        kind = {"bf16": ["--bf16", "true", "--torch_dtype", "bfloat16"], "fp16": ["--fp16", "true"]}[precision]
        return [*start, *ids, *SWIFT_SETTINGS, *SWIFT_METHODS[method], *kind, "--output_dir", str(run / name)]

    return Program(
        name=name,
        family="SWIFT",
        command=command,
        judge=last_step(r"\{'loss': (?P<loss>[^,]+), 'grad_norm': (?P<norm>[^,]+)", 10),
        deadline=900,
        checkouts=("MEGASCEND_SWIFT", "MEGASCEND_MINDSPEED"),
        paths=("MEGASCEND_SWIFT", "MEGASCEND_MINDSPEED"),
        environment={"NPROC_PER_NODE": ranks},
    )


def verl_sft(engine: str, *checkouts: str) -> Program:
    """Build the program that trains with verl's engine, from the first of the checkouts."""
    name = f"verl_sft_{engine}"

    def command(python: str, run: Path) -> list[str]:
        ids = [f"model.path={run / 'models' / 'qwen3'}", f"data.train_files={run / 'data' / 'messages.parquet'}"]
        output = f"trainer.default_local_dir={run / name}"
        start = [*torchrun(python, "2"), "-m", "verl.trainer.sft_trainer", f"engine={engine}"]
        return [*start, *ids, *VERL_SETTINGS, output]

    return Program(
        name=name,
        family="VERL",
        command=command,
        judge=last_step(r"train/loss:(?P<loss>\S+) - train/grad_norm:(?P<norm>\S+)", 10),
        deadline=900,
        checkouts=checkouts,
        paths=checkouts,
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
    swift("lora", "bf16", "2"),
    swift("lora", "fp16", "2"),
    swift("full", "bf16", "4"),
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
    verl_sft("megatron", "MEGASCEND_VERL", "MEGASCEND_MINDSPEED"),
    *([verl_sft("megatron_adaptor", "MEGASCEND_VERL_ADAPTOR")] if ON_ADAPTOR else []),
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
    """Make two small models, small data files, and the metadata that MindSpeed would have if pip had installed it."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    for arch in ("qwen3", "qwen3_moe"):
        if not (out := run / "models" / arch).exists():
            shape = ["--arch", arch, "--hidden", "64", "--layers", "2", "--ffn", "64"]
            subprocess.run([sys.executable, "-m", "megascend.apps.cli.main", "new-model", str(out), *shape], check=True)
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
    write_table(Table.from_pylist(talks), data / "messages.parquet")
    if checkout := os.environ.get("MEGASCEND_MINDSPEED"):
        # Without its version in the name, so that another branch in the same run folder replaces it.
        info = run / "metadata" / "mindspeed.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (version,) = re.findall(r"^__version__ = '(.+)'", Path(checkout, "setup.py").read_text(), re.MULTILINE)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mindspeed\nVersion: {version}\n")


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
    text = log.read_text(errors="replace")
    if completed.returncode:
        return Result(f"FAILED (exit code {completed.returncode})", first_error(text)), seconds
    return program.judge(text), seconds


def first_error(log: str) -> str:
    """Return the first line that ends a traceback; later ones are of ranks that lost a failed one."""
    match = re.search(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): .*)$", log, re.MULTILINE)
    return match[1][:200] if match else ""


def environment(program: Program, run: Path) -> dict[str, str]:
    paths = [str(FOLDER), str(FOLDER.parent.parent / "src")]
    if "MEGASCEND_MINDSPEED" in program.paths:
        paths.append(str(run / "metadata"))
    if ON_ADAPTOR and program.paths:
        paths.append(str(ADAPTOR_PACKAGES))
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
    print(f"{'program':<26}  {'seconds':>7}  {'verdict':<36}  figures")
    failed = False
    for program in PROGRAMS:
        if names and program.name not in names:
            continue
        result, seconds = run_one(program, run)
        failed = failed or result.verdict != "OK"
        print(f"{program.name:<26}  {seconds:>7.0f}  {result.verdict:<36}  {result.figures}", flush=True)
    print(f"logs: {run / 'logs'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
