"""Four tenants train LoRA adapters on one frozen base model at the same time, as one flat script.

    bash cookbook/multi_lora.sh                                                          # 2 processes: TP 2
    NPROC=8 bash cookbook/multi_lora.sh --model MODEL --tensor 2 --pipeline 2 --precision bf16 --lr 2e-4

All tenants see prompts of the same kind, some letters and an arrow, and each teaches its own answer to them: the letters
again, each letter three shift_letter on, the letters that follow the last one, or one phrase whatever the prompt was. So what
one adapter learns is wrong for the other three. Rank, learning rate, schedule and adapted layers are each tenant's own.

Every step, all tenants submit their work before any of it runs; then the queue runs their samples as one mixed batch. In
the end every adapter meets the prompts of every task. The script ends with 1 unless each is best by far on its own.

With --data ada=ada.jsonl --data bob=bob.csv the tenants are yours instead, each with data of its own; an eighth of them is
held out for the table. What the adapters make of each other's data is then for you to judge.

With --save-every, a run that was killed continues with --resume.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import megascend

LETTERS = range(ord("a"), ord("a") + 16)  # token ids; what they mean to a real model's tokenizer does not matter
ARROW = ord(">")
PHRASE = [ord(letter) for letter in "lama"]
BASE = "(base model)"
SUCCESS = "each adapter has learned its own task, and none of the others'"


@dataclass(frozen=True)
class Tenant:
    """A name, what is taught (an answer to a prompt's letters, or samples), and the settings of the adapter."""

    name: str
    answer: Callable[[list[int]], list[int]]
    lora: megascend.Lora
    learned: Sequence[megascend.Sample] = ()
    held_out: Sequence[megascend.Sample] = ()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train four LoRA adapters at once on one base model.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a tenant and its data (docs/data.md); repeatable",
    )
    parser.add_argument("--max-length", type=int, help="longest sample in tokens; default: what the model allows")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="tokens of one micro batch")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/cookbook/adapters"), help="one folder for each adapter"
    )
    parser.add_argument("--save-every", type=int, default=0, help="steps from one checkpoint to the next; 0: none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output directory")
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="samples of each tenant in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="of most tenants; 2e-4 for a real model")
    return parser.parse_args()


def all_tenants(lr: float, steps: int) -> list[Tenant]:
    """Return the built-in tenants. A setting that a tenant omits is the backend's, or Lora's default."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    fast = megascend.Adam(lr=lr, weight_decay=0.0)
    slow = megascend.Adam(lr=lr / 2, weight_decay=0.01)
    cosine = megascend.Schedule(kind="cosine", warmup_steps=steps // 10, total_steps=steps)
    return [
        Tenant("copy", list, megascend.Lora(rank=8, alpha=16, optimizer=fast)),
        Tenant("shift", shift_letters, megascend.Lora(rank=16, rslora=True, alpha=8, optimizer=fast, schedule=cosine)),
        Tenant("count", count_letters, megascend.Lora(rank=32, alpha=64, targets=mlp, optimizer=fast)),
        Tenant("phrase", lambda _: PHRASE, megascend.Lora(rank=4, alpha=8, targets=attention, optimizer=slow)),
    ]


def own_tenants(data: list[str], model: Path, longest: int, lr: float) -> list[Tenant]:
    """Return tenants with their own data, given as NAME=PATH; an eighth of the samples, at least one, is held out."""
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.samples import build_samples

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    lora = megascend.Lora(rank=16, optimizer=megascend.Adam(lr=lr, weight_decay=0.0))
    tenants = []
    for name, path in (entry.split("=", 1) for entry in data):
        samples = build_samples(read_documents(path), tokenizer, longest)
        random.Random(0).shuffle(samples)
        held_out = max(1, len(samples) // 8)
        tenants.append(Tenant(name, list, lora, samples[held_out:], samples[:held_out]))
    return tenants


def shift_letter(letter: int, steps: int) -> int:
    """Shift a letter by ``steps`` places; the first follows the last."""
    return LETTERS[(letter - LETTERS[0] + steps) % len(LETTERS)]


def shift_letters(letters: list[int]) -> list[int]:
    """Shift each letter by three places."""
    return [shift_letter(letter, 3) for letter in letters]


def count_letters(letters: list[int]) -> list[int]:
    """Return the letters that follow the last one."""
    return [shift_letter(letters[-1], steps) for steps in range(1, len(letters) + 1)]


def draw_samples(tenant: Tenant, count: int, draw: random.Random, held_out: bool = False) -> list[megascend.Sample]:
    """Draw random prompts with the tenant's answer, which alone is trained on, or some of the tenant's own samples."""
    if tenant.learned:
        samples = tenant.held_out if held_out else tenant.learned
        return draw.sample(samples, min(count, len(samples)))
    samples = []
    for _ in range(count):
        letters = [draw.choice(LETTERS) for _ in PHRASE]
        prompt = [*letters, ARROW]
        samples.append(megascend.Sample.causal(prompt + tenant.answer(letters), prompt_length=len(prompt)))
    return samples


def mean_loss(logprobs, samples: list[megascend.Sample]) -> float:
    """Return the mean cross entropy of the answers' tokens."""
    total = sum(float((values * sample.weights).sum()) for values, sample in zip(logprobs, samples, strict=True))
    return -total / sum(float(sample.weights.sum()) for sample in samples)


def problem_in(table: dict[str, dict[str, float]]) -> str | None:
    """Return why losses by adapter and task do not show that each adapter learned its own task; None if they do."""
    for task in table[BASE]:
        task_loss = table[task][task]
        other, best = min(((name, row[task]) for name, row in table.items() if name != task), key=lambda pair: pair[1])
        if not task_loss < 0.5 * best:
            return f"adapter {task!r} has loss {task_loss:.3f} on its own task, where {other!r} has {best:.3f}"
    return None


def main() -> None:
    arguments = parse_arguments()
    megascend.bootstrap()
    from megascend.training.lora.queue import AdapterQueue

    if arguments.data:
        longest = min(arguments.max_length or arguments.micro_batch_tokens, arguments.micro_batch_tokens)
        tenants = own_tenants(arguments.data, arguments.model, longest, arguments.lr)
    else:
        tenants = all_tenants(arguments.lr, arguments.steps)
    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=megascend.Parallel(tensor=arguments.tensor, pipeline=arguments.pipeline),
        precision=arguments.precision,
        # This freezes the model. One more than there are tenants: at the end a saved adapter comes back under a new name.
        adapters=megascend.Adapters(max_count=len(tenants) + 1, max_rank=32),
        batching=megascend.Batching(micro_batch_tokens=arguments.micro_batch_tokens, max_length=arguments.max_length),
    )
    try:
        main_rank = backend.rank == 0
        for tenant in tenants:
            backend.add_adapter(tenant.name, tenant.lora)
        if main_rank:
            print(
                f"{backend.topology.describe()}\n{backend.parameter_count:,} frozen parameters on {backend.platform.name}"
            )

        # A checkpoint has all adapters with their optimizers, which take the place of those that have just been added.
        checkpoint = arguments.output / "checkpoint"
        completed_steps = backend.load(checkpoint)["step"] if arguments.resume else 0

        # Every rank has the same queue, submits the same requests in the same order, and draws the same samples: the number of
        # the step is all that they depend on, so a run that is resumed needs to know nothing else.
        queue = AdapterQueue(backend)
        for step in range(completed_steps + 1, arguments.steps + 1):
            start, draw = time.perf_counter(), random.Random(step)
            submitted = {}
            for tenant in tenants:
                samples = draw_samples(tenant, arguments.batch, draw)
                submitted[tenant.name] = queue.forward_backward(tenant.name, samples), queue.optimizer_step(tenant.name)

            # Nothing has run yet. The first result() runs one forward and backward for all tenants, the second one all
            # their optimizer steps; the other results are there already.
            results = {name: (forward.result(), update.result()) for name, (forward, update) in submitted.items()}

            tokens = sum(loss.total_tokens for loss, _ in results.values())
            speed = tokens / (time.perf_counter() - start)
            if main_rank:
                losses = "  ".join(f"{name} {loss.loss:.3f}" for name, (loss, _) in results.items())
                skipped = "".join(f"  {name} SKIPPED" for name, (_, update) in results.items() if update.skipped)
                print(f"step {step}/{arguments.steps}  {losses}  {speed:,.0f} tokens/s{skipped}", flush=True)
            if arguments.save_every and step % arguments.save_every == 0:
                backend.save(checkpoint, progress={"step": step})

        # Every adapter on new prompts of every task: 16 requests, which the queue may mix too. The samples name no adapter.
        held_out = {tenant.name: draw_samples(tenant, 32, random.Random(1), held_out=True) for tenant in tenants}
        futures = {
            tenant.name: {task: queue.forward(tenant.name, samples) for task, samples in held_out.items()}
            for tenant in tenants
        }
        table = {
            name: {task: mean_loss(future.result(), held_out[task]) for task, future in row.items()}
            for name, row in futures.items()
        }
        table[BASE] = {
            task: mean_loss(backend.forward(samples, reference=True).logprobs, samples)
            for task, samples in held_out.items()
        }

        # Save all adapters, and load one of them under another name.
        for tenant in tenants:
            backend.save_adapter(tenant.name, arguments.output / tenant.name)
        first = tenants[0].name
        backend.load_adapter("again", arguments.output / first)
        repeated = mean_loss(queue.forward("again", held_out[first]).result(), held_out[first])
    finally:
        backend.close()

    problem = None if arguments.data else problem_in(table)
    if not math.isclose(repeated, table[first][first], rel_tol=1e-3):
        problem = f"adapter {first!r}, saved and loaded, has loss {repeated:.4f} instead of {table[first][first]:.4f}"
    if main_rank:
        print("\nloss on new prompts, of each adapter (rows) on each task (columns):")
        print(f"{'':14}" + "".join(f"{task:>10}" for task in held_out))
        for name, row in table.items():
            print(f"{name:14}" + "".join(f"{loss:10.3f}" for loss in row.values()))
        print(f"{first}, saved to {arguments.output / first} and loaded as 'again': {repeated:.3f}")
        verdict = f"adapters in {arguments.output}" if arguments.data else SUCCESS
        print(f"FAILED: {problem}" if problem else verdict)
    if problem:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
