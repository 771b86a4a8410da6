"""A damaged checkpoint is refused on every rank, changes nothing, and the previous one is loaded instead."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from small_runs import damages, exact_state, files_of, make_backend, restore, train

from megascend import Adapters, CheckpointError, Lora
from megascend.apps.train.event_log import EventLog
from megascend.apps.train.resume import load_first_good
from megascend.runtime.distributed.objects import gather_objects
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention

pytestmark = pytest.mark.usefixtures("megatron_imported")

KINDS = {"full": {}, "hf": {"hf": True}, "adapters": {"adapters": ("a", "b")}}


def two_checkpoints(backend, output, hf=False, adapters=()):
    """Save steps 1 and 2 as a run does, train to step 3, and return the retention and the state of every step."""
    retention, states = Retention(output / "checkpoints"), {}
    for name in adapters:
        backend.add_adapter(name, Lora(rank=4, seed=len(name)))
    for step in (1, 2):
        train(backend, adapters=adapters)
        backend.save(
            retention.path(step),
            progress={"step": step},
            config={"seed": 1},
            hf=hf,
            after=retention.committed,
            wait=True,
        )
        states[step] = exact_state(backend)
    train(backend, adapters=adapters)
    states[3] = exact_state(backend)
    return retention, states


def message_of(backend, path):
    """Return the error message of ``load``, which must be equal on every rank."""
    with pytest.raises(CheckpointError) as caught:
        backend.load(path)
    messages = gather_objects(str(caught.value), "world", backend.groups)
    assert len(set(messages)) == 1, messages
    return messages[0]


def on_rank_0(action):
    """Run an action on rank 0 between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def in_backend(kind, checkpoint, output, body):
    """Call ``body(backend, retention, states, event_log)`` on two ranks; return rank 0's result."""
    options = dict(KINDS[kind])

    def work():
        settings = {"adapters": Adapters(max_count=2)} if "adapters" in options else {}
        with make_backend(checkpoint, **settings) as backend:
            retention, states = two_checkpoints(backend, output, **options)
            return body(backend, retention, states, EventLog(output, backend.groups.launch))

    return run_distributed(work, 2, init=False, timeout_s=120)[0]


@pytest.mark.parametrize("kind", ["hf", "adapters"])
def test_every_damaged_file_is_refused_and_changes_nothing(kind, checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        names, attempts = files_of(newest), 0
        for name in names:
            file = newest / name
            content = file.read_bytes()
            for number, (damage, _) in enumerate(damages(file)):
                on_rank_0(lambda number=number, file=file: damages(file)[number][1]())
                message = message_of(backend, newest)
                assert name in message, (name, damage, message)
                assert exact_state(backend) == states[3], (name, damage)
                on_rank_0(lambda file=file, content=content: restore(file, content))
                attempts += 1
        assert backend.load(newest) == {"step": 2}  # the restored files load
        assert exact_state(backend) == states[2]
        return names, attempts

    names, attempts = in_backend(kind, checkpoint, tmp_path, body)
    expected = {".metadata", "common.pt", "megascend.json", "metadata.json", "__0_0.distcp"}
    expected |= {"__1_0.distcp"}
    adapter_files = {
        "adapter_config.json",
        "adapter_model.safetensors",
        "megascend_adapter.json",
        "optimizer.safetensors",
    }
    if kind == "adapters":
        expected |= {f"adapters/{adapter}/{name}" for adapter in "ab" for name in adapter_files}
    else:
        expected |= {"hf_parts.json"}
    if kind == "hf":
        assert {"hf/config.json", "hf/model.safetensors"} <= set(names)
        names = [name for name in names if not name.startswith("hf/")]
    assert set(names) == expected
    assert attempts >= 10 * len(expected)


def test_previous_checkpoint_is_loaded_and_logged(checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        names = files_of(newest)
        for name in names:
            content = (newest / name).read_bytes()
            on_rank_0(lambda name=name: damages(newest / name)[-2][1]())
            path, progress = load_first_good(backend, tuple(retention.candidates()), event_log)
            assert (path, progress) == (retention.path(1), {"step": 1})
            assert exact_state(backend) == states[1], name
            on_rank_0(lambda name=name, content=content: restore(newest / name, content))
            train(backend, adapters=KINDS["adapters"]["adapters"])
        return names

    names = in_backend("adapters", checkpoint, tmp_path, body)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["refused", "resumed"] * len(names)
    for name, refused, resumed in zip(names, events[::2], events[1::2], strict=True):
        assert refused["checkpoint"].endswith("step-00000002")
        assert name in refused["problem"]
        assert (resumed["step"], resumed["checkpoint"]) == (1, str(tmp_path / "checkpoints" / "step-00000001"))


def test_all_checkpoints_damaged_raises_and_changes_nothing(checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        for pair in (
            ("__0_0.distcp", "megascend.json"),
            ("megascend.json", "megascend.json"),
            (".metadata", "common.pt"),
        ):
            files = [retention.path(step) / name for step, name in zip((1, 2), pair, strict=True)]
            contents = [file.read_bytes() for file in files]
            for number in range(len(damages(files[0]))):
                on_rank_0(lambda files=files, number=number: [damages(file)[number][1]() for file in files])
                with pytest.raises(CheckpointError, match="no checkpoint can be loaded: ") as caught:
                    load_first_good(backend, tuple(retention.candidates()), event_log)
                assert all(name in str(caught.value) for name in (*pair, "step-00000001", "step-00000002"))
                assert exact_state(backend) == states[3]
                on_rank_0(lambda files=files, contents=contents: list(map(restore, files, contents)))

    in_backend("full", checkpoint, tmp_path, body)


def seal(directory):
    """Rewrite the manifest for files that were changed on purpose, so that only the checks after the digests can fail."""
    path = directory / manifest.NAME
    current = manifest.read(directory)
    files = {name: manifest.digest(directory / name) for name in current.files}
    values = json.loads(path.read_text()) | {"files": files}
    values.pop("digest")
    path.write_text(manifest.CheckpointManifest(**values).to_text())


def test_invalid_files_with_valid_digests_are_refused_on_every_rank(checkpoint, tmp_path):
    """Refuse invalid content with correct digests. A data file's content is only checked while it is loaded."""

    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        for name in (".metadata", "__1_0.distcp"):
            content = (newest / name).read_bytes()

            def spoil(name=name, content=content):
                (newest / name).write_bytes(content[: len(content) // 2])
                seal(newest)

            on_rank_0(spoil)
            message = message_of(backend, newest)
            assert ("metadata cannot be read" if name == ".metadata" else "cannot read") in message
            assert name == "__1_0.distcp" or exact_state(backend) == states[3]
            on_rank_0(lambda name=name, content=content: (restore(newest / name, content), seal(newest)))
        assert backend.load(newest) == {"step": 2}
        assert exact_state(backend) == states[2]

    in_backend("full", checkpoint, tmp_path, body)


def test_checkpoint_of_a_model_with_other_parameters_is_refused(parity_folder, tmp_path):
    """Refuse a checkpoint with equal sizes whose model ties the output layer to the embedding."""
    untied, tied = (
        case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, **options)
        for options in ({}, {"tie_word_embeddings": True})
    )

    def save():
        with make_backend(tied) as backend:
            backend.save(tmp_path / "other", wait=True)

    def load():
        with make_backend(untied) as backend:
            train(backend)
            before = exact_state(backend)
            message = message_of(backend, tmp_path / "other")
            assert exact_state(backend) == before
            return message

    run_distributed(save, 1, init=False, timeout_s=180)
    for message in run_distributed(load, 2, init=False, timeout_s=180):
        assert "does not fit this model: " in message
        assert "output_layer.weight" in message
