"""Smoke run on Ascend: a mixture of experts with TP 2 x CP 2 (ring attention) x DP 2 and EP 4, as one flat script.

    bash cookbook/ascend/tp_moe_cp_npu.sh                                      # 8 cards
    megascend simnpu -- bash cookbook/ascend/tp_moe_cp_npu.sh                  # 8 processes on the simulated device
    bash cookbook/ascend/tp_moe_cp_npu.sh --model MODEL --lr 1e-5              # your model, 10 steps

A sequence is cut into 2 x CP chunks; rank r of a ring holds chunks r and 2 x CP - 1 - r, an equal share of causal
attention's work. Keys and values travel round the ring while each rank computes with those it has. The experts ignore CP:
for them the 8 ranks are 1 (expert tensor) x 4 (expert) x 2 (expert data), whatever the tokens' place in the sequence.

Every step sees the same batch, so the loss has to fall: a run that does not learn ends with exit code 1. To train, draw
another batch in every step. The last line is ``SMOKE OK``, once every rank has reported the same losses.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import megascend

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Smoke run: a mixture of experts with TP + CP + EP on Ascend cards.")
    parser.add_argument("--platform", choices=("npu", "cpu"), default="npu", help="cpu: to try the script out")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "examples" / "quickstart" / "chat.jsonl", help="JSONL, text or folder"
    )
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size of attention")
    parser.add_argument("--context", type=int, default=2, help="context parallel size")
    parser.add_argument("--expert", type=int, default=4, help="expert parallel size: a rank holds 1/EP of the experts")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=10, help="at least 2")
    parser.add_argument("--batch", type=int, default=8, help="samples in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # Experts and TP together need sequence parallelism in Megatron-Core: norms and dropout work on 1/TP of the sequence.
    parallel = megascend.Parallel(
        tensor=arguments.tensor,
        sequence=arguments.tensor > 1,
        context=arguments.context,
        context_algorithm="ring",
        expert=arguments.expert,
        expert_tensor=1,
    )

    # Before anything imports Megatron: MindSpeed patches it here, for this layout, and once more when the model is known.
    # Context parallelism changes its patches (attention, process groups): without the layout here there would be a third
    # time, about a second on every rank.
    megascend.bootstrap(arguments.platform, parallel)
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.samples import build_samples
    from megascend.runtime.distributed.objects import gather_objects

    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=parallel,
        precision=arguments.precision,
        # distributed: attention's optimizer state is sharded over DP x CP = 4 ranks, the experts' over their 2.
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0, distributed=True),
        # One sample a row, padded to a multiple of 2 x CP x TP. With CP, packed samples are refused on an NPU: MindSpeed's
        # ring attention cannot take them, and its all-gather cuts them at other places than mcore-bridge does. Padding would
        # count in the load-balancing loss, so there is none here.
        batching=megascend.Batching(packing=False, micro_batch_tokens=1024),
        platform=arguments.platform,
    )
    try:
        main_rank = backend.rank == 0
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")

        # The first samples of the data, the same list on every rank; shard() takes this data parallel rank's share.
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        samples = build_samples(read_documents(arguments.data), tokenizer, backend.max_length)[: arguments.batch]
        share = backend.shard(samples)

        losses, norms, skipped = [], [], 0
        for step in range(1, arguments.steps + 1):
            start = time.perf_counter()
            result = backend.forward_backward(share, loss="cross_entropy")
            update = backend.optimizer_step()
            losses.append(result.loss)
            norms.append(update.grad_norm)
            skipped += update.skipped
            backend.platform.synchronize()  # operators are queued: without this the last ones would not be in the time
            milliseconds = 1e3 * (time.perf_counter() - start)
            if main_rank:
                print(
                    f"step {step}/{arguments.steps}  loss {losses[-1]:.4f}  grad norm {norms[-1]:.3f}  "
                    f"{milliseconds:,.0f} ms{'  SKIPPED' if update.skipped else ''}",
                    flush=True,
                )

        # Over Gloo, never over HCCL. Also a barrier: it returns when every rank has called it.
        figures = losses, backend.platform.memory().peak, backend.groups.monitor.alive
        reports = gather_objects(figures, "world", backend.groups)
    finally:
        backend.close()

    problem = problem_in([losses for losses, *_ in reports], norms, skipped)
    if main_rank:
        peaks = [peak / 2**20 for _, peak, _ in reports]
        print(f"peak device memory: {min(peaks):,.1f} to {max(peaks):,.1f} MiB a rank")
        print(f"hang monitors: {sum(alive for *_, alive in reports)} of {len(reports)} alive")
        print(f"SMOKE FAILED: {problem}" if problem else "SMOKE OK", flush=True)
    if problem:
        raise SystemExit(1)


def problem_in(losses: list[list[float]], norms: list[float], skipped: int) -> str | None:
    """Return why losses (one list a rank) and gradient norms are not those of a model that learns; None if they are."""
    first, last = losses[0][0], losses[0][-1]
    for step, (loss, norm) in enumerate(zip(losses[0], norms, strict=True), start=1):
        if not math.isfinite(loss) or (not skipped and not math.isfinite(norm)):
            return f"step {step} has loss {loss} and gradient norm {norm}"
    if last >= first:
        return f"the loss of one and the same batch did not fall: {first:.4f} -> {last:.4f}, {skipped} steps skipped"
    for rank, rank_losses in enumerate(losses):
        if not all(math.isclose(loss, other, rel_tol=1e-4) for loss, other in zip(losses[0], rank_losses, strict=True)):
            return f"the ranks disagree: rank 0 has losses {losses[0]}, rank {rank} {rank_losses}"
    return None


if __name__ == "__main__":
    main()
