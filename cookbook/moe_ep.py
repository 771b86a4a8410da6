"""Fine-tune a mixture of experts with expert, tensor, sequence and data parallelism, as one flat script.

    bash cookbook/moe_ep.sh                                                      # 4 processes: TP 2 x DP 2, EP 2
    bash cookbook/moe_ep.sh --data mine.jsonl --output runs/mine                 # your own data
    NPROC=8 bash cookbook/moe_ep.sh --model MODEL --expert 8 --precision bf16    # 8 processes: TP 2 x DP 4, EP 8

Experts and everything else are laid out on two different grids over the same ranks. On 8 ranks with TP 2, EP 8 and
ETP 1 attention sees 2 (tensor) x 4 (data); the experts see 1 (expert tensor) x 8 (expert) x 1 (expert data). With
experts and TP above 1 megascend switches sequence parallelism on, because Megatron-Core needs it there; the layout
printed at the start says so. In the end OUTPUT/hf holds a model that transformers loads; with --save-every, a run that
was killed continues with --resume.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import megascend

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a mixture of experts with EP (+ TP + SP).")
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
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size of attention")
    parser.add_argument(
        "--expert", type=int, default=2, help="expert parallel size: every rank holds 1/EP of the experts"
    )
    parser.add_argument("--expert-tensor", type=int, default=1, help="tensor parallel size inside an expert")
    parser.add_argument("--aux-loss", type=float, default=1e-3, help="coefficient of Megatron's load-balancing loss")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="samples in one step, over all ranks")
    parser.add_argument("--max-length", type=int, help="longest sample in tokens; default: what the model allows")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="tokens of one micro batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    megascend.bootstrap()
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.order import batches, fingerprint_of
    from megascend.apps.data.samples import build_samples

    documents = read_documents(arguments.data)
    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=megascend.Parallel(
            tensor=arguments.tensor,
            expert=arguments.expert,
            expert_tensor=arguments.expert_tensor,
        ),
        precision=arguments.precision,
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=arguments.steps // 10, total_steps=arguments.steps),
        # Pulls the routers towards an even use of the experts. It adds to the gradients, not to the reported loss.
        moe=megascend.Moe(
            aux_loss="megatron" if arguments.aux_loss else "none", aux_loss_coefficient=arguments.aux_loss
        ),
        batching=megascend.Batching(micro_batch_tokens=arguments.micro_batch_tokens, max_length=arguments.max_length),
    )
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")

        # Loss on the assistant's turns, or on what the data say; an endless stream of batches.
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        samples = build_samples(documents, tokenizer, min(backend.max_length, arguments.micro_batch_tokens))
        stream = batches(samples, arguments.batch, seed=0, shuffle=True, fingerprint=fingerprint_of(samples))
        checkpoint = arguments.output / "checkpoint"
        if arguments.resume:
            stream.load_state_dict(backend.load(checkpoint)["data"])

        first_loss = last_loss = math.nan
        for step in range(backend.step_count + 1, arguments.steps + 1):
            start = time.perf_counter()
            # Ranks of one expert parallel group exchange tokens in every layer. They run equally many micro batches
            # even if one of them has fewer samples; the missing ones are made up with weight 0.
            result = backend.forward_backward(backend.shard(next(stream)))
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
                backend.save(checkpoint, progress={"data": stream.state_dict()})

        # How sure is the model of its next token now? Entropy comes from the same chunked output head as the loss.
        sample = samples[0]
        entropies = backend.forward([sample], entropy=True).entropy
        assert entropies is not None, "asked for"
        mean_entropy = float((entropies[0] * sample.weights).sum() / sample.weights.sum())
        backend.export_hf(arguments.output / "hf")
        if main_rank:
            print(
                f"learned: loss {first_loss:.3f} -> {last_loss:.3f} after {stream.progress.epochs:.1f} epochs; the entropy of a "
                f"token of the first answer is {mean_entropy:.2f} nats; guessing has {math.log(backend.vocab_size):.2f}; "
                f"{arguments.output / 'hf'} is the model"
            )
    finally:
        backend.close()


if __name__ == "__main__":
    main()
