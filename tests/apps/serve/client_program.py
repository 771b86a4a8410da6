"""Program with an unmodified Tinker client: trains on a server and writes the answers.

    python client_program.py JOB.json RESULT.json

JOB has the address, the key, the model's name, data and steps. Runs with clients from 0.16 on; imports nothing of megascend.
"""

import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # noqa: E402
from tinker import types  # noqa: E402


def result(value: Any) -> Any:
    """Return the result of a future, which older clients return directly."""
    return value.result() if hasattr(value, "result") else value


def datum(tokens: list[int], inputs: dict[str, Any]) -> types.Datum:
    if len(inputs["target_tokens"]) and isinstance(inputs["target_tokens"][0], list):
        import numpy as np

        kinds = {"target_tokens": np.int64}
        inputs = {
            name: types.TensorData.from_numpy(np.array(value, kinds.get(name, np.float32)))
            for name, value in inputs.items()
        }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def weighted(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    """Compute a custom loss whose gradient has both signs."""
    loss = sum(
        (value.square() * 0.01 + value * (0.2 if index % 2 else -0.3)).sum() for index, value in enumerate(logprobs)
    )
    return loss, {"samples": float(len(data))}


def step(client: Any, job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Send a forward_backward and an optimizer step before waiting for either."""
    adam = types.AdamParams(**settings["adam"])
    if settings["loss"] == "custom":
        output = client.forward_backward_custom(
            [datum(*row) for row in job["data"]["cross_entropy"]], weighted
        ).result()
        client.optim_step(adam).result()
    else:
        data = [datum(*row) for row in job["data"][settings.get("data", settings["loss"])]]
        forward_backward = client.forward_backward(data, settings["loss"], settings.get("config"))
        optim = client.optim_step(adam)
        output, _ = forward_backward.result(), optim.result()
    logprobs = [fields["logprobs"].data for fields in output.loss_fn_outputs]
    has_loss = (
        settings["loss"] != "custom" or "surrogate_loss:sum" in output.metrics
    )  # older ones give that one in its place
    loss = output.metrics["loss:sum"] if has_loss else None
    return {"loss": loss, "logprobs": [list(map(float, row)) for row in logprobs]}


def sampled(service: Any, client: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return responses of the current model and the base model, and the trainer's log-probabilities of the same tokens."""
    prompt = job["data"]["cross_entropy"][1][0]
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    text = types.ModelInput.from_ints(prompt)
    sampling = result(client.save_weights_and_get_sampling_client())
    responses = [sampling.sample(prompt=text, num_samples=2, sampling_params=params).result() for _ in range(2)]
    base_client = result(service.create_sampling_client(base_model=job["model"]))
    base = base_client.sample(prompt=text, num_samples=1, sampling_params=params).result().sequences[0]
    sequences = [prompt + list(map(int, row.tokens)) for row in responses[0].sequences]
    data = [datum(row[:-1], {"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}) for row in sequences]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return {
        "tokens": [[list(map(int, row.tokens)) for row in response.sequences] for response in responses],
        "logprobs": [list(map(float, row.logprobs)) for row in responses[0].sequences],
        "trainer": [list(map(float, output["logprobs"].data)) for output in outputs],
        "prompt": [None if v is None else float(v) for v in sampling.compute_logprobs(text).result()],
        "base": [list(map(int, base.tokens)), list(map(float, base.logprobs))],
    }


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    service = tinker.ServiceClient(base_url=job["url"], api_key=job["key"])
    client = result(service.create_lora_training_client(base_model=job["model"], rank=job["rank"], seed=1))
    answer: dict[str, Any] = {"version": tinker.__version__, "rank": client.get_info().lora_rank}
    answer["start"] = client.save_state("start").result().path
    answer["steps"] = [step(client, job, settings) for settings in job["steps"]]

    data = [datum(*row) for row in job["data"]["cross_entropy"]]
    answer["forward"] = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    path = client.save_state("end").result().path
    other = result(service.create_training_client_from_state_with_optimizer(path))
    answer["forward of the loaded"] = other.forward(data, "cross_entropy").result().metrics["loss:sum"]
    answer["both"] = [step(row, job, job["steps"][0]) for row in (client, other)]
    answer["sampler path"] = client.save_weights_for_sampler("for-sampling").result().path

    answer["sampled"] = sampled(service, client, job)

    bad = datum([1, 2, 3], {"target_tokens": [1, 2, job["vocabulary"]], "weights": [1.0] * 3})
    answer["failures"] = []
    for future in (client.forward_backward([bad], "cross_entropy"), client.optim_step(types.AdamParams())):
        try:
            future.result()
        except Exception as error:  # noqa: BLE001
            category = getattr(getattr(error, "category", None), "name", None)
            answer["failures"].append([type(error).__name__, str(category).lower(), str(error)])
    answer["after"] = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    rest = service.create_rest_client()
    answer["checkpoints"] = [
        checkpoint.tinker_path for checkpoint in rest.list_checkpoints(client.model_id).result().checkpoints
    ]
    rest.delete_checkpoint_from_tinker_path(path).result()
    answer["left"] = len(rest.list_checkpoints(client.model_id).result().checkpoints)
    with open(result_path, "w") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    os._exit(0)  # the client's threads wait for a minute otherwise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
