"""Program with two tenants that train and sample through vLLM: ``serve_client.py JOB.json RESULT.json``."""

import json
import os
import sys
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types


def datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def trained(job: dict[str, Any], name: str) -> Any:
    """Return a tenant's service and training client after some steps."""
    service = tinker.ServiceClient(base_url=job["url"], api_key=job["keys"][name])
    client = service.create_lora_training_client(base_model=job["model"], rank=job["ranks"][name], seed=1).result()
    for _ in range(job["steps"]):
        client.forward_backward([datum(job["texts"][name])], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return service, client


def sequences(answer: Any) -> list[Any]:
    return [
        [list(map(int, sequence.tokens)), list(map(float, sequence.logprobs)), str(sequence.stop_reason)]
        for sequence in answer.sequences
    ]


def sampled(client: Any, job: dict[str, Any], name: str) -> dict[str, Any]:
    """Sample from a tenant's model and compute the trainer's log-probabilities of the responses."""
    prompt = job["texts"][name][:8]
    text = types.ModelInput.from_ints(prompt)
    sampling = client.save_weights_and_get_sampling_client().result()
    warm = types.SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, top_k=50, seed=5)
    answers = [sampling.sample(prompt=text, num_samples=3, sampling_params=warm).result() for _ in range(2)]
    texts = [prompt + tokens for tokens, _, _ in sequences(answers[0])]
    outputs = client.forward([datum(tokens) for tokens in texts], "cross_entropy").result().loss_fn_outputs
    greedy = types.SamplingParams(max_tokens=24, temperature=0.0)
    plain = sequences(sampling.sample(prompt=text, num_samples=1, sampling_params=greedy).result())[0]
    stop = types.SamplingParams(max_tokens=24, temperature=0.0, stop=[plain[0][2]])
    ending = bytes(plain[0][3:6]).decode()
    word = types.SamplingParams(max_tokens=24, temperature=0.0, stop=[ending])
    return {
        "responses": [sequences(answer) for answer in answers],
        "trainer": [list(map(float, output["logprobs"].data)) for output in outputs],
        "greedy": plain,
        "ending": ending,
        "stopped by a token": sequences(sampling.sample(prompt=text, num_samples=1, sampling_params=stop).result())[0],
        "stopped by a text": sequences(sampling.sample(prompt=text, num_samples=1, sampling_params=word).result())[0],
        "prompt": [None if v is None else float(v) for v in sampling.compute_logprobs(text).result()],
    }


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    clients = {name: trained(job, name) for name in job["keys"]}
    answer: dict[str, Any] = {name: sampled(client, job, name) for name, (_, client) in clients.items()}
    service = clients["alice"][0]
    text = types.ModelInput.from_ints(job["texts"]["alice"][:8])
    base = service.create_sampling_client(base_model=job["model"]).result()
    untrained = service.create_lora_training_client(base_model=job["model"], rank=1).result()  # changes nothing yet
    outputs = untrained.forward([datum(job["texts"]["alice"][:8])], "cross_entropy").result().loss_fn_outputs
    answer["base of the trainer"] = list(map(float, outputs[0]["logprobs"].data))
    try:
        answer["base"] = [None if v is None else float(v) for v in base.compute_logprobs(text).result()]
    except Exception as error:  # noqa: BLE001
        answer["no base"] = str(error)
    long = types.SamplingParams(max_tokens=100_000, temperature=1.0)
    try:
        base.sample(prompt=text, num_samples=1, sampling_params=long).result()
    except Exception as error:  # noqa: BLE001
        answer["refused"] = str(error)
    with open(result_path, "w") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    os._exit(0)  # the client's threads wait for a minute otherwise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
