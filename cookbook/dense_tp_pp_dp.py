"""Fine-tune a dense model with tensor, pipeline and data parallelism, as one flat script.

    bash cookbook/dense_tp_pp_dp.sh                                          # 4 processes: TP 2 x PP 2 x DP 1
    NPROC=8 bash cookbook/dense_tp_pp_dp.sh --model MODEL --precision bf16   # 8 processes: TP 2 x PP 2 x DP 2

The data parallel size is not an argument: it is what tensor and pipeline leave of the number of processes. Nothing
below depends on the layout. Every rank reads the same conversations, draws the same global batch, and takes its share.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import megascend

QUESTIONS_SHOWN = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a dense model with TP x PP x DP.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--data", type=Path, default=Path("examples/quickstart/chat.jsonl"), help="JSONL with messages")
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline parallel size")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="conversations in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    return parser.parse_args()


def read_samples(path: Path, tokenizer) -> list[megascend.Sample]:
    """One sample a conversation. The first turn carries no loss; the answer does, its end included."""
    samples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        answer = messages[1]["content"] + tokenizer.eos_token
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        samples.append(megascend.Sample.causal(prompt_ids + answer_ids, prompt_length=len(prompt_ids)))
    return samples


def answer_likelihood(backend: megascend.MegatronBackend, samples: list[megascend.Sample]) -> float:
    """Geometric mean of the probabilities of all answer tokens: 1 divided by the perplexity."""
    logprobs = backend.forward(samples).logprobs
    total = sum(float((values * sample.weights).sum()) for values, sample in zip(logprobs, samples, strict=True))
    return math.exp(total / sum(float(sample.weights.sum()) for sample in samples))


def main() -> None:
    arguments = parse_arguments()

    # First of all: platform chosen, versions checked, packages in place before anything imports Megatron.
    megascend.bootstrap()
    from transformers import AutoTokenizer

    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=megascend.Parallel(tensor=arguments.tensor, pipeline=arguments.pipeline),
        precision=arguments.precision,
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=arguments.steps // 10, total_steps=arguments.steps),
        # A pipeline is full when there are more micro batches than stages: keep them small.
        batching=megascend.Batching(micro_batch_tokens=512),
    )
    # From here on an error would leave the other ranks waiting: close() in the end, whatever happens.
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")

        # Every rank has the whole data set, in the same order.
        samples = read_samples(arguments.data, AutoTokenizer.from_pretrained(arguments.model, local_files_only=True))
        shown = samples[:QUESTIONS_SHOWN]
        before = answer_likelihood(backend, shown)

        shuffle = random.Random(0)
        first_loss = last_loss = math.nan
        for step in range(1, arguments.steps + 1):
            start = time.perf_counter()
            batch = shuffle.sample(samples, min(arguments.batch, len(samples)))

            # Samples differ in length: shard() gives every data parallel rank about as many tokens as the others. Ranks
            # that differ only in tensor or pipeline parallelism get the same list, and must.
            result = backend.forward_backward(backend.shard(batch), loss="cross_entropy")
            update = backend.optimizer_step()

            # Reading the loss waits for the device, so read it after the step.
            last_loss = result.loss
            first_loss = last_loss if step == 1 else first_loss
            speed = result.total_tokens / (time.perf_counter() - start)
            if main_rank:
                skipped = "  SKIPPED" if update.skipped else ""
                print(
                    f"step {step}/{arguments.steps}  loss {last_loss:.4f}  grad norm {update.grad_norm:.3f}  "
                    f"{speed:,.0f} tokens/s  {result.micro_batches} micro batches{skipped}",
                    flush=True,
                )

        # forward() is collective too: every rank calls it, rank 0 prints.
        after = answer_likelihood(backend, shown)
        if main_rank:
            print(
                f"learned: loss {first_loss:.3f} -> {last_loss:.3f}; each token of the first {len(shown)} answers had "
                f"probability {before:.1%} before and {after:.1%} now (geometric mean)"
            )
    finally:
        backend.close()


if __name__ == "__main__":
    main()
