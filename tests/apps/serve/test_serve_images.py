"""Images in requests: read as the real client writes them, refused by field, trained and sampled as transformers does."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recording_backend import Served
from serve_ranks import KEYS, service, write_json

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.apps.data.images import ImageProcessor
from megascend.apps.serve.api.wire import (
    TrainRequest,
    json_of_train_request,
    train_request_of_json,
    train_request_of_protobuf,
)
from megascend.apps.serve.checkpoints import CheckpointPath
from megascend.apps.serve.samplers.messages import prompt_of
from megascend.apps.serve.samples import loss_of, samples_of
from megascend.config.serve import RequestImages, ServeConfig
from megascend.errors import DataError
from megascend.testing.reference import run_reference
from megascend.training.batch.image_sources import ImageSources
from support.forked_programs import environment, run_forked

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny Qwen3-VL with its processor."""
    path = tmp_path_factory.mktemp("models") / "qwen3_vl"
    write_checkpoint(path, ModelSize(arch="qwen3_vl", hidden=32, layers=2))
    return path


@pytest.fixture(scope="module")
def processor(model: Path) -> ImageProcessor:
    processor = ImageProcessor.for_model(model, RequestImages())
    assert processor is not None
    return processor


def image(seed: int = 0, size: tuple[int, int] = (48, 32), kind: str = "PNG", **options: Any) -> bytes:
    """Return a file of noise (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def image_chunk(content: bytes, kind: str = "png", **values: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(content).decode(), "format": kind, **values}


def request(
    *chunks: dict[str, Any], length: int, image_processor: ImageProcessor | None, **inputs: Any
) -> TrainRequest:
    """Read a forward_backward of one sample in JSON; ``length``: of its targets."""
    tensors = {"target_tokens": [*range(1, length + 1)], **inputs}
    datum = {
        "model_input": {"chunks": list(chunks)},
        "loss_fn_inputs": {
            name: {"data": values, "dtype": "int64" if name == "target_tokens" else "float32"}
            for name, values in tensors.items()
        },
    }
    inside = {"data": [datum], "loss_fn": "cross_entropy"}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": inside}
    return train_request_of_json(body, 10, image_processor, forward_only=False)


TEXT = {"type": "encoded_text", "tokens": [5, 6]}
# 48 x 32 pixels, a patch of 8, four patches a feature.
FEATURES = 6


def test_images_become_tokens_and_images(model: Path, processor: ImageProcessor) -> None:
    contents = [image(0), image(1, (32, 64), "JPEG")]
    chunks = (TEXT, image_chunk(contents[0]), TEXT, image_chunk(contents[1], "jpeg", expected_tokens=8), TEXT)
    read = request(*chunks, length=20, image_processor=processor)
    assert read.problem is None
    [datum] = read.data
    token = processor.layout.token
    assert datum.tokens.tolist() == [5, 6, *[token] * FEATURES, 5, 6, *[token] * 8, 5, 6]
    [sample] = samples_of(datum, loss_of("cross_entropy", {}))
    assert isinstance(sample.images, ImageSources)
    # The tokens before those of an image predict them, and are not learned.
    assert sample.weights.tolist() == [1.0, *[0.0] * FEATURES, 1.0, 1.0, *[0.0] * 8, 1.0, 1.0, 1.0][: len(datum.tokens)]
    images = processor.deferred(sample.images)
    assert images.grids.tolist() == [[1, 4, 6], [1, 8, 4]]
    files = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
    from transformers import AutoImageProcessor

    expected = AutoImageProcessor.from_pretrained(model)(images=files, return_tensors="pt")
    assert torch.equal(images.pixel_values, expected["pixel_values"])
    assert images.patch_width == expected["pixel_values"].shape[1]


def test_the_clients_messages_are_read_alike(processor: ImageProcessor) -> None:
    tinker = pytest.importorskip("tinker", reason="the client needs Python 3.11")
    conversion = pytest.importorskip("tinker.proto.request_conv", reason="older clients send JSON")
    types, content = tinker.types, image(2, kind="JPEG")
    chunks = [
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=content, format="jpeg", expected_tokens=FEATURES),
        types.EncodedTextChunk(tokens=[3]),
    ]
    model_input = types.ModelInput(chunks=chunks)
    targets = [0] * (2 + FEATURES) + [4]
    weights = [0.0] * (2 + FEATURES) + [1.0]
    datum = types.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )
    assert model_input.length == len(targets)
    inside = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    message_fields = types.ForwardBackwardRequest(forward_backward_input=inside, model_id="m", seq_id=1)
    message = conversion.forward_backward_request_to_proto(message_fields).SerializeToString()
    by_protobuf = train_request_of_protobuf(message, 10, processor)
    dumped = [chunk.model_dump(mode="json") for chunk in chunks]
    by_json = request(*dumped, length=len(targets), image_processor=processor, weights=weights)
    reread = train_request_of_json(
        json.loads(json.dumps(json_of_train_request(by_protobuf))), 10, processor, forward_only=False
    )
    for read in (by_protobuf, by_json, reread):
        assert read.problem is None
        [datum_read] = read.data
        assert datum_read.tokens.tolist() == [1, 2, *[processor.layout.token] * FEATURES, 3]
        assert [(item.start, item.tokens, item.grid, item.chunk.data) for item in datum_read.images] == [
            (2, FEATURES, (1, 4, 6), content)
        ]
        assert datum_read.inputs["weights"].tolist() == weights


GOOD = image_chunk(image())
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "cut off": (lambda: image_chunk(image()[:700]), "is damaged"),
    "of another format": (lambda: image_chunk(image(kind="JPEG")), "is in none of the formats PNG, or damaged"),
    "of an unknown format": (
        lambda: image_chunk(image(kind="GIF"), "gif"),
        "format 'gif'; this server takes png and jpeg",
    ),
    "heavy": (lambda: image_chunk(bytes(20 * 2**20 + 1)), "bytes, over the limit of 20971520 (images.max_bytes)"),
    "miscounted": (
        lambda: image_chunk(image(), expected_tokens=7),
        "the image of 48 x 32 pixels has 6 tokens, and expected_tokens is 7",
    ),
    "without base64": (lambda: {"type": "image", "data": "@@", "format": "png"}, "data is not valid base64"),
    "as a number": (lambda: {"type": "image", "data": 3, "format": "png"}, "data must be base64"),
    "counted by a text": (lambda: image_chunk(image(), expected_tokens="6"), "expected_tokens an integer"),
    "pointer": (
        lambda: {"type": "image_asset_pointer", "format": "png", "location": "/etc/passwd"},
        "is 'image_asset_pointer'; this server takes encoded_text and image; it opens no files and addresses of clients",
    ),
    "sound": (lambda: {"type": "dmel", "dmel": ""}, "is 'dmel'; this server takes encoded_text and image"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_images_that_cannot_be_read_are_refused_with_their_field(kind: str, processor: ImageProcessor) -> None:
    make, problem = REFUSED[kind]
    chunk = make()
    read = request(TEXT, GOOD, chunk, length=4, image_processor=processor)
    assert read.problem is not None
    assert read.problem.startswith("sample 0: chunks[2]")
    assert problem in read.problem
    prompt = prompt_of({"chunks": [TEXT, chunk]}, processor)
    assert isinstance(prompt, DataError)
    assert str(prompt).startswith("prompt: chunks[1]")
    assert problem in str(prompt)


def test_tokens_of_images_come_with_images_alone(processor: ImageProcessor) -> None:
    token = processor.layout.token
    read = request({"tokens": [1, token]}, length=2, image_processor=processor)
    assert read.problem == (
        f"sample 0: chunks[0] has token {token}, which stands for an image: send an image chunk in its place"
    )
    # A model of text has no such token.
    assert request({"tokens": [1, token]}, length=2, image_processor=None).problem is None
    assert request(GOOD, length=2, image_processor=None).problem == (
        "sample 0: chunks[0] is an image, and the served model takes none"
    )


def test_weights_of_images_must_be_zero(processor: ImageProcessor) -> None:
    length = 2 + FEATURES + 2
    for name, position in (("weights", 1), ("advantages", FEATURES)):
        values = [0.0] * length
        values[position] = 0.5
        inputs: dict[str, Any] = {name: values}
        if name == "advantages":
            inputs["logprobs"] = [0.0] * length
        [datum] = request(TEXT, GOOD, TEXT, length=length, image_processor=processor, **inputs).data
        with pytest.raises(DataError) as error:
            samples_of(datum, loss_of("cross_entropy" if name == "weights" else "ppo", {}))
        assert str(error.value) == (
            f"{name}[{position}] is not 0, and the token after it stands for an image, which is never learned"
        )


def test_model_of_text_refuses_images_and_goes_on(system: Served) -> None:
    model = system.alice.model()
    datum = {"model_input": {"chunks": [GOOD]}, "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64"}}}
    inside = {"data": [datum], "loss_fn": "cross_entropy"}
    answer = system.alice.ask("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": inside})
    assert answer["error"] == "sample 0: chunks[0] is an image, and the served model takes none"
    assert answer["category"] == "user"
    sampling = {"prompt": {"chunks": [GOOD]}, "sampling_params": {"max_tokens": 1}}
    answer = system.alice.ask("asample", sampling)
    assert answer["error"] == "prompt: chunks[0] is an image, and the served model takes none"
    # The failed forward_backward fails its step, as any other, and the model trains on.
    assert "error" in system.alice.ask("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    good = system.alice.forward_backward(model, 3, 10)
    assert "error" not in system.alice.fetch(good)


# --- the real client ---


@pytest.mark.parametrize(
    ("engine", "ranks", "tower"),
    [
        ("megatron", 2, "train"),
        pytest.param("megatron", 1, "frozen", marks=pytest.mark.nightly),
        pytest.param("fsdp", 2, "train", marks=pytest.mark.nightly),
    ],
)
def test_the_client_trains_and_samples_with_images_as_transformers(
    engine: str, ranks: int, tower: str, model: Path, processor: ImageProcessor, tmp_path: Path
) -> None:
    pytest.importorskip("tinker", reason="the client needs Python 3.11")
    settings = ServeConfig(
        model=model, port=0, storage=tmp_path / "storage", precision="fp32", platform="cpu", engine=engine,
        vision_tower=tower,
    )  # fmt: skip
    contents = [image(seed, size) for seed, size in enumerate([(48, 32), (32, 64), (80, 16)])]
    data = [
        [[5, 9, 0, 17, 30, 31], [12, 40, 41, 42]],
        [[0, 7, 1, 8, 9], [3, 50]],
        [[11, 2, 13, 60, 61, 62], [60]],
        [[20, 21, 22, 23], []],
    ]
    # 0, 1 and 2 in a text stand for images.
    job = {
        "key": KEYS["alice"],
        "model": str(model),
        "images": [base64.b64encode(content).decode() for content in contents],
        "features": [processor.layout.features(*processor.grid(Image.open(io.BytesIO(c)), "it")) for c in contents],
        "texts": [text for text, _ in data],
        "steps": 2,
        "lr": 2e-3,
        "token": processor.layout.token,
    }
    with service(settings, ranks, tmp_path / "run") as url:
        file, answer_file = write_json(tmp_path / "job.json", job | {"url": url}), tmp_path / "answer.json"
        completed = run_forked(FOLDER / "image_client.py", file, answer_file, variables=environment())
        assert completed.returncode == 0, completed.stderr[-4000:]
    answer = json.loads(answer_file.read_text())
    start = CheckpointPath.parse(answer["start"]).directory(settings.storage, "alice")
    adapted = json.loads((start / "adapter_config.json").read_text())["target_modules"]
    assert ("qkv" in " ".join(adapted)) == (tower == "train")
    completed = run_reference(FOLDER / "image_reference.py", file, start, tmp_path / "reference.json")
    assert completed.returncode == 0, completed.stderr[-4000:]
    expected = json.loads((tmp_path / "reference.json").read_text())
    for step, reference in zip(answer["steps"], expected["steps"], strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], abs=1e-4)
        for values, expected_values in zip(step["logprobs"], reference["logprobs"], strict=True):
            assert values == pytest.approx(expected_values, abs=2e-5)
    assert answer["sampled"]["tokens"] == expected["sampled"]["tokens"]
    assert answer["sampled"]["logprobs"] == pytest.approx(expected["sampled"]["logprobs"], abs=2e-5)
    # The base model's answer is another one, and its prompt's log-probabilities are those of transformers.
    assert answer["prompt"][0] is None
    assert answer["prompt"][1:] == pytest.approx(expected["prompt"], abs=2e-5)
