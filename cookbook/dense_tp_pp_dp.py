"""Fine-tune a dense model with tensor, pipeline and data parallelism, as one flat script.

    bash cookbook/dense_tp_pp_dp.sh                                          # 4 processes: TP 2 x PP 2 x DP 1
    bash cookbook/dense_tp_pp_dp.sh --data mine.jsonl --output runs/mine     # your own data
    NPROC=8 bash cookbook/dense_tp_pp_dp.sh --model MODEL --precision bf16   # 8 processes: TP 2 x PP 2 x DP 2

The data parallel size is not an argument: it is what tensor and pipeline leave of the number of processes. Nothing
below depends on the layout. Every rank reads the same data, draws the same global batch, and takes its share. In the end
OUTPUT/hf holds a model that transformers loads; with --save-every, a run that was killed continues with --resume.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import megascend

ROOT = Path(__file__).resolve().parents[1]

SAMPLES_SHOWN = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a dense model with TP x PP x DP.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT / "examples" / "quickstart" / "chat.jsonl",
        help="JSONL, JSON, CSV, parquet, text or a folder: conversations, prompts with completions, texts (docs/data.md)",
    )
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint and the trained model go here")
    parser.add_argument("--save-every", type=int, default=0, help="steps from one checkpoint to the next; 0: none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output directory")
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline parallel size")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="samples in one step, over all ranks")
    parser.add_argument("--max-length", type=int, help="longest sample in tokens; default: what the model allows")
    # A pipeline is full when there are more micro batches than stages: keep them small.
    parser.add_argument("--micro-batch-tokens", type=int, default=512, help="tokens of one micro batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    return parser.parse_args()


def answer_likelihood(backend: megascend.MegatronBackend, samples: list[megascend.Sample]) -> float:
    """Geometric mean of the probabilities of all tokens that are learned: 1 divided by the perplexity."""
    logprobs = backend.forward(samples).logprobs
    total = sum(float((values * sample.weights).sum()) for values, sample in zip(logprobs, samples, strict=True))
    return math.exp(total / sum(float(sample.weights.sum()) for sample in samples))


def main() -> None:
    arguments = parse_arguments()

    # First of all: platform chosen, versions checked, packages in place before anything imports Megatron.
    megascend.bootstrap()
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.order import batches, fingerprint_of
    from megascend.apps.data.samples import build_samples

    # Lines that cannot be read are named, all of them, before a model is built.
    documents = read_documents(arguments.data)

    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=megascend.Parallel(tensor=arguments.tensor, pipeline=arguments.pipeline),
        precision=arguments.precision,
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=arguments.steps // 10, total_steps=arguments.steps),
        batching=megascend.Batching(micro_batch_tokens=arguments.micro_batch_tokens, max_length=arguments.max_length),
    )
    # From here on an error would leave the other ranks waiting: close() in the end, whatever happens.
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")

        # A conversation is written by the model's chat template; the loss is on the assistant's turns, their ends included.
        # Every rank has all samples, in the same order, and the same endless stream of batches.
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        samples = build_samples(documents, tokenizer, min(backend.max_length, arguments.micro_batch_tokens))
        stream = batches(samples, arguments.batch, seed=0, shuffle=True, fingerprint=fingerprint_of(samples))
        examples = samples[:SAMPLES_SHOWN]
        before = answer_likelihood(backend, examples)
        checkpoint = arguments.output / "checkpoint"
        if arguments.resume:
            stream.load_state_dict(backend.load(checkpoint)["data"])

        first_loss = last_loss = math.nan
        for step in range(backend.step_count + 1, arguments.steps + 1):
            start = time.perf_counter()

            # Samples differ in length: shard() gives every data parallel rank about as many tokens as the others. Ranks
            # that differ only in tensor or pipeline parallelism get the same list, and must.
            result = backend.forward_backward(backend.shard(next(stream)), loss="cross_entropy")
            update = backend.optimizer_step()

            # Reading the loss waits for the device, so read it after the step.
            last_loss = result.loss
            first_loss = last_loss if math.isnan(first_loss) else first_loss
            speed = result.total_tokens / (time.perf_counter() - start)
            if main_rank:
                skipped = "  SKIPPED" if update.skipped else ""
                print(
                    f"step {step}/{arguments.steps}  loss {last_loss:.4f}  grad norm {update.grad_norm:.3f}  "
                    f"{speed:,.0f} tokens/s  {result.micro_batches} micro batches{skipped}",
                    flush=True,
                )
            if arguments.save_every and step % arguments.save_every == 0:
                # Written while training continues. The directory holds the former checkpoint until this one is complete.
                backend.save(checkpoint, progress={"data": stream.state_dict()})

        # forward() and export_hf() are collective too: every rank calls them, rank 0 prints.
        after = answer_likelihood(backend, examples)
        backend.export_hf(arguments.output / "hf")
        if main_rank:
            print(
                f"learned: loss {first_loss:.3f} -> {last_loss:.3f}; each learned token of the first {len(examples)} samples "
                f"had probability {before:.1%} before and {after:.1%} now (geometric mean); model: {arguments.output / 'hf'}"
            )
    finally:
        backend.close()


if __name__ == "__main__":
    main()
