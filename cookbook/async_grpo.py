"""Asynchronous GRPO as one flat script: a real vLLM samples while Megatron-Core learns, until a tiny model sorts digits.

    bash cookbook/async_grpo.sh                                  # one trainer process and a vLLM, on GPUs or on the CPU
    NPROC=2 bash cookbook/async_grpo.sh --tensor 2               # two of them, tensor parallel
    bash cookbook/async_grpo.sh --engine local                   # transformers in a process of its own instead of vLLM

The task is "s314=" -> "134.". Some supervised steps on answers warm the model up, enough for some responses to be right. Then
rewards alone teach it: eight responses to each of sixteen prompts, the share of right characters as the reward, advantages within
each group (GRPO). The engine is never more than one step behind; it gets new weights after every step, while it samples.

A vLLM that is started here samples on a GPU that no trainer process uses, in bf16 and with CUDA graphs; with one GPU it shares
that of the trainer. --trainer-gpus and --engine-gpus say it otherwise: positions among the visible GPUs. A vLLM for the CPU
samples in fp32, in one thread.

The script prints the reward before and after and ends with 1 unless it has risen. In the end OUTPUT/hf holds a model that
transformers loads; with --save-every, a run that was killed continues with --resume.

    bash cookbook/async_grpo.sh --engine local --model MODEL --data PROMPTS.jsonl --reward REWARDS.py:FUNCTION --lr 1e-6

learns from prompts and a reward of your own (docs/rl.md) instead, without a warm-up; an eighth of the prompts is held out.
Whether the reward has risen enough is then for you to judge.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import megascend
from megascend.apps.rl.rollout.engines.placement import device_options, place_engines, trainer_environment, visible_gpus
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess, vllm_device
from weightwire.keys import read_key, write_key

ROOT = Path(__file__).resolve().parents[1]

STOP = "."
KEY = "key"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with rollouts by vLLM beside the trainer.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/cookbook/async_grpo"), help="model, figure, vLLM's log and key"
    )
    parser.add_argument("--save-every", type=int, default=0, help="steps from one checkpoint to the next; 0: none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output directory")
    parser.add_argument(
        "--data", type=Path, help="JSONL with prompt or messages, and what the reward looks at; default: digits"
    )
    parser.add_argument(
        "--reward", metavar="FILE.py:FUNCTION", help="(response, example) -> float; default: right characters"
    )
    parser.add_argument("--max-tokens", type=int, help="longest response; default: 256, of digits their number and 3")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["vllm"],
        metavar="vllm|local|http://HOST:PORT",
        help="one or several: a vLLM started here, transformers in a process of its own, or a server that runs already",
    )
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda", "npu"), default="auto")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=os.environ.get("MEGASCEND_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python",
        help="interpreter of vLLM's environment; default: MEGASCEND_VLLM_PYTHON, or that of scripts/vllm_env.sh",
    )
    parser.add_argument(
        "--vllm-option",
        action="append",
        default=[],
        metavar="=OPTION",
        help="of vLLM's; repeated: --vllm-option=--seed=1",
    )
    parser.add_argument(
        "--trainer-gpus", type=int, nargs="+", help="GPUs of the trainer's processes; default: the first ones"
    )
    parser.add_argument(
        "--engine-gpus",
        type=lambda text: [int(number) for number in text.split(",")],
        nargs="+",
        metavar="GPU[,GPU]",
        help="GPUs of each vLLM that is started, several for tensor parallelism; default: one that no trainer process uses",
    )
    parser.add_argument(
        "--engine-memory", type=float, help="share of a GPU's memory for a vLLM; default: 0.7, shared 0.35"
    )
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--digits", type=int, default=3)
    parser.add_argument("--warm-up", type=int, help="supervised steps on answers first; default: 90, with --data none")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=16, help="of one step")
    parser.add_argument("--responses", type=int, default=8, help="to one prompt")
    parser.add_argument("--max-lag", type=int, default=1, help="steps that the engine may be behind")
    parser.add_argument("--lr", type=float, default=3e-4)
    arguments = parser.parse_args()
    if arguments.warm_up is None:
        arguments.warm_up = 0 if arguments.data else 90
    if arguments.max_tokens is None:
        arguments.max_tokens = 256 if arguments.data else arguments.digits + 3
    return arguments


def draw_task(digits: int, draw: random.Random) -> dict[str, str]:
    """Draw a prompt and its answer."""
    number = "".join(draw.choice("0123456789") for _ in range(digits))
    return {"prompt": f"s{number}=", "answer": "".join(sorted(number)) + STOP}


def reward(response: str, task: Mapping[str, Any]) -> float:
    """Return the share of characters that match the answer at the same position."""
    answer = task["answer"]
    return sum(actual == expected for actual, expected in zip(response, answer, strict=False)) / max(
        len(answer), len(response)
    )


class Tasks:
    """Endless prompts, with the interface that the collector expects."""

    def __init__(self, digits: int, seed: int) -> None:
        self._digits, self._seed, self._task_count = digits, seed, 0

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        self._task_count += 1
        # Each draw depends on its number alone, so a resumed run continues with the prompts it would have seen.
        return [draw_task(self._digits, random.Random(f"{self._seed}/{self._task_count}"))]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._task_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._task_count = state["drawn"]


def warm_up(backend: Any, tokenizer: Any, steps: int, draw_one: Callable[[random.Random], Mapping[str, Any]]) -> float:
    """Take supervised steps on answers; return the last loss. Every rank draws the same samples."""
    from megascend.apps.rl.rollout.prompts import prompt_tokens

    draw, loss = random.Random(0), float("nan")
    for _ in range(steps):
        samples = []
        for _ in range(32):
            task = draw_one(draw)
            prompt = prompt_tokens(dict(task), tokenizer)
            samples.append(
                megascend.Sample.causal(prompt + tokenizer.encode(task["answer"]), prompt_length=len(prompt))
            )
        result = backend.forward_backward(backend.shard(samples))
        backend.optimizer_step()
        loss = result.loss
    return loss


def start_servers(arguments: argparse.Namespace, stack: ExitStack) -> dict[int, VllmProcess]:
    """Start a vLLM process for each --engine that asks for one; the stack closes them."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    numbers = [number for number, kind in enumerate(arguments.engine) if kind == "vllm"]
    if not numbers:
        return {}
    (arguments.output / KEY).unlink(missing_ok=True)
    write_key(arguments.output / KEY)
    device = vllm_device(arguments.vllm_python)
    places = []
    if device == "cuda":
        places = place_engines(
            gpus_here(),
            trainers_on_gpus(arguments),
            len(numbers),
            trainer_gpus=arguments.trainer_gpus,
            engine_gpus=arguments.engine_gpus,
            memory=arguments.engine_memory,
        )
        if not places:
            raise SystemExit(f"{arguments.vllm_python} has a vLLM for CUDA, and this host shows no GPU")
    servers = {}
    for index, number in enumerate(numbers):
        options, environment, location = [*device_options(device), "--max-num-seqs=128"], {}, device
        if not arguments.data:
            options.append("--max-model-len=64")
        if places:
            options += places[index].options()
            environment = places[index].environment()
            location = str(places[index])
        options += arguments.vllm_option  # the last one of a name counts
        log = arguments.output / f"vllm-{number}.log"
        servers[number] = VllmProcess(
            arguments.vllm_python,
            arguments.model,
            key_file=arguments.output / KEY,
            log=log,
            options=options,
            environment=environment,
        )
        stack.callback(servers[number].close)
        print(f"vLLM {number} on {location}: {' '.join(options)}; its log: {log}", flush=True)
    if any(placement.with_trainer for placement in places):
        # vLLM measures the free memory of the GPU while it starts, so no other process may allocate or free any meanwhile.
        # The deadline is below the ten minutes that the other ranks wait for this one at start-up.
        deadline = time.monotonic() + 420
        for server in servers.values():
            server.wait_until_listening(timeout_s=max(1.0, deadline - time.monotonic()))
    return servers


def gpus_here() -> list[str]:
    """Return the names of the GPUs that this process sees, without initialising any of them."""
    import torch

    return visible_gpus(os.environ, torch.cuda.device_count())


def trainers_on_gpus(arguments: argparse.Namespace) -> int:
    """Return the number of trainer processes of this host that use a GPU, each the one at its local rank."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if arguments.platform in ("auto", "cuda") else 0


async def newest_version(engines: Sequence[Any]) -> int:
    return max(await asyncio.gather(*(engine.version() for engine in engines)))


def bars(rows: list[dict[str, Any]], width: int = 50) -> str:
    """Draw the rewards over the steps as text: ten lines, each the mean of a tenth of the run."""
    lines, size = [], max(1, len(rows) // 10)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        mean = sum(row["reward"] for row in part) / len(part)
        lines.append(f"steps {part[0]['step']:4}-{part[-1]['step']:<4} {mean:.3f} {'#' * round(mean * width)}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    parallel = megascend.Parallel(tensor=arguments.tensor)
    start = time.perf_counter()
    with ExitStack() as stack:
        # Servers take longest to start, so they are started first. Their initial weights do not matter.
        main_rank = os.environ.get("RANK", "0") == "0"
        servers = start_servers(arguments, stack) if main_rank else {}
        if arguments.trainer_gpus is not None:
            # After the start, which needs the names of all GPUs, and before this process uses one.
            count = trainers_on_gpus(arguments)
            os.environ.update(trainer_environment(gpus_here(), count, arguments.trainer_gpus))

        runtime = megascend.bootstrap(arguments.platform, parallel)
        # Engines on GPUs and NPUs compute in bf16, and so does the trainer then. Local engines (transformers) run on the CPU.
        on_devices = runtime.platform.name != "cpu" and set(arguments.engine) != {"local"}
        precision = "bf16" if on_devices else "fp32"
        from megascend.apps.data.order import Batches
        from megascend.apps.rl.learn import learn
        from megascend.apps.rl.rollout.buffer import RolloutBuffer
        from megascend.apps.rl.rollout.collector import RolloutCollector, Task
        from megascend.apps.rl.rollout.engines.local import LocalEngine
        from megascend.apps.rl.rollout.engines.vllm import VllmEngine
        from megascend.apps.rl.rollout.episodes import GradedResponses
        from megascend.apps.rl.rollout.prompts import prompt_tokens, read_prompts
        from megascend.apps.rl.rollout.rewards import load_reward
        from megascend.apps.rl.rollouts import SharedRollouts
        from megascend.apps.rl.set_up import fingerprint
        from megascend.apps.train.generation import stop_tokens
        from megascend.apps.train.plot import Panel, plot_metrics
        from megascend.config.rl import Objective
        from megascend.models.checkpoint_files.tokenizer import load_tokenizer
        from weightwire.engine import Sampling

        # Prompts and the reward are read before the model is built, so that mistakes in them show at once.
        stream: Any
        if arguments.data:
            prompts = read_prompts(arguments.data)
            random.Random(0).shuffle(prompts)
            held_out, prompts = prompts[: max(1, len(prompts) // 8)], prompts[max(1, len(prompts) // 8) :]
            stream = Batches(prompts, 1, 1, True, fingerprint(prompts))
            draw_one = lambda draw: draw.choice(prompts)  # noqa: E731
        else:
            held_out = [draw_task(arguments.digits, random.Random(f"held out/{number}")) for number in range(48)]
            stream = Tasks(arguments.digits, seed=1)
            draw_one = lambda draw: draw_task(arguments.digits, draw)  # noqa: E731
        grade = load_reward(arguments.reward) if arguments.reward else reward

        tokenizer: Any = load_tokenizer(arguments.model)
        backend = megascend.MegatronBackend(
            model=arguments.model,
            parallel=parallel,
            precision=precision,
            platform=arguments.platform,
            optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        )
        stack.enter_context(backend)
        # Steps are counted after the warm-up.
        checkpoint, completed_steps, saved = arguments.output / "checkpoint", 0, {}
        if arguments.resume:
            saved = backend.load(checkpoint)
            completed_steps = saved["done"]
        elif arguments.warm_up:
            loss = warm_up(backend, tokenizer, arguments.warm_up, draw_one)
            if main_rank:
                print(
                    f"warmed up: loss {loss:.3f} after {arguments.warm_up} steps, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
        engines: list[Any] = []
        collector = None
        if main_rank:
            for number, kind in enumerate(arguments.engine):
                if kind == "local":
                    engines.append(LocalEngine(arguments.model, name=f"local engine {number}", precision=precision))
                elif kind == "vllm":
                    servers[number].wait_until_listening(timeout_s=540)
                    engines.append(VllmEngine(servers[number].address, key=read_key(arguments.output / KEY)))
                else:
                    engines.append(VllmEngine(kind))  # the key comes from the environment: WEIGHTWIRE_KEY_FILE
            print(f"{len(engines)} engines after {time.perf_counter() - start:.0f} s", flush=True)

            # Everything that waits for engines runs on the collector's thread.
            stop = stop_tokens(tokenizer, arguments.model)
            if not arguments.data:
                stop.add(tokenizer.convert_tokens_to_ids(STOP))

            def decode(tokens: Sequence[int]) -> str:
                return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

            task = Task(
                GradedResponses(lambda prompt: prompt_tokens(prompt, tokenizer), decode, grade),
                decode,
                sampling=Sampling(max_tokens=arguments.max_tokens, stop_token_ids=tuple(stop), seed=0),
                group_size=arguments.responses,
                max_equal_groups=max(10 * arguments.prompts, 100),
            )
            buffer = RolloutBuffer(arguments.prompts, arguments.max_lag)
            collector = RolloutCollector(engines, stream, buffer, task)
            stack.callback(collector.close)
            if saved:
                collector.load_state_dict(saved["rollouts"])

        # Collective: all ranks call these, but only rank 0 talks to the engines.
        rollouts = SharedRollouts(backend, collector, patience_s=300)
        sync = stack.enter_context(megascend.WeightSync(backend, engines))
        # Versions must increase, and an engine may have been running before this process.
        offset = 1 + rollouts.on_rank_0(lambda collector: collector.run(newest_version(engines))) - completed_steps
        first = sync.push(version=completed_steps + offset)
        if main_rank:
            print(f"weights: {precision}, {first.nbytes:,} bytes over {first.transport}", flush=True)
        rollouts.on_rank_0(lambda collector: collector.updated(completed_steps + offset))
        before = saved["before"] if saved else rollouts.evaluate(held_out, temperature=1.0, n=4)[0]
        rollouts.on_rank_0(lambda collector: collector.start(step=completed_steps, offset=offset))

        rows = saved["rows"] if saved else []
        for step in range(completed_steps + 1, arguments.steps + 1):
            step_start = time.perf_counter()
            groups = rollouts.take(step - 1, stop=lambda: False)
            assert groups is not None
            waited = time.perf_counter() - step_start
            learned = learn(backend, groups, Objective(loss="ppo", advantages="grpo"))
            update = backend.optimizer_step()
            pushed = sync.push(version=step + offset)
            rollouts.on_rank_0(lambda collector, step=step: collector.updated(step + offset))
            assert learned.mismatch is not None
            rewards = [value for group in groups for value in group.rewards]
            rows.append(
                {
                    "step": step,
                    "reward": sum(rewards) / len(rewards),
                    "lag": sum(step - 1 - group.version for group in groups) / len(groups),
                    "mismatch": learned.mismatch.mean_abs,
                    "pause_s": pushed.pause_s,
                    "grad_norm": update.grad_norm,
                    "wait_s": waited,
                }
            )
            if main_rank and (step % 5 == 0 or step == 1):
                row, seconds = rows[-1], time.perf_counter() - step_start
                print(
                    f"step {step}/{arguments.steps}  reward {row['reward']:.3f}  lag {row['lag']:.1f}  mismatch "
                    f"{row['mismatch']:.1e}  {seconds:.2f} s, {waited:.2f} s of it waiting, paused {row['pause_s']:.3f} s",
                    flush=True,
                )
            if arguments.save_every and step % arguments.save_every == 0:
                progress = {"done": step, "before": before, "rows": rows, "rollouts": rollouts.state_dict()}
                backend.save(checkpoint, progress=progress)
        after, _ = rollouts.evaluate(held_out, temperature=1.0, n=4)
        backend.export_hf(arguments.output / "hf")
        if main_rank:
            labels = ("reward", "lag", "mismatch", "pause_s", "grad_norm", "wait_s")
            panels = [Panel(label, label, f"C{number}") for number, label in enumerate(labels)]
            figure = arguments.output / "async_grpo.png"
            plot_metrics(rows, figure, f"async GRPO, lag {arguments.max_lag}, {', '.join(arguments.engine)}", panels)
            print(
                f"\n{bars(rows)}\n\nreward on new prompts: {before:.3f} before, {after:.3f} after; see {figure} and "
                f"{arguments.output / 'hf'}",
                flush=True,
            )
    if not arguments.data and not after > before:
        raise SystemExit("FAILED: the reward has not risen")


if __name__ == "__main__":
    main()
