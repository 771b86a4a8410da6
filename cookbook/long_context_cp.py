"""Train on long sequences that context parallel ranks share between them, as one flat script.

    bash cookbook/long_context_cp.sh                                                          # 2 processes: CP 2
    NPROC=8 bash cookbook/long_context_cp.sh --model MODEL --context 8 --length 131072 --precision bf16 --recompute

The task cannot be solved without the whole context: the first token is a key, noise follows, and at a few places far
behind it a question mark asks for the key. Nothing nearer tells it, since the key is never repeated in the input: only
the targets, which need not be the next token, hold it. With --data the sequences are those of your own files instead: long
texts are cut into pieces of --length tokens.

With context parallelism a sequence is cut into 2 x CP chunks; rank r holds chunks r and 2 x CP - 1 - r, so that every
rank has an equal share of causal attention's work. Samples of different lengths are packed without padding, except to a
multiple of 2 x CP. None of this is the caller's business: every context parallel rank passes the same whole samples.
In the end OUTPUT/hf holds a model that transformers loads; with --save-every, a run that was killed continues with --resume.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import megascend

KEYS = 8
NOISE = range(64, 128)
QUESTION = 60
QUESTIONS = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on long packed sequences with context parallelism.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--data", type=Path, help="texts or conversations (docs/data.md); default: the task above")
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint and the trained model go here")
    parser.add_argument("--save-every", type=int, default=0, help="steps from one checkpoint to the next; 0: none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output directory")
    parser.add_argument("--context", type=int, default=2, help="context parallel size")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size (with sequence parallelism)")
    parser.add_argument("--length", type=int, default=768, help="longest sequence in tokens; the shortest has half")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of layers for the backward pass")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    return parser.parse_args()


def recall_sample(length: int, draw: random.Random) -> tuple[megascend.Sample, int]:
    """Draw a sequence whose first token is asked for at QUESTIONS places in its second half; also returns that key."""
    key = draw.randrange(KEYS)
    tokens = [key, *(draw.choice(NOISE) for _ in range(length - 1))]
    targets, weights = [0] * length, [0.0] * length
    for position in draw.sample(range(length // 2, length), QUESTIONS):
        tokens[position], targets[position], weights[position] = QUESTION, key, 1.0
    return megascend.Sample(input_ids=tokens, target_ids=targets, weights=weights), key


def draw_batch(count: int, longest: int, draw: random.Random) -> list[megascend.Sample]:
    """``count`` sequences of at least half the longest length. The same on every rank, if ``draw`` is."""
    return [recall_sample(draw.randint(longest // 2, longest), draw)[0] for _ in range(count)]


def own_samples(data: Path, model: Path, longest: int) -> list[megascend.Sample]:
    """Read samples from files: texts in pieces of at most ``longest`` tokens, conversations that are no longer than that."""
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.samples import build_samples

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return build_samples(read_documents(data), tokenizer, longest)


def recalled(backend: megascend.MegatronBackend, longest: int) -> float:
    """Share of the questions in new sequences where the right key gets more than half of the probability."""
    draw = random.Random(1)
    samples = [recall_sample(longest, draw)[0] for _ in range(8)]
    logprobs = backend.forward(samples).logprobs
    right = 0
    for values, sample in zip(logprobs, samples, strict=True):
        right += int((values[sample.weights > 0] > math.log(0.5)).sum())
    return right / (QUESTIONS * len(samples))


def main() -> None:
    arguments = parse_arguments()
    megascend.bootstrap()
    samples = own_samples(arguments.data, arguments.model, arguments.length) if arguments.data else []
    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=megascend.Parallel(context=arguments.context, tensor=arguments.tensor, sequence=arguments.tensor > 1),
        precision=arguments.precision,
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=arguments.steps // 10, total_steps=arguments.steps),
        recompute=megascend.Recompute(granularity="full" if arguments.recompute else "none"),
        # Tokens of one micro batch over all context ranks; each holds 1/CP of them. Rounding up to 2 x CP comes on top.
        batching=megascend.Batching(micro_batch_tokens=2 * arguments.length + 4 * arguments.context),
    )
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")
        if arguments.length > backend.max_length:
            raise megascend.ConfigError(
                f"--length {arguments.length} exceeds the model's context of {backend.max_length}"
            )

        checkpoint = arguments.output / "checkpoint"
        if arguments.resume:
            backend.load(checkpoint)
        first_loss = last_loss = math.nan
        for step in range(backend.step_count + 1, arguments.steps + 1):
            start = time.perf_counter()
            # The number of the step is all that a batch depends on, so a run that is resumed needs to know nothing else.
            draw = random.Random(step)
            if samples:
                batch = draw.sample(samples, min(arguments.batch, len(samples)))
            else:
                batch = draw_batch(arguments.batch, arguments.length, draw)
            result = backend.forward_backward(backend.shard(batch))
            update = backend.optimizer_step()
            last_loss = result.loss
            first_loss = last_loss if math.isnan(first_loss) else first_loss
            speed = result.total_tokens / (time.perf_counter() - start)
            if main_rank:
                print(
                    f"step {step}/{arguments.steps}  loss {last_loss:.4f}  grad norm {update.grad_norm:.3f}  "
                    f"{speed:,.0f} tokens/s{'  SKIPPED' if update.skipped else ''}",
                    flush=True,
                )
            if arguments.save_every and step % arguments.save_every == 0:
                # Written while training continues. The directory holds the former checkpoint until this one is complete.
                backend.save(checkpoint)

        backend.export_hf(arguments.output / "hf")
        learned = f"learned: loss {first_loss:.3f} -> {last_loss:.3f}"
        if not samples:
            learned += (
                f" (knowing only that it is one of {KEYS} keys gives {math.log(KEYS):.3f}); in new sequences of "
                f"{arguments.length} tokens {recalled(backend, arguments.length):.0%} of the questions get their key"
            )
        if main_rank:
            print(f"{learned}; model: {arguments.output / 'hf'}")
    finally:
        backend.close()


if __name__ == "__main__":
    main()
