"""Fine-tune a mixture of experts under FSDP2, with transformers' own model, as one flat script.

    bash cookbook/fsdp_moe.sh                                                        # 2 processes, a small random Qwen3-MoE
    NPROC=8 bash cookbook/fsdp_moe.sh --model MODEL --precision bf16 --lr 1e-5       # 8 GPUs, any MoE that transformers fuses

Every rank holds 1/N of each layer, its experts included, and of its moments; a layer is gathered when it computes. No Megatron
is in the process. With --replicate 2 there are two copies of the model, each spread over half of the ranks (HSDP): gradients
cross the slower network between hosts, parameters do not. The run is saved half way and goes on from there in a new backend, as
after a crash; the last lines say whether the figures of the next step are the same.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import megascend


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a mixture of experts under FSDP2.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--data", type=Path, default=Path("examples/quickstart/chat.jsonl"), help="JSONL, text or folder"
    )
    parser.add_argument("--replicate", type=int, default=1, help="copies of the model (HSDP)")
    parser.add_argument("--offload", action="store_true", help="parameters, gradients and moments in host memory")
    parser.add_argument("--recompute", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="samples in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    parser.add_argument("--save", type=Path, default=Path("runs/cookbook/fsdp_moe"), help="where the checkpoint goes")
    return parser.parse_args()


def make_backend(arguments: argparse.Namespace) -> megascend.FsdpBackend:
    return megascend.FsdpBackend(
        model=arguments.model,
        fsdp=megascend.Fsdp(replicate=arguments.replicate, offload=arguments.offload),
        precision=arguments.precision,
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=arguments.steps // 10, total_steps=arguments.steps),
        # A layer's routing is kept for the second time, so that every token meets the experts of the first time again.
        recompute=megascend.Recompute(granularity="full" if arguments.recompute else "none"),
        batching=megascend.Batching(micro_batch_tokens=1024),
    )


def main() -> None:
    arguments = parse_arguments()
    megascend.bootstrap(engine="fsdp")
    from transformers import AutoTokenizer

    from megascend.data.files import read_documents
    from megascend.data.order import batches
    from megascend.data.samples import build_samples

    backend = make_backend(arguments)
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(
                f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters in {arguments.replicate} copies on "
                f"{backend.platform.name}"
            )

        # The library's own reader: chat or plain text, loss on the assistant's turns, an endless stream of batches.
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        samples = build_samples(read_documents(arguments.data), tokenizer, backend.max_length)
        stream = batches(samples, arguments.batch, seed=0, shuffle=True)

        first_loss = last_loss = math.nan
        half = max(1, arguments.steps // 2)
        for step in range(1, arguments.steps + 1):
            start = time.perf_counter()
            batch = next(stream)
            if step == half + 1:
                # What would have come next, and then the same from the checkpoint, in a backend that has just been built.
                expected = backend.forward_backward(backend.shard(batch)).loss
                backend.close()
                backend = make_backend(arguments)
                backend.load(arguments.save)
            result = backend.forward_backward(backend.shard(batch))
            if step == half + 1 and main_rank:
                same = "the same loss" if result.loss == expected else f"loss {result.loss} in place of {expected}"
                print(f"resumed after step {backend.step_count}: {same}", flush=True)
            update = backend.optimizer_step()
            if step == half:
                # The Megatron engine reads this checkpoint too, moments included.
                backend.save(arguments.save, wait=True)
            last_loss = result.loss
            first_loss = last_loss if step == 1 else first_loss
            speed = result.total_tokens / (time.perf_counter() - start)
            if main_rank:
                print(
                    f"step {step}/{arguments.steps}  loss {last_loss:.4f}  grad norm {update.grad_norm:.3f}  "
                    f"{speed:,.0f} tokens/s{'  SKIPPED' if update.skipped else ''}",
                    flush=True,
                )
        if main_rank:
            print(
                f"learned: loss {first_loss:.3f} -> {last_loss:.3f} after {stream.epochs:.1f} epochs; guessing has "
                f"{math.log(backend.vocab_size):.2f}"
            )
    finally:
        backend.close()


if __name__ == "__main__":
    main()
