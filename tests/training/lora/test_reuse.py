"""A thousand adapters are created, trained and removed: memory stays flat, and no state leaks into the next one."""

import gc

import psutil
import pytest
import torch

from megascend import Adam, Adapters, Batching, Lora, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint

ROUNDS, SETTLED = 1000, 200
RANKS = (1, 16, 3, 8, 2, 13)
TINY = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def resident_mib():
    return psutil.Process().memory_info().rss / 2**20


def live_tensors():
    gc.collect()
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_a_thousand_adapters_leave_nothing_behind(parity_folder, arch):
    experts = {"moe_intermediate_size": 16, "num_experts": 2} if arch == "qwen3_moe" else {}
    checkpoint = case_checkpoint(parity_folder, arch, **TINY, **experts)
    rounds = ROUNDS if arch == "qwen3" else ROUNDS // 5

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(
            checkpoint,
            precision="fp32",
            optimizer=Adam(lr=1e-2),
            batching=Batching(micro_batch_tokens=16),
            adapters=Adapters(max_count=2, max_rank=16),
            timeout_s=60,
        )
        backend.add_adapter("stays", Lora(rank=4))

        def batch(name):
            return [
                Sample([3, 4, 5], [4, 5, 6], [1.0] * 3, adapter=name),
                Sample([7, 8, 9, 3], [8, 9, 3, 4], [1.0] * 4, adapter="stays"),
            ]

        def life(name, lora, steps, mixed):
            """Add, train and remove an adapter; return its final state."""
            backend.add_adapter(name, lora)
            for _ in range(steps):
                backend.forward_backward(batch(name)[: 1 + mixed])
                if mixed:
                    backend.discard_gradients("stays")
                backend.optimizer_step(name)
            adapter = backend.adapters[name]
            state = [x.clone() for x in (adapter.values.detach(), *adapter.moments())]
            backend.remove_adapter(name)
            return state

        probe = Lora(rank=5, seed=9, targets=("q_proj", "down_proj"))
        first = [life("probe", probe, 3, mixed) for mixed in (False, True)]
        memory, tensors = [], []
        for number in range(rounds):
            if number in (rounds * SETTLED // ROUNDS, rounds - 2):  # after rounds of the same kind
                tensors.append(live_tensors())
                memory.append(resident_mib())
            life(f"tenant-{number}", Lora(rank=RANKS[number % len(RANKS)], seed=number), 1, bool(number % 2))
        last = [life("probe", probe, 3, mixed) for mixed in (False, True)]
        same = [
            torch.equal(*pair)
            for before, after in zip(first, last, strict=True)
            for pair in zip(before, after, strict=True)
        ]
        return memory, tensors, same, list(backend.adapters)

    memory, tensors, same, left = run_distributed(on_rank, 1, init=False, timeout_s=300)[0]
    assert left == ["stays"]
    assert tensors[1] == tensors[0]
    assert memory[1] - memory[0] < 4, memory
    assert same == [True] * 6
