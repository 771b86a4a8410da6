"""Program with an unmodified Tinker client: trains and samples with images, and writes the answers.

    python image_client.py JOB.json RESULT.json

In JOB's ``texts`` the numbers below that of its ``images`` stand for them.
"""

import base64
import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # noqa: E402
from tinker import types  # noqa: E402


def model_input(text: list[int], job: dict[str, Any]) -> types.ModelInput:
    chunks: list[Any] = []
    for number in text:
        if number < len(job["images"]):
            content, features = base64.b64decode(job["images"][number]), job["features"][number]
            chunks.append(types.ImageChunk(data=content, format="png", expected_tokens=features))
        elif chunks and isinstance(chunks[-1], types.EncodedTextChunk):
            chunks[-1] = types.EncodedTextChunk(tokens=[*chunks[-1].tokens, number])
        else:
            chunks.append(types.EncodedTextChunk(tokens=[number]))
    return types.ModelInput(chunks=chunks)


def datum(text: list[int], job: dict[str, Any]) -> types.Datum:
    """Return a sample of next tokens; targets of images are 0, with weight 0, as the Tinker cookbook writes them."""
    ids: list[int] = []
    weights: list[float] = []
    for number in text:
        count = job["features"][number] if number < len(job["images"]) else 1
        is_text = number >= len(job["images"])
        ids += [number if is_text else 0] * count
        weights += [float(is_text)] * count
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": weights[1:]}
    return types.Datum(model_input=model_input(text[:-1], job), loss_fn_inputs=inputs)


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    service = tinker.ServiceClient(base_url=job["url"], api_key=job["key"])
    client = service.create_lora_training_client(base_model=job["model"], rank=4, seed=1)
    answer: dict[str, Any] = {"start": client.save_state("start").result().path, "steps": []}
    data = [datum(text, job) for text in job["texts"]]
    for _ in range(job["steps"]):
        forward_backward = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=job["lr"], eps=1e-8))
        output, _ = forward_backward.result(), step.result()
        logprobs = [list(map(float, fields["logprobs"].data)) for fields in output.loss_fn_outputs]
        answer["steps"].append({"loss": output.metrics["loss:sum"], "logprobs": logprobs})
    prompt = model_input(job["texts"][0], job)
    sampling = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    [row] = sampling.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
    answer["sampled"] = {"tokens": list(map(int, row.tokens)), "logprobs": list(map(float, row.logprobs or []))}
    answer["prompt"] = [None if v is None else float(v) for v in sampling.compute_logprobs(prompt).result()]
    with open(result_path, "w") as file:
        json.dump(answer, file)
    sys.stdout.flush()
    os._exit(0)  # the client's threads wait for a minute otherwise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
