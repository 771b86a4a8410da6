"""Ranks that call different methods of a backend, or with different arguments: all of them raise at once, and nothing changes.

The groups' timeout is 240 s and a test's deadline half of it: nobody has waited it out.
"""

from __future__ import annotations

import pytest

from megascend import Adam, Adapters, Batching, Lora, Parallel
from megascend.errors import ConfigError, OutOfStepError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")
TIMEOUT_S, DEADLINE_S = 240.0, 120.0
LAYOUTS = {
    "TP2": Parallel(tensor=2),
    "PP2": Parallel(pipeline=2),
    "CP2": Parallel(context=2),
    "DP2": Parallel(),
}


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return case_checkpoint(parity_folder, "qwen3")


def make_backend(checkpoint, parallel, adapters=None):
    from megascend.backends import MegatronBackend

    return MegatronBackend(
        checkpoint,
        parallel,
        "fp32",
        optimizer=Adam(lr=1e-3),
        batching=Batching(micro_batch_tokens=128),
        adapters=adapters,
        timeout_s=TIMEOUT_S,
    )


def nll(logprobs, inputs):
    return -logprobs


class Calls:
    """Calls of ranks, by their description in error messages."""

    def __init__(self, backend, folder):
        self.backend, self.folder = backend, folder
        self.samples = backend.shard(causal_samples(token_lists())[:4])

    def __call__(self, text):
        """Make the call that ``text`` describes."""
        backend, path = self.backend, self.folder
        calls = {
            "forward_backward(loss='cross_entropy')": lambda: backend.forward_backward(self.samples),
            "forward_backward(loss='nll')": lambda: backend.forward_backward(self.samples, nll),
            "forward_backward": lambda: backend.forward_backward(self.samples, "unknown"),
            "forward(entropy=False, logits=False, reference=False)": lambda: backend.forward(self.samples),
            "forward(entropy=True, logits=False, reference=False)": lambda: backend.forward(self.samples, entropy=True),
            "forward(entropy=False, logits=True, reference=False)": lambda: backend.forward(self.samples, logits=True),
            "optimizer_step()": backend.optimizer_step,
            f"save('{path}/a', hf=False, wait=False)": lambda: backend.save(path / "a"),
            f"save('{path}/b', hf=False, wait=False)": lambda: backend.save(path / "b"),
            f"save('{path}/a', hf=True, wait=False)": lambda: backend.save(path / "a", hf=True),
            f"save('{path}/a', hf=False, wait=True)": lambda: backend.save(path / "a", wait=True),
            f"load('{path}/a')": lambda: backend.load(path / "a"),
            f"load('{path}/b')": lambda: backend.load(path / "b"),
            f"export_hf('{path}/a', adapter=None)": lambda: backend.export_hf(path / "a"),
            "from_rank_0()": lambda: backend.from_rank_0(lambda: 7),
            "any_rank() (all_reduce_numbers, max of 1,": lambda: backend.any_rank(False),
            "any_rank() (all_reduce_numbers, max of 2,": lambda: backend.any_rank(False, True),
            "gather_by_data_rank()": lambda: backend.gather_by_data_rank("x"),
        }
        return calls[text]()


def pairs_of(path):
    """Return pairs of (call on rank 0, call on rank 1)."""
    fb, fb_nll = "forward_backward(loss='cross_entropy')", "forward_backward(loss='nll')"
    forward, with_entropy, with_logits = (
        f"forward(entropy={entropy}, logits={logits}, reference=False)"
        for entropy, logits in ((False, False), (True, False), (False, True))
    )
    save = f"save('{path}/a', hf=False, wait=False)"
    one_flag, two_flags = (f"any_rank() (all_reduce_numbers, max of {count}," for count in (1, 2))
    return [
        (save, fb),
        ("optimizer_step()", fb),
        (fb_nll, fb),
        (fb, "forward_backward"),
        (forward, fb),
        (forward, with_entropy),
        (with_logits, forward),
        ("optimizer_step()", save),
        (save, f"save('{path}/b', hf=False, wait=False)"),
        (save, f"save('{path}/a', hf=True, wait=False)"),
        (save, f"save('{path}/a', hf=False, wait=True)"),
        (f"load('{path}/a')", save),
        (f"load('{path}/a')", f"load('{path}/b')"),
        (f"export_hf('{path}/a', adapter=None)", "optimizer_step()"),
        (one_flag, two_flags),
        ("from_rank_0()", "gather_by_data_rank()"),
        (one_flag, "optimizer_step()"),
    ]


def assert_positions_named(messages, pair):
    """Check that both ranks' messages name both positions."""
    for rank, message in enumerate(messages):
        assert f"rank {rank}: the ranks are out of step: rank 0 is in {pair[0]}" in message, message
        assert f"; rank 1 is in {pair[1]}" in message, message
        assert ", step 1)" in message, message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.nightly_cases("CP2", "PP2")  # covered: DP2, TP2
def test_every_rank_raises_and_nothing_changes(checkpoint, tmp_path, layout):
    def on_rank():
        backend = make_backend(checkpoint, LAYOUTS[layout])
        calls = Calls(backend, tmp_path)
        before = backend.forward_backward(calls.samples).loss
        backend.optimizer_step()
        backend.groups.monitor.step = 1
        first, messages = backend.forward(calls.samples).logprobs, []
        for pair in [*pairs_of(tmp_path), ("optimizer_step()", "forward_backward(loss='cross_entropy')")]:
            if len(messages) == len(pairs_of(tmp_path)):  # one rank has called forward_backward once less
                calls("forward_backward(loss='cross_entropy')")
            with pytest.raises(OutOfStepError) as caught:
                calls(pair[backend.rank])
            messages.append(str(caught.value))
        repeated = backend.forward(calls.samples).logprobs
        assert all((a == b).all() for a, b in zip(first, repeated, strict=True))
        with pytest.raises(ConfigError, match=r"save: call optimizer_step\(\) first"):
            backend.save(tmp_path / "a")
        backend.optimizer_step()
        after = backend.forward_backward(calls.samples).loss
        backend.close()
        return messages, before, after

    (messages_0, before, after), (messages_1, *_) = run_distributed(on_rank, 2, init=False, timeout_s=DEADLINE_S)
    pairs = [*pairs_of(tmp_path), ("optimizer_step()", "forward_backward(loss='cross_entropy')")]
    for pair, *messages in zip(pairs, messages_0, messages_1, strict=True):
        assert_positions_named(messages, pair)
    assert "where it raised ConfigError: loss: unknown loss 'unknown'" in messages_0[3]
    assert after < before  # two more steps were taken, by all
    assert not (tmp_path / "a").exists()


def test_adapters(checkpoint, tmp_path):
    lora = Lora(rank=2)

    def on_rank():
        backend = make_backend(checkpoint, Parallel(), Adapters())
        rank = backend.rank
        samples = backend.shard(causal_samples(token_lists())[:4])
        for name in ("a", "b"):
            backend.add_adapter(name, lora)
        state = " with adapters a with gradients, b with gradients"
        pairs = [
            (
                "add_adapter('c', Lora(rank=2",
                "add_adapter('c', Lora(rank=3",
                lambda: backend.add_adapter("c", Lora(rank=2 + rank)),
            ),
            ("remove_adapter('a')", "remove_adapter('e')", lambda: backend.remove_adapter("ae"[rank])),
            (f"optimizer_step(['a']){state}", f"optimizer_step(['b']){state}", lambda: backend.optimizer_step("ab"[rank])),
            (
                f"load_adapter('c', '{tmp_path}/0', None, optimizer=True)",
                f"load_adapter('c', '{tmp_path}/1', None, optimizer=True)",
                lambda: backend.load_adapter("c", tmp_path / str(rank)),
            ),
        ]  # fmt: skip
        for name in ("a", "b"):
            backend.forward_backward(samples, adapter=name)
        messages = []
        for *_, call in pairs:
            with pytest.raises(OutOfStepError) as caught:
                call()
            messages.append(str(caught.value))
        if rank == 0:
            backend.discard_gradients("a")  # local: what has not happened on rank 1 shows in the next call
        pairs.append(
            (
                "forward_backward(loss='cross_entropy') with adapters a, b with gradients",
                f"forward_backward(loss='cross_entropy'){state}",
                lambda: backend.forward_backward(samples, adapter="a"),
            )
        )
        with pytest.raises(OutOfStepError) as caught:
            pairs[-1][-1]()
        messages.append(str(caught.value))
        backend.discard_gradients("a")
        step = backend.optimizer_step()
        assert list(backend.adapters) == ["a", "b"]
        backend.close()
        return [pair[:2] for pair in pairs], messages, list(step.adapters)

    (pairs, messages_0, stepped), (_, messages_1, _) = run_distributed(on_rank, 2, init=False, timeout_s=DEADLINE_S)
    for pair, *messages in zip(pairs, messages_0, messages_1, strict=True):
        assert_positions_named(messages, pair)
    assert stepped == ["b"]
