"""A damaged checkpoint is refused on every rank, changes nothing, and the one before it is taken instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from small_runs import damages, exact_state, files_of, make_backend, restore, small_model, train

from megascend import Adapters, CheckpointError, Lora
from megascend.app.event_log import EventLog
from megascend.app.resume import load_first_good
from megascend.checkpoint import manifest
from megascend.checkpoint.retention import Retention
from megascend.distributed.objects import gather_objects
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint

pytestmark = pytest.mark.usefixtures("megatron_imported")

KINDS = {"full": {}, "hf": {"hf": True}, "adapters": {"adapters": ("a", "b")}}


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return small_model(parity_folder)


def two_checkpoints(backend, output, hf=False, adapters=()):
    """Of steps 1 and 2, as a run writes them; the model is at step 3. The states at each step."""
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
    """The error of ``load``, the same on every rank."""
    with pytest.raises(CheckpointError) as caught:
        backend.load(path)
    messages = gather_objects(str(caught.value), "world", backend.groups)
    assert len(set(messages)) == 1, messages
    return messages[0]


def on_rank_0(action):
    """Do it on one rank, while the other waits."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def in_backend(kind, checkpoint, output, body):
    """Call ``body(backend, retention, states, event_log)`` on two ranks; rank 0's result."""
    options = dict(KINDS[kind])

    def work():
        settings = {"adapters": Adapters(max_count=2)} if "adapters" in options else {}
        with make_backend(checkpoint, **settings) as backend:
            retention, states = two_checkpoints(backend, output, **options)
            return body(backend, retention, states, EventLog(output, backend.groups.launch))

    return run_distributed(work, 2, init=False, timeout_s=120)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_to_every_file_is_refused_and_changes_nothing(kind, checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        names, tried = files_of(newest), 0
        for name in names:
            file = newest / name
            content = file.read_bytes()
            for number, (damage, _) in enumerate(damages(file)):
                on_rank_0(lambda number=number, file=file: damages(file)[number][1]())
                message = message_of(backend, newest)
                assert name in message, (name, damage, message)
                assert exact_state(backend) == states[3], (name, damage)
                on_rank_0(lambda file=file, content=content: restore(file, content))
                tried += 1
        assert backend.load(newest) == {"step": 2}  # restored, it is what was saved
        assert exact_state(backend) == states[2]
        return names, tried

    names, tried = in_backend(kind, checkpoint, tmp_path, body)
    expected = {".metadata", "common.pt", "megascend.json", "metadata.json", "__0_0.distcp"}
    expected |= {"__1_0.distcp"}
    of_adapter = {"adapter_config.json", "adapter_model.safetensors", "megascend_adapter.json", "optimizer.safetensors"}
    if kind == "adapters":
        expected |= {f"adapters/{adapter}/{name}" for adapter in "ab" for name in of_adapter}
    else:
        expected |= {"hf_parts.json"}
    if kind == "hf":
        assert {"hf/config.json", "hf/model.safetensors"} <= set(names)
        names = [name for name in names if not name.startswith("hf/")]
    assert set(names) == expected
    assert tried >= 10 * len(expected)


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_the_one_before_is_taken_and_said_so(kind, checkpoint, tmp_path, capfd):
    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        names = files_of(newest)
        for name in names:
            content = (newest / name).read_bytes()
            on_rank_0(lambda name=name: damages(newest / name)[-2][1]())
            progress, config = load_first_good(backend, tuple(retention.candidates()), event_log)
            assert (progress, config) == ({"step": 1}, {"seed": 1})
            assert exact_state(backend) == states[1], name
            on_rank_0(lambda name=name, content=content: restore(newest / name, content))
            train(backend, adapters=KINDS[kind].get("adapters", ()))
        return names

    names = in_backend(kind, checkpoint, tmp_path, body)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["refused", "resumed"] * len(names)
    for name, refused, resumed in zip(names, events[::2], events[1::2], strict=True):
        assert refused["checkpoint"].endswith("step-00000002")
        assert name in refused["problem"]
        assert (resumed["step"], resumed["checkpoint"]) == (1, str(tmp_path / "checkpoints" / "step-00000001"))


def test_if_all_are_damaged_there_is_an_error_and_nothing_has_changed(checkpoint, tmp_path):
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


def test_a_damaged_latest_hides_nothing(checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        latest = retention.directory / "latest"
        content = latest.read_bytes()
        for number, (damage, _) in enumerate(damages(latest)):
            on_rank_0(lambda number=number: damages(latest)[number][1]())
            load_first_good(backend, tuple(retention.candidates()), event_log)
            assert exact_state(backend) == states[2], damage
            train(backend)
            on_rank_0(lambda: restore(latest, content))

    in_backend("full", checkpoint, tmp_path, body)


def seal(directory):
    """Write the manifest anew, for files that were changed on purpose: what remains are the checks behind the digests."""
    path = directory / manifest.NAME
    found = manifest.read(directory)
    files = {name: manifest.digest(directory / name) for name in found.files}
    values = json.loads(path.read_text()) | {"files": files}
    values.pop("digest")
    path.write_text(manifest.Manifest(**values).to_text())


def test_files_that_were_written_wrong_are_refused_on_every_rank_too(checkpoint, tmp_path):
    """Their digests are right. The data files of a checkpoint cannot be checked before they are read."""

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


def test_adapters_that_were_written_wrong_leave_the_present_ones(checkpoint, tmp_path):
    def body(backend, retention, states, event_log):
        newest = retention.path(2)
        files = [Path("adapters/b") / name for name in files_of(newest / "adapters" / "b")]
        for name in [*files, Path(".metadata")]:
            file = newest / name
            content = file.read_bytes()

            def spoil(file=file, content=content):
                file.write_bytes(content[: len(content) // 2])
                seal(newest)

            on_rank_0(spoil)
            assert str(newest / name.parent) in message_of(backend, newest)
            assert exact_state(backend) == states[3], name
            on_rank_0(lambda file=file, content=content: (restore(file, content), seal(newest)))

    in_backend("adapters", checkpoint, tmp_path, body)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_a_model_with_other_parameters_is_refused(parity_folder, tmp_path, tied):
    """The same sizes, but the output layer is the embedding in one of them: neither has too few nor too many tensors."""
    models = {
        is_tied: case_checkpoint(
            parity_folder, "qwen3", num_hidden_layers=2, **{"tie_word_embeddings": True} if is_tied else {}
        )
        for is_tied in (False, True)
    }

    def save():
        with make_backend(models[tied]) as backend:
            backend.save(tmp_path / "other", wait=True)

    def load():
        with make_backend(models[not tied]) as backend:
            train(backend)
            before = exact_state(backend)
            message = message_of(backend, tmp_path / "other")
            assert exact_state(backend) == before
            return message

    run_distributed(save, 1, init=False, timeout_s=180)
    messages = run_distributed(load, 2, init=False, timeout_s=180)
    for message in messages:
        assert "does not fit this model: " in message
        assert "output_layer.weight" in message
        assert ("unexpected key in checkpoint: " in message) is not tied
