"""Reinforcement learning against `megascend serve` with the Tinker client, unmodified: sample, grade, learn, repeat.

    bash cookbook/tinker_rl.sh                      # starts a server with a small model, then this
    python cookbook/tinker_rl.py --model NAME       # with TINKER_BASE_URL and TINKER_API_KEY of a server of yours

The toy task: answer with tokens below 100. Rewards are the share of such tokens; advantages are centred within a prompt's
responses.
"""

import argparse
import random

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="what the server calls its model")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--vocabulary", type=int, default=256)
options = parser.parse_args()

PROMPTS, RESPONSES, LENGTH, LOW = 4, 8, 6, 100
chance = random.Random(0)
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=options.model, rank=options.rank, seed=0).result()


def reward_of(tokens: list[int]) -> float:
    return sum(token < LOW for token in tokens) / len(tokens)


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """Build a datum with targets shifted by one; the prompt's targets have advantage 0, so that nothing is learned there."""
    before = len(prompt) - 1
    sequence = prompt + tokens
    inputs = {
        "target_tokens": sequence[1:],
        # Placeholders: with advantage 0 the prompt's tokens have no effect, whatever their log-probabilities.
        "logprobs": [0.0] * before + logprobs,
        "advantages": [0.0] * before + [advantage] * len(tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(sequence[:-1]), loss_fn_inputs=inputs)


rewards = []
for step in range(options.steps):
    # On-policy: every step samples from the weights of the step before.
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompts = [[chance.randrange(3, options.vocabulary) for _ in range(8)] for _ in range(PROMPTS)]
    params = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=step)
    answers = [sampler.sample(types.ModelInput.from_ints(p), RESPONSES, params) for p in prompts]
    data, graded = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        responses = [(list(response.tokens), list(response.logprobs or ())) for response in answer.result().sequences]
        group_rewards = [reward_of(tokens) for tokens, _ in responses]
        mean = sum(group_rewards) / len(group_rewards)
        data += [
            datum(prompt, *response, reward - mean) for response, reward in zip(responses, group_rewards, strict=True)
        ]
        graded += group_rewards
    rewards.append(sum(graded) / len(graded))
    learned = trainer.forward_backward(data, "importance_sampling")
    # Sent before the first result is awaited, so that the server need not wait for this client in between.
    stepped = trainer.optim_step(types.AdamParams(learning_rate=options.learning_rate))
    learned.result()
    metrics = stepped.result().metrics or {}
    print(f"step {step:3d}  reward {rewards[-1]:.3f}  gradient {metrics['grad_norm']:.3f}", flush=True)

first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
print(f"reward of the first three steps {first:.3f}, of the last three {last:.3f}")
print(f"saved as {trainer.save_state('trained').result().path}")
if last <= first:
    raise SystemExit("the reward has not risen")
