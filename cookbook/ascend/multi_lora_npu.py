"""Smoke run on Ascend: four tenants' LoRA adapters on one frozen model with TP 2 x PP 2 x DP 2, as one flat script.

    bash cookbook/ascend/multi_lora_npu.sh                            # 8 cards
    megascend simnpu -- bash cookbook/ascend/multi_lora_npu.sh        # 8 processes on the simulated device
    bash cookbook/ascend/multi_lora_npu.sh --model MODEL --lr 2e-4    # your model, 10 steps

Every step sees the same batch, in which all tenants' samples are mixed, so each tenant's own loss has to fall: a run where
one does not learn ends with exit code 1. The last line is ``SMOKE OK``, once every rank has reported the same losses.
Tenants who come and go, with requests of their own: ``cookbook/multi_lora.py``.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import megascend

ROOT = Path(__file__).resolve().parents[2]

# Rank, scaling and layers are each adapter's own. Small ranks are padded to the largest of a batch.
TENANTS = {
    "ada": megascend.Lora(rank=4, alpha=8),
    "ben": megascend.Lora(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    "cem": megascend.Lora(rank=16, alpha=32, targets=("gate_proj", "up_proj", "down_proj")),
    "dora": megascend.Lora(rank=32, alpha=16, rslora=True),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Smoke run: four LoRA adapters with TP x PP x DP on Ascend cards.")
    parser.add_argument("--platform", choices=("npu", "cpu"), default="npu", help="cpu: to try the script out")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "examples" / "quickstart" / "chat.jsonl", help="JSONL, text or folder"
    )
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline parallel size")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=10, help="at least 2")
    parser.add_argument("--batch", type=int, default=8, help="samples in one step, over all ranks and tenants")
    parser.add_argument("--lr", type=float, default=3e-3, help="for a small random model; 2e-4 for a real one")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    parallel = megascend.Parallel(tensor=arguments.tensor, pipeline=arguments.pipeline)

    # Before anything imports Megatron: MindSpeed patches it here, for this layout, and once more when the model is known.
    megascend.bootstrap(arguments.platform, parallel)
    from transformers import AutoTokenizer

    from megascend.apps.data.files import read_documents
    from megascend.apps.data.samples import build_samples
    from megascend.runtime.distributed.objects import gather_objects

    backend = megascend.MegatronBackend(
        model=arguments.model,
        parallel=parallel,
        precision=arguments.precision,
        # Every adapter has an optimizer of its own, with these settings. Its state is small: nothing of it is sharded.
        optimizer=megascend.Adam(lr=arguments.lr, weight_decay=0.0),
        # This freezes the model: no gradients, main parameters or moments are kept for it.
        adapters=megascend.Adapters(max_count=len(TENANTS), max_rank=32),
        # Packed (THD): samples of several tenants lie end to end in one micro batch, each tenant's in one run of tokens.
        batching=megascend.Batching(packing=True, micro_batch_tokens=512),
        platform=arguments.platform,
    )
    try:
        main_rank = backend.rank == 0
        for name, lora in TENANTS.items():
            backend.add_adapter(name, lora)
        if main_rank:
            print(f"{backend.topology.describe()}\n{backend.parameter_count:,} parameters on {backend.platform.name}")

        # The first samples of the data, dealt out to the tenants; shard() takes this data parallel rank's share.
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
        samples = build_samples(read_documents(arguments.data), tokenizer, backend.max_length)[: arguments.batch]
        names = list(TENANTS)
        dealt = [replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(samples)]
        share = backend.shard(dealt)

        losses: dict[str, list[float]] = {name: [] for name in names}
        norms: dict[str, list[float]] = {name: [] for name in names}
        skipped = dict.fromkeys(names, 0)
        for step in range(1, arguments.steps + 1):
            start = time.perf_counter()
            result = backend.forward_backward(share, loss="cross_entropy")
            update = backend.optimizer_step()  # of all adapters: each clips its own gradients, and skips by itself
            for name in names:
                losses[name].append(result.adapters[name].loss)
                norms[name].append(update.adapters[name].grad_norm)
                skipped[name] += update.adapters[name].skipped
            backend.platform.synchronize()  # operators are queued: without this the last ones would not be in the time
            milliseconds = 1e3 * (time.perf_counter() - start)
            if main_rank:
                print(
                    f"step {step}/{arguments.steps}  loss {result.loss:.4f}  grad norm {update.grad_norm:.3f}  "
                    f"{milliseconds:,.0f} ms{'  SKIPPED' if update.skipped else ''}",
                    flush=True,
                )

        # Over Gloo, never over HCCL. Also a barrier: it returns when every rank has called it.
        figures = losses, backend.platform.memory().peak, backend.groups.monitor.alive
        reports = gather_objects(figures, "world", backend.groups)
    finally:
        backend.close()

    reasons = {
        name: problem_in([rank_losses[name] for rank_losses, *_ in reports], norms[name], skipped[name])
        for name in names
    }
    problem = next((f"tenant {name}: {reason}" for name, reason in reasons.items() if reason), None)
    if main_rank:
        for name in names:
            print(f"tenant {name}: rank {TENANTS[name].rank}, loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}")
        peaks = [peak / 2**20 for _, peak, _ in reports]
        print(f"peak device memory: {min(peaks):,.1f} to {max(peaks):,.1f} MiB a rank")
        print(f"hang monitors: {sum(alive for *_, alive in reports)} of {len(reports)} alive")
        print(f"SMOKE FAILED: {problem}" if problem else "SMOKE OK", flush=True)
    if problem:
        raise SystemExit(1)


def problem_in(losses: list[list[float]], norms: list[float], skipped: int) -> str | None:
    """Return why losses (one list a rank) and gradient norms are not those of an adapter that learns; None if they are."""
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
