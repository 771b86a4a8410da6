"""Load-balancing losses and correction biases: by their own definitions, in every layout, over real tokens only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megascend import Adam, Batching, Moe, Parallel, Recompute
from megascend.testing import run_distributed
from megascend.testing.parity import LR, PROMPT, case_checkpoint, causal_samples, hf_reference, token_lists
from megascend.testing.reference import run_reference
from megascend.training.batch.packing import plan_micro_batches, shard, split_to

pytestmark = pytest.mark.usefixtures("megatron_imported")

ODD = (20, 34, 9, 27, 17, 40, 26, 11)  # tokens run: 19, 33, 8...: padding under CP and SP, packed and padded
COEFFICIENT = 0.5  # moves the gradient norm of the first step by more than 1e-2
STEPS = 3
ALL_TOKENS = 4096
LAYOUTS = {
    "TP2 + SP, ETP2": (2, Parallel(tensor=2)),
    "CP2": (2, Parallel(context=2)),
    "EP2": (2, Parallel(expert=2)),
}
FORMULAS = ("megatron", "transformers")


def backend_of(checkpoint: Path, parallel: Parallel, moe: Moe, **options):
    from megascend.backends import MegatronBackend

    batching = Batching(packing=options.pop("packing", True), micro_batch_tokens=options.pop("budget", ALL_TOKENS))
    optimizer = options.pop("optimizer", Adam(lr=LR, weight_decay=0.01, max_grad_norm=1.0))
    settings = {"precision": "fp32", "timeout_s": 60, "self_check": False} | options
    return MegatronBackend(checkpoint, parallel, batching=batching, optimizer=optimizer, moe=moe, **settings)


def trajectory(backend, samples, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for _ in range(steps):
        losses.append(backend.forward_backward(samples).loss)
        norms.append(backend.optimizer_step().grad_norm)
    return losses, norms


# --- the formulas ---


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_gradients_are_those_of_the_definitions(function):
    """Compare with the two losses written out in float64, differentiated by autograd down to the router's logits."""
    from megascend.engines.common.load_balancing import gradients, scores

    layers, tokens, experts, top_k = 3, 11, 5, 2
    logits = torch.randn(layers, tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    raw = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
    probabilities = raw / raw.sum(-1, keepdim=True)
    chosen = torch.zeros_like(probabilities).scatter(2, probabilities.topk(top_k).indices, 1.0).detach()
    by_layer = [
        sum(chosen[layer, :, e].mean() / top_k * probabilities[layer, :, e].mean() for e in range(experts))
        for layer in range(layers)
    ]
    pooled = sum(chosen[:, :, e].mean() * probabilities[:, :, e].mean() for e in range(experts))
    expected = {"megatron": experts * sum(by_layer), "transformers": experts * pooled}
    for formula, loss in expected.items():
        (reference,) = torch.autograd.grad(loss, logits, retain_graph=True)
        router_logits = logits.detach().float().requires_grad_()
        rows = gradients(formula, chosen.sum(1).float(), tokens, top_k)
        scores(router_logits, function).backward(rows[:, None].expand(-1, tokens, -1))
        torch.testing.assert_close(router_logits.grad.double(), reference, rtol=1e-5, atol=1e-8)


# --- training ---


@pytest.mark.nightly_cases(
    "CP2",  # covered: EP2
    "TP2 + SP, ETP2",  # covered: EP2; the count of tokens: bias moves, TP2 + SP
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_losses_are_the_references_in_every_layout(parity_folder, layout):
    """Compare losses and gradient norms of three steps, packed and padded, with samples of odd lengths."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    world_size, parallel = LAYOUTS[layout]
    tokens = token_lists(lengths=ODD)
    samples = causal_samples(tokens)
    data = world_size // (parallel.tensor * parallel.context)
    groups = shard([len(sample) for sample in samples], [None] * len(samples), data)

    def on_rank():
        results = {}
        for formula in FORMULAS:
            for packing in (True, False):
                moe = Moe(aux_loss=formula, aux_loss_coefficient=COEFFICIENT)
                backend = backend_of(checkpoint, parallel, moe, packing=packing)
                results[formula, packing] = trajectory(backend, backend.shard(samples))
                backend.close()
        return results

    norms = {}
    for formula in FORMULAS:
        norms[formula] = hf_reference(
            parity_folder, checkpoint, tokens, STEPS, COEFFICIENT, aux_formula=formula, micro_batches=groups
        )
    for results in run_distributed(on_rank, world_size, init=False, timeout_s=120):
        for (formula, packing), (losses, grad_norms) in results.items():
            assert losses == pytest.approx(norms[formula].losses, abs=5e-5), (formula, packing)
            assert grad_norms == pytest.approx(norms[formula].grad_norms, abs=3e-4), (formula, packing)


PADDED = """
import json, sys, torch
from transformers import AutoModelForCausalLM

checkpoint, tokens, prompt, coefficient = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
length = max(map(len, tokens)) - 1
ids = torch.tensor([row[:-1] + [7] * (length + 1 - len(row)) for row in tokens])
mask = torch.tensor([[1] * (len(row) - 1) + [0] * (length + 1 - len(row)) for row in tokens])
out = model(ids, attention_mask=mask, output_router_logits=True)
logprobs = out.logits.log_softmax(-1)
terms = [logprobs[i, prompt - 1 : len(row) - 1].gather(1, torch.tensor(row[prompt:])[:, None]) for i, row in enumerate(tokens)]
loss = -torch.cat(terms).mean()
(loss + coefficient * out.aux_loss).backward()
print(float(loss), float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
"""


def test_aux_loss_of_a_padded_batch_matches_transformers(parity_folder):
    """Compare with the loss that the Hugging Face model returns for a padded batch and its mask."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    tokens = token_lists(lengths=ODD)
    completed = run_reference(PADDED, json.dumps([str(checkpoint), tokens, PROMPT, COEFFICIENT]))
    assert completed.returncode == 0, completed.stderr
    loss, norm = map(float, completed.stdout.split())

    def on_rank():
        moe = Moe(aux_loss="transformers", aux_loss_coefficient=COEFFICIENT)
        return trajectory(backend_of(checkpoint, Parallel(), moe, packing=False), causal_samples(tokens), steps=1)

    [(losses, norms)] = run_distributed(on_rank, 1, init=False)
    assert losses[0] == pytest.approx(loss, abs=5e-5)
    assert norms[0] == pytest.approx(norm, abs=3e-4)


def test_aux_loss_with_pipelines_and_recomputation(parity_folder):
    """Keep several micro batches with different padding in flight; recomputed routers are not counted twice."""
    parallel, recompute = Parallel(pipeline=2, virtual_pipeline=2), Recompute(granularity="full")
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    tokens = token_lists(lengths=ODD)
    samples = causal_samples(tokens)
    lengths, pairs = [len(sample) for sample in samples], [None] * len(samples)
    # As the interleaved schedule needs it.
    groups = split_to(plan_micro_batches(lengths, pairs, 80, False), 4, lengths, pairs)

    def on_rank():
        moe = Moe(aux_loss="megatron", aux_loss_coefficient=COEFFICIENT)
        backend = backend_of(checkpoint, parallel, moe, packing=False, budget=80, recompute=recompute)
        return trajectory(backend, samples)

    reference = hf_reference(
        parity_folder, checkpoint, tokens, STEPS, COEFFICIENT, aux_formula="megatron", micro_batches=groups
    )
    for losses, norms in run_distributed(on_rank, 2, init=False, timeout_s=120):
        assert losses == pytest.approx(reference.losses, abs=5e-5)
        assert norms == pytest.approx(reference.grad_norms, abs=3e-4)


def test_dummy_batches_count_nowhere(parity_folder):
    """Average three samples in three micro batches on two ranks over three: the fourth is a dummy."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    tokens = token_lists(lengths=(40, 34, 27))
    samples = causal_samples(tokens)

    def on_rank():
        moe = Moe(aux_loss="transformers", aux_loss_coefficient=COEFFICIENT)
        backend = backend_of(checkpoint, Parallel(expert=2), moe, budget=40)
        return trajectory(backend, samples[:2] if backend.rank == 0 else samples[2:])

    reference = hf_reference(
        parity_folder, checkpoint, tokens, STEPS, COEFFICIENT, aux_formula="transformers", micro_batches=[[0], [1], [2]]
    )
    for losses, norms in run_distributed(on_rank, 2, init=False):
        assert losses == pytest.approx(reference.losses, abs=5e-5)
        assert norms == pytest.approx(reference.grad_norms, abs=3e-4)


def test_fp16_scales_the_loss_with_the_rest(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    samples = causal_samples(token_lists(lengths=ODD))

    def on_rank():
        moe = Moe(aux_loss="transformers", aux_loss_coefficient=COEFFICIENT)
        return trajectory(backend_of(checkpoint, Parallel(), moe, precision="fp16"), samples, steps=1)

    [(_, norms)] = run_distributed(on_rank, 1, init=False)
    reference = hf_reference(
        parity_folder, checkpoint, token_lists(lengths=ODD), STEPS, COEFFICIENT, aux_formula="transformers"
    )
    assert norms[0] == pytest.approx(reference.grad_norms[0], abs=1e-2)


# --- the correction bias, and other state that a step could change ---


def state(backend) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of this rank's model, including temporary ones."""
    tensors_by_name = {}
    for number, chunk in enumerate(backend.engine.bare_chunks):
        tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
        tensors_by_name |= {f"{number}.{name}": tensor.detach().clone() for name, tensor in tensors}
    return tensors_by_name


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("arch", ["qwen3_moe", "glm4_moe"])
def test_a_skipped_step_and_one_at_lr_0_change_nothing(parity_folder, arch):
    checkpoint = case_checkpoint(parity_folder, arch)
    samples = causal_samples(token_lists())
    frozen = Adam(lr=0.0)

    def on_rank():
        backend = backend_of(checkpoint, Parallel(), Moe(), optimizer=frozen)
        before = state(backend)
        backend.forward(samples)
        changes = [changed(before, state(backend))]
        backend.forward_backward(samples)
        assert not backend.optimizer_step().skipped
        changes.append(changed(before, state(backend)))
        backend.close()
        rate = {"bias_update_rate": 1e-3} if arch == "glm4_moe" else {}
        backend = backend_of(checkpoint, Parallel(), Moe(**rate))
        backend.forward_backward(samples)
        backend.optimizer_step()
        before = state(backend)
        backend.forward_backward(samples, lambda logprobs, inputs: logprobs * math.nan)
        assert backend.optimizer_step().skipped
        return [*changes, changed(before, state(backend))]

    assert run_distributed(on_rank, 1, init=False) == [[[], [], []]]


BIAS = """
import json, sys, torch
from transformers import AutoModelForCausalLM

checkpoint, tokens = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
found = {}
for name, module in model.named_modules():
    if hasattr(module, "e_score_correction_bias"):
        def hook(module, inputs, output, name=name):
            with torch.no_grad():
                x = inputs[0].reshape(-1, module.weight.shape[1]).float()
                choice = (x @ module.weight.float().T).sigmoid() + module.e_score_correction_bias
                counts = found.setdefault(name, torch.zeros(choice.shape[1]))
                counts += torch.bincount(choice.topk(2).indices.flatten(), minlength=choice.shape[1])
        module.register_forward_hook(hook)
for row in tokens:
    with torch.no_grad():
        model(torch.tensor([row[:-1]]))
print(json.dumps([found[name].tolist() for name in found]))
"""


@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(expert=2)], ids=["TP2 + SP", "EP2"])
def test_the_bias_moves_by_the_load_of_all_ranks_real_tokens(parity_folder, parallel):
    """Compare with the load of the Hugging Face model's routers for every sample separately."""
    checkpoint = case_checkpoint(parity_folder, "glm4_moe")
    tokens = token_lists(lengths=(20, 34, 9))
    completed = run_reference(BIAS, json.dumps([str(checkpoint), tokens]))
    assert completed.returncode == 0, completed.stderr
    loads = json.loads(completed.stdout.splitlines()[-1])
    expected = [[0.25 * math.copysign(load != sum(row) / 4, sum(row) / 4 - load) for load in row] for row in loads]
    samples = causal_samples(tokens)

    def on_rank():
        optimizer = Adam(lr=0.0)
        backend = backend_of(
            checkpoint, parallel, Moe(bias_update_rate=0.25), optimizer=optimizer, packing=False, budget=40
        )
        shard = samples if backend.topology.data == 1 else (samples[:2], samples[2:])[backend.rank]  # and a dummy batch
        moved = []
        for times in (1, 2):  # accumulated over calls
            before = state(backend)
            for _ in range(times):
                backend.forward(shard)
                backend.forward_backward(shard)
            backend.optimizer_step()
            after = state(backend)
            moved.append([(after[n] - before[n]).tolist() for n in before if n.endswith("expert_bias")])
            for name in before:
                if name.endswith("expert_bias"):
                    dict(backend.engine.bare_chunks[0].named_buffers())[name[2:]].copy_(before[name])
        return moved

    for first, second in run_distributed(on_rank, 2, init=False):
        assert torch.allclose(torch.tensor(first), torch.tensor(expected))
        assert torch.allclose(torch.tensor(second), torch.tensor(expected))


def test_the_bias_survives_16_bits_and_a_checkpoint(parity_folder, tmp_path):
    """Keep fp32 in every precision, and save and load the trained bias."""
    checkpoint = case_checkpoint(parity_folder, "glm4_moe")
    samples = causal_samples(token_lists())

    def biases(backend):
        return {name: value for name, value in state(backend).items() if name.endswith("expert_bias")}

    def on_rank():
        backend = backend_of(checkpoint, Parallel(), Moe(bias_update_rate=1e-3), precision="bf16")
        first = biases(backend)
        backend.forward_backward(samples)
        backend.optimizer_step()
        trained = biases(backend)
        backend.save(tmp_path / "checkpoint", wait=True)
        backend.close()
        backend = backend_of(checkpoint, Parallel(), Moe(bias_update_rate=1e-3), precision="bf16")
        backend.load(tmp_path / "checkpoint")
        loaded = biases(backend)
        return first, trained, loaded

    from safetensors.torch import load_file

    [(first, trained, loaded)] = run_distributed(on_rank, 1, init=False)
    source = [
        v for k, v in sorted(load_file(checkpoint / "model.safetensors").items()) if k.endswith("correction_bias")
    ]
    assert [bias.tolist() for bias in first.values()] == [bias.tolist() for bias in source]
    assert len(changed(first, trained)) == len(first) == 3
    assert changed(trained, loaded) == []
