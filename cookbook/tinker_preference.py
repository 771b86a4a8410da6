"""Preferences against `megascend serve` with the Tinker client, unmodified: direct preference optimisation (DPO).

    bash cookbook/tinker_preference.sh                      # starts a server with a small model, then this
    python cookbook/tinker_preference.py --model NAME       # with TINKER_BASE_URL and TINKER_API_KEY of a server of yours

The loss is this program's own: `forward_backward_custom` hands it the log-probabilities that the server computed, and sends
the gradients of the loss with respect to them back. Rafailov et al. 2023, eq. 7; the reference is the model as it was.

The toy task: of two answers, digits are preferred to letters. The check at the end is on prompts that were not learned from.
"""

import argparse
import random

import tinker
import torch
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="what the server calls its model")
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=3e-3, help="for a small random model; 1e-5 for a real one")
parser.add_argument("--beta", type=float, default=0.1)
options = parser.parse_args()

PAIRS, LENGTH = 8, 4
chance = random.Random(0)
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=options.model, rank=options.rank, seed=0).result()
tokenizer = trainer.get_tokenizer()


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def pair() -> list[types.Datum]:
    """Draw the preferred and the rejected answer to a prompt."""
    prompt = encode("".join(chance.choices("abcdefgh ", k=8)) + ":")
    answers = [encode("".join(chance.choices(letters, k=LENGTH))) for letters in ("0123456789", "abcdefghij")]
    return [datum(prompt, answer) for answer in answers]


def datum(prompt: list[int], response: list[int]) -> types.Datum:
    tokens = prompt + response
    inputs = {"target_tokens": tokens[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(response)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def answer_logprob(answer: types.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probability of an answer: the weighted sum over its tokens."""
    return (logprobs * torch.tensor(answer.loss_fn_inputs["weights"].tolist())).sum()


def reference_of(data: list[types.Datum]) -> list[torch.Tensor]:
    """Log-probability of each answer now."""
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    return [answer_logprob(answer, out["logprobs"].to_torch()) for answer, out in zip(data, outputs, strict=True)]


def dpo(reference: list[torch.Tensor]):
    """Return the loss function for forward_backward_custom."""

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        margins = [
            answer_logprob(answer, values) - ref for answer, values, ref in zip(data, logprobs, reference, strict=True)
        ]
        # The data alternates: preferred, rejected.
        chosen, rejected = torch.stack(margins[0::2]), torch.stack(margins[1::2])
        logits = options.beta * (chosen - rejected)
        value = -torch.nn.functional.logsigmoid(logits).mean()
        return value, {"dpo": value.item(), "accuracy": (logits > 0).float().mean().item()}

    return loss


held_out = [answer for _ in range(PAIRS) for answer in pair()]
held_out_reference = reference_of(held_out)
train = [answer for _ in range(PAIRS) for answer in pair()]
# Before any step: the reference of DPO is the untrained model.
train_reference = reference_of(train)
losses = []
for step in range(options.steps):
    learned = trainer.forward_backward_custom(train, dpo(train_reference)).result().metrics
    trainer.optim_step(types.AdamParams(learning_rate=options.learning_rate)).result()
    losses.append(learned["dpo"])
    print(f"step {step:3d}  loss {losses[-1]:.4f}  accuracy {learned['accuracy']:.2f}", flush=True)

margins = [now - before for now, before in zip(reference_of(held_out), held_out_reference, strict=True)]
preferred = sum(bool(chosen > rejected) for chosen, rejected in zip(margins[0::2], margins[1::2], strict=True))
print(f"of {PAIRS} prompts that were not learned from, digits have gained on letters in {preferred}")
print(f"saved as {trainer.save_state('trained').result().path}")
# With a policy equal to the reference the first loss is log 2.
if abs(losses[0] - 0.6931) > 1e-3 or losses[-1] > 0.5 * losses[0] or preferred < PAIRS:
    raise SystemExit(f"the preference was not learned: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"learned: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
