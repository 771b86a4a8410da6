"""The independent reference of a client's training with images: transformers, peft and torch's AdamW. Imports no megascend.

    python image_reference.py JOB.json ADAPTER RESULT.json

JOB as for image_client.py; ADAPTER is the directory of the adapter that the client began with.
"""

import base64
import io
import json
import sys
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def inputs_of(
    text: list[int], job: dict[str, Any], processor: Any
) -> tuple[dict[str, torch.Tensor], list[int], list[float]]:
    """Return the model's inputs, all token ids with 0 for those of images, and their weights."""
    ids, targets, weights, images = [], [], [], []
    for number in text:
        is_text = number >= len(job["images"])
        count = 1 if is_text else job["features"][number]
        ids += [number if is_text else job["token"]] * count
        targets += [number if is_text else 0] * count
        weights += [float(is_text)] * count
        if not is_text:
            images.append(Image.open(io.BytesIO(base64.b64decode(job["images"][number]))).convert("RGB"))
    row = torch.tensor(ids)[None]
    inputs: dict[str, torch.Tensor] = {"input_ids": row, "mm_token_type_ids": (row == job["token"]).int()}
    if images:
        outputs = processor(images=images, return_tensors="pt")
        inputs |= {"pixel_values": outputs["pixel_values"], "image_grid_thw": outputs["image_grid_thw"]}
    return inputs, targets, weights


def logprobs_of(model: Any, inputs: dict[str, torch.Tensor], targets: list[int]) -> torch.Tensor:
    logits = model(**inputs).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(1, torch.tensor(targets[1:])[:, None])[:, 0]


def main(job_path: str, adapter: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path) as file:
        job = json.load(file)
    base = AutoModelForImageTextToText.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    processor = AutoImageProcessor.from_pretrained(job["model"])
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=job["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    data = [inputs_of(text, job, processor) for text in job["texts"]]
    answers = []
    for _ in range(job["steps"]):
        logprobs = [logprobs_of(model, inputs, targets) for inputs, targets, _ in data]
        terms = [(v * torch.tensor(weights[1:])).sum() for v, (_, _, weights) in zip(logprobs, data, strict=True)]
        loss = -torch.stack(terms).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        answers.append({"loss": float(loss), "logprobs": [v.detach().tolist() for v in logprobs]})
    model.eval()
    inputs, targets, _ = data[0]
    ids = [
        job["token"] if kind else number for number, kind in zip(targets, inputs["mm_token_type_ids"][0], strict=True)
    ]
    with torch.no_grad():
        prompt = logprobs_of(model, inputs, ids).tolist()
        output = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=False, eos_token_id=-1)
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        row = torch.cat([inputs["input_ids"], torch.tensor(tokens)[None]], dim=1)
        complete = inputs | {"input_ids": row, "mm_token_type_ids": (row == job["token"]).int()}
        sampled = logprobs_of(model, complete, row[0].tolist())[-len(tokens) :].tolist()
    with open(result_path, "w") as file:
        json.dump({"steps": answers, "prompt": prompt, "sampled": {"tokens": tokens, "logprobs": sampled}}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
