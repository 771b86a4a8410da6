"""Train a small Hugging Face model on NPUs in one of the ways its users do, and hold each loss against the CPU's.

torchrun --nproc_per_node 2 train_hugging_face.py WAY MODEL    # WAY: a name of WAYS

The reference is a plain loop on the CPU in float32, one process, the whole batch. Every way sees the same batches,
divided over its ranks. Ends with a line "RESULT ok ..." or with an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

STEPS, LENGTH, PER_RANK = 6, 24, 2
RATE, ADAM_RATE = 1e-1, 1e-3
BOUNDS = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 5e-3}  # relative to the reference's loss


def load(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def batches(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = PER_RANK * int(os.environ["WORLD_SIZE"])
    tokens = [torch.randint(vocabulary, (rows, LENGTH), generator=generator) for _ in range(2)]
    return [tokens[step % 2] for step in range(STEPS)]


def own_rows(batch: Tensor) -> Tensor:
    rank = int(os.environ["RANK"])
    return batch[rank * PER_RANK : (rank + 1) * PER_RANK].to("npu")


def reference(path: str, adam: bool) -> list[float]:
    model = load(path)
    if adam:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=ADAM_RATE, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches(model.config.vocab_size):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(model: Any, optimizer: Any, rows: Iterable[Tensor], backward: Callable[[Tensor], Any]) -> list[float]:
    losses = []
    for batch in rows:
        loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def plainly(model: Any, vocabulary: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return train(model, optimizer, map(own_rows, batches(vocabulary)), Tensor.backward)


def join(path: str) -> Any:
    """Create the default group on hccl, and the model on this rank's device."""
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    dist.init_process_group("hccl")
    return load(path)


def ddp(path: str) -> list[float]:
    model = join(path).npu()
    return plainly(torch.nn.parallel.DistributedDataParallel(model), model.config.vocab_size)


def fsdp1(path: str) -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = join(path)
    device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    return plainly(FullyShardedDataParallel(model, device_id=device), model.config.vocab_size)


def fsdp2(path: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = join(path).npu()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return plainly(model, model.config.vocab_size)


def accelerate(precision: str) -> Callable[[str], list[float]]:
    def losses_of(path: str) -> list[float]:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision=precision)
        model = load(path)
        rows = [own_rows(batch) for batch in batches(model.config.vocab_size)]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        return train(model, optimizer, rows, accelerator.backward)

    return losses_of


def trainer(optimizer: str) -> Callable[[str], list[float]]:
    """Train six steps at once; then three steps, a new Trainer and the other three: the parameters must be equal."""

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def losses_of(path: str) -> list[float]:
        rows = torch.cat(batches(load(path).config.vocab_size))
        labels = rows.clone()
        labels[:, 0] = -100  # predicted by nothing, but the Trainer would divide the loss by it too
        samples = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]

        def run(name: str, steps: int, resume: bool = False) -> Trainer:
            settings = TrainingArguments(
                f"{os.environ['PROGRAM_FOLDER']}/{optimizer}-{name}",
                max_steps=steps,
                per_device_train_batch_size=PER_RANK,
                save_steps=STEPS // 2,
                optim=optimizer,
                lr_scheduler_type="constant",
                learning_rate=ADAM_RATE,
                max_grad_norm=0.0,
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            )
            runner = InOrder(load(path), settings, train_dataset=samples)  # type: ignore[arg-type]
            runner.train(resume_from_checkpoint=resume)
            return runner

        uninterrupted = run("whole", STEPS)
        run("parts", STEPS // 2)
        resumed = run("parts", STEPS, resume=True)
        assert resumed.model.device.type == "npu", f"the Trainer chose {resumed.model.device}"
        for (name, parameter), other in zip(
            uninterrupted.model.named_parameters(), resumed.model.parameters(), strict=True
        ):
            assert torch.equal(parameter, other), f"{name} differs between a run at once and a resumed one"
        return [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]

    return losses_of


WAYS: dict[str, tuple[Callable[[str], list[float]], str]] = {
    "ddp": (ddp, "fp32"),
    "fsdp1": (fsdp1, "fp32"),
    "fsdp2": (fsdp2, "fp32"),
    "accelerate_fp32": (accelerate("no"), "fp32"),
    "accelerate_bf16": (accelerate("bf16"), "bf16"),
    "accelerate_fp16": (accelerate("fp16"), "fp16"),
    "trainer": (trainer("adamw_torch"), "fp32"),
    "trainer_npu_fused": (trainer("adamw_torch_npu_fused"), "fp32"),
}


def main() -> None:
    name, path = sys.argv[1:]
    method, precision = WAYS[name]
    losses = method(path)
    expected = reference(path, adam=name.startswith("trainer"))
    difference = max(abs(loss - want) / want for loss, want in zip(losses, expected, strict=True))
    if difference > BOUNDS[precision]:
        raise AssertionError(f"{name}: losses {losses}, on the CPU {expected}: {difference:.1e} apart, relative")
    if os.environ["RANK"] == "0":
        print(f"RESULT ok loss {losses[0]:.4f} -> {losses[-1]:.4f}, {difference:.1e} from the CPU's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
