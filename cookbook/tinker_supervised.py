"""Supervised learning against `megascend serve` with the Tinker client, unmodified: learn answers, and ask for them.

    bash cookbook/tinker_supervised.sh                      # starts a server with a small model, then this
    python cookbook/tinker_supervised.py --model NAME       # with TINKER_BASE_URL and TINKER_API_KEY of a server of yours

The loss is on the answers alone. At the end the model is asked for every answer; one that is wrong is exit code 1.
"""

import argparse

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="what the server calls its model")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--learning-rate", type=float, default=1e-2, help="for a small random model; 2e-4 for a real one")
options = parser.parse_args()

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Cuba": "Havana"}
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=options.model, rank=options.rank, seed=0).result()
tokenizer = trainer.get_tokenizer()


def question(country: str) -> list[int]:
    return tokenizer.encode(f"{country}:", add_special_tokens=False)


def answer(city: str) -> list[int]:
    return tokenizer.encode(f" {city}.", add_special_tokens=False)


def datum(prompt: list[int], response: list[int]) -> types.Datum:
    """Build a datum with targets shifted by one; the prompt's targets have weight 0, so that nothing is learned there."""
    sequence = prompt + response
    inputs = {"target_tokens": sequence[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(response)}
    return types.Datum(model_input=types.ModelInput.from_ints(sequence[:-1]), loss_fn_inputs=inputs)


data = [datum(question(country), answer(city)) for country, city in CAPITALS.items()]
tokens = sum(len(answer(city)) for city in CAPITALS.values())
losses = []
for step in range(options.steps):
    rate = options.learning_rate * (1 - step / options.steps)
    learned = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=rate))  # sent before the first is waited for
    losses.append(learned.result().metrics["loss:sum"] / tokens)  # the server sums over tokens
    norm = (stepped.result().metrics or {})["grad_norm"]
    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step:3d}  loss {losses[-1]:.4f}  gradient {norm:.3f}", flush=True)

sampler = trainer.save_weights_and_get_sampling_client().result()
wrong = 0
for country, city in CAPITALS.items():
    params = types.SamplingParams(max_tokens=len(answer(city)), temperature=0.0)
    output = sampler.sample(types.ModelInput.from_ints(question(country)), 1, params).result().sequences[0]
    text = tokenizer.decode(list(output.tokens))
    wrong += text != f" {city}."
    print(f"{country}:{text}")
print(f"saved as {trainer.save_state('trained').result().path}")
if wrong or losses[-1] > 0.1 * losses[0]:
    raise SystemExit(f"{wrong} answers are wrong; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"learned: loss {losses[0]:.4f} -> {losses[-1]:.4f}, all answers are right")
