"""The queue on a small double: batching, results of futures, and propagation of errors."""

import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megascend.errors import ConfigError, DataError, MegascendError, OutOfDeviceMemoryError, QueueFullError
from megascend.training.batch.losses import resolve
from megascend.training.batch.packing import shard
from megascend.training.batch.results import AdapterLoss, ForwardResult, StepResult
from megascend.training.batch.sample import Sample
from megascend.training.lora.queue import CALLS_AT_ONCE, AdapterQueue

VOCABULARY = 100


class World:
    """Data parallel ranks as threads of this process."""

    def __init__(self, size=1):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots = [None] * size

    def gather(self, rank, obj):
        self._slots[rank] = obj
        self._barrier.wait(timeout=20)
        gathered = list(self._slots)
        self._barrier.wait(timeout=20)
        return gathered


@dataclass
class Adapter:
    """``value`` is the only parameter; a sample's gradient is the sum of its weights over the adapter's tokens."""

    value: float = 0.0
    grad: float = 0.0
    grads_seen: int = 0


class Backend:
    """Does what the real one promises: adapters do not mix, and refused work changes nothing on any rank."""

    def __init__(self, names="abc", world=None, rank=0):
        self.adapters = {name: Adapter() for name in names}
        self.calls = []
        self.fault = None  # raised in the middle of the next verb
        self.room = 10**6  # tokens
        self._world, self._rank = world or World(), rank

    def check_samples(self, samples):
        for index, sample in enumerate(samples):
            if int(sample.input_ids.max()) >= VOCABULARY:
                raise DataError(f"sample {index} has a token outside the vocabulary")

    def shard(self, samples):
        shares = shard([len(s) for s in samples], [s.pair for s in samples], self._world.size)
        return [samples[index] for index in shares[self._rank]]

    def gather_by_data_rank(self, obj):
        return self._world.gather(self._rank, obj)

    def forward_backward(self, samples, loss="cross_entropy"):
        loss = resolve(loss)
        reports = self._exchange(samples, lambda: self._check(samples, loss))
        sums, counts = Counter(), Counter()
        for share in reports:
            for name, weight, tokens in share:
                sums[name] += weight
                counts[name] += tokens
        for name in sums:
            if sums[name] == 0:
                raise DataError(f"all targets of adapter {name!r} have weight 0")
        self.calls.append(("forward_backward", tuple(sorted(sums)), sum(counts.values()), loss.name))
        if sum(counts.values()) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._break()
        for name in sums:
            self.adapters[name].grad += sums[name] / counts[name]
            self.adapters[name].grads_seen += 1
        losses = {n: AdapterLoss(sums[n] / counts[n], counts[n], counts[n], {}) for n in sorted(sums)}
        return SimpleNamespace(adapters=losses)

    def optimizer_step(self, adapters):
        for name in adapters:
            if not self.adapters[name].grads_seen:
                raise ConfigError(f"adapter {name!r} cannot step: {self.adapters[name].grads_seen} gradients")
        self.calls.append(("optimizer_step", tuple(adapters)))
        self._break()
        results = {}
        for name in adapters:
            adapter = self.adapters[name]
            adapter.value += adapter.grad
            results[name] = StepResult(grad_norm=adapter.grad, lr=1.0, skipped=False)
            adapter.grad, adapter.grads_seen = 0.0, 0
        return StepResult(0.0, 1.0, False, adapters=results)

    def forward(self, samples):
        self._exchange(samples, lambda: self._check(samples, None))
        self.calls.append(("forward", tuple(sorted({s.adapter for s in samples}))))
        self._break()
        return ForwardResult([-s.input_ids.float() - self.adapters[s.adapter].value for s in samples])

    def discard_gradients(self, adapters):
        self.calls.append(("discard_gradients", tuple(adapters)))
        for name in adapters:
            self.adapters[name].grad, self.adapters[name].grads_seen = 0.0, 0

    def recover_memory(self):
        self.calls.append(("recover_memory",))
        return self._world.size == 1

    def _check(self, samples, loss):
        self.check_samples(samples)
        for index, sample in enumerate(samples):
            missing = [name for name in (loss.requires if loss else ()) if name not in sample.token_fields()]
            if missing:
                raise DataError(f"sample {index} of {sample.adapter!r} lacks {missing[0]}")
        return [(s.adapter, float(s.weights.sum()), len(s)) for s in samples]

    def _exchange(self, samples, check):
        """Exchange all ranks' reports; raise the same DataError on all ranks if one is an error."""
        try:
            report = check()
        except DataError as error:
            report = str(error)
        reports = self._world.gather(self._rank, report)
        problems = [report for report in reports if isinstance(report, str)]
        if problems:
            raise DataError(problems[0])
        if not any(reports):
            raise DataError("the batch is empty on every rank")
        return reports

    def _break(self):
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault


def sample(*tokens, weight=1.0, **more):
    return Sample(input_ids=list(tokens), target_ids=list(tokens), weights=[weight] * len(tokens), **more)


def policy_sample(*tokens):
    return sample(*tokens, advantages=[1.0] * len(tokens), old_logprobs=[-1.0] * len(tokens))


BAD = [sample(VOCABULARY)]  # check_samples sees it
HIDDEN = [sample(1, weight=0.0)]  # only forward_backward sees it


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def queue(backend):
    return AdapterQueue(backend, max_batch_tokens=100, max_pending=8)


def verbs(backend):
    return [call[:2] for call in backend.calls]


# --- what runs ---


def test_tenants_share_batches_and_steps(queue, backend):
    losses, steps = {}, {}
    for index, name in enumerate("abc"):
        losses[name] = queue.forward_backward(name, [sample(*[1] * (index + 1), weight=index + 2.0)])
        steps[name] = queue.optimizer_step(name)
    assert steps["c"].result().grad_norm == 4.0
    assert backend.calls == [
        ("forward_backward", ("a", "b", "c"), 6, "cross_entropy"),
        ("optimizer_step", ("a", "b", "c")),
    ]
    assert [losses[name].result().loss for name in "abc"] == [2.0, 3.0, 4.0]
    assert [losses[name].result().tokens for name in "abc"] == [1, 2, 3]
    assert [steps[name].result().grad_norm for name in "abc"] == [2.0, 3.0, 4.0]
    assert queue.run_once() is False


def test_requests_of_one_adapter_run_in_order(queue, backend):
    before = queue.forward("a", [sample(5)])
    for _ in range(2):
        queue.forward_backward("a", [sample(1, weight=2.0)])
    queue.optimizer_step("a")
    after = queue.forward("a", [sample(5)])
    assert after.result()[0].tolist() == [-9.0]  # after a step with the sum of two gradients
    assert before.result()[0].tolist() == [-5.0]
    assert [call[0] for call in backend.calls] == [
        "forward",
        "forward_backward",
        "forward_backward",
        "optimizer_step",
        "forward",
    ]


def test_different_losses_do_not_mix_and_equal_ones_do(queue, backend):
    queue.forward_backward("a", [policy_sample(1)], "ppo")
    queue.forward_backward("b", [sample(1)])
    queue.forward_backward("c", [policy_sample(1)], resolve("ppo"))
    queue.drain()
    assert [call[1::2] for call in backend.calls] == [(("a", "c"), "ppo"), (("b",), "cross_entropy")]


def test_result_runs_no_more_than_it_needs(queue, backend):
    queue.forward_backward("a", [sample(1)]).result()
    last = queue.optimizer_step("a")
    assert not last.done()
    assert len(backend.calls) == 1


def test_forward_returns_results_by_tenant_in_order(queue):
    a = queue.forward("a", [sample(3, 4), sample(1)])
    b = queue.forward("b", [sample(7), sample(8, 9, 10)])
    assert [t.tolist() for t in b.result()] == [[-7.0], [-8.0, -9.0, -10.0]]
    assert [t.tolist() for t in a.result()] == [[-3.0, -4.0], [-1.0]]
    assert a.result()[0].dtype == torch.float32


def test_queue_copies_samples_and_renumbers_pairs_by_tenant(queue, backend):
    observed = []
    backend.check_samples = observed.extend
    original = sample(1, pair=0, chosen=True)
    batch = [original]
    queue.forward_backward("a", batch)
    queue.forward_backward("b", batch)
    batch.clear()
    assert (original.adapter, original.pair) == (None, 0)
    assert [(s.adapter, s.chosen) for s in observed] == [("a", True), ("b", True)]
    assert observed[0].pair != observed[1].pair
    queue.drain()
    assert backend.calls[0][:3] == ("forward_backward", ("a", "b"), 2)


# --- errors ---


@pytest.mark.parametrize(
    ("samples", "loss", "expected"),
    [
        (BAD, "cross_entropy", "outside the vocabulary"),
        (HIDDEN, "cross_entropy", "'a' have weight 0"),
        ([sample(1)], "ppo", "lacks old_logprobs"),
        ([sample(1)], "kl", "unknown loss 'kl'"),
        ([], "cross_entropy", "no samples"),
        ([sample(1, adapter="b")], "cross_entropy", "is for adapter 'b' but was submitted for 'a'"),
    ],
)
def test_bad_request_fails_only_for_its_tenant(queue, backend, samples, loss, expected):
    """Fail the steps that would have used its gradients; other tenants get all of theirs, in a shared batch or not."""
    bad, bad_step = queue.forward_backward("a", samples, loss), queue.optimizer_step("a")
    healthy = {
        name: (queue.forward_backward(name, [policy_sample(1)], "ppo"), queue.optimizer_step(name)) for name in "bc"
    }
    queue.drain()
    with pytest.raises((DataError, ConfigError), match=expected):
        bad.result()
    with pytest.raises(MegascendError, match=r"optimizer_step of adapter 'a' did not run.*gradients are incomplete"):
        bad_step.result()
    for loss_future, step in healthy.values():
        assert (loss_future.result().loss, step.result().grad_norm) == (1.0, 1.0)
    assert {name: a.value for name, a in backend.adapters.items()} == {"a": 0.0, "b": 1.0, "c": 1.0}


def test_batch_out_of_memory_is_retried_one_request_at_a_time(queue, backend):
    backend.room = 4
    batches = {"a": [sample(1, 2)], "b": [sample(*range(5))], "c": [sample(3, 4)]}
    losses = {name: queue.forward_backward(name, batch) for name, batch in batches.items()}
    steps = {name: queue.optimizer_step(name) for name in batches}
    queue.drain()
    assert [losses[name].result().tokens for name in "ac"] == [2, 2]
    assert [steps[name].result().grad_norm for name in "ac"] == [1.0, 1.0]
    with pytest.raises(OutOfDeviceMemoryError, match="no room for this request: CUDA out of memory"):
        losses["b"].result()
    with pytest.raises(MegascendError, match="gradients are incomplete"):
        steps["b"].result()
    assert verbs(backend)[:5] == [
        ("forward_backward", ("a", "b", "c")), ("recover_memory",), ("forward_backward", ("a",)),
        ("forward_backward", ("b",)), ("recover_memory",),
    ]  # fmt: skip
    backend.room = 5
    repeated, step = queue.forward_backward("b", batches["b"]), queue.optimizer_step("b")
    assert (repeated.result().tokens, step.result().grad_norm) == (5, 1.0)


def test_without_room_all_ends_where_other_ranks_may_wait_and_where_a_step_may_be_half_done(queue, backend):
    backend._world.size = 2
    backend.room, step = 0, queue.optimizer_step("a")
    backend.gather_by_data_rank = backend._exchange = lambda samples, check: [check()]
    backend.shard = list
    failed = queue.forward_backward("b", [sample(1)])
    backend.adapters["a"].grads_seen = 1
    backend.fault = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        queue.run_once()
    with pytest.raises(OutOfDeviceMemoryError):
        queue.run_once()
    for future in (step, failed):
        assert future.done()
        assert future.error is not None


def test_step_out_of_memory_fails_only_its_adapter_and_drops_gradients(queue, backend):
    make = backend.optimizer_step

    def unless_full(adapters):
        if "b" in adapters:
            raise OutOfDeviceMemoryError("no room for moments")
        return make(adapters)

    backend.optimizer_step = unless_full
    for name in "ab":
        queue.forward_backward(name, [sample(1, weight=2.0)])
    steps = {name: queue.optimizer_step(name) for name in "ab"}
    assert steps["a"].result().grad_norm == 2.0
    with pytest.raises(OutOfDeviceMemoryError, match="no room for moments"):
        steps["b"].result()
    assert backend.adapters["b"].grads_seen == 0
    assert "recover_memory" not in [call[0] for call in verbs(backend)], "all ranks know, and nothing is half done"
    backend.optimizer_step = make
    queue.forward_backward("b", [sample(1, weight=3.0)])
    assert queue.optimizer_step("b").result().grad_norm == 3.0


@pytest.mark.parametrize("bad", [BAD, HIDDEN])
@pytest.mark.parametrize("early", [True, False], ids=["before the failure", "after the failure"])
def test_requests_up_to_the_next_step_fail_after_an_error(queue, backend, bad, early):
    good = queue.forward_backward("a", [sample(1, weight=50.0)])
    failed = queue.forward_backward("a", bad)
    if not early:
        queue.drain()
    spoiled = [queue.forward_backward("a", [sample(1)]), queue.forward("a", [sample(1)]), queue.optimizer_step("a")]
    queue.forward_backward("a", [sample(1, weight=3.0)])
    fresh = queue.optimizer_step("a")
    assert good.result().loss == 50.0
    queue.drain()
    for future in (failed, *spoiled):
        assert future.done()
        with pytest.raises(MegascendError):
            future.result()
    assert spoiled[0].error.__cause__ is failed.error
    assert fresh.result().grad_norm == 3.0  # and not 53: the first gradient went with the failed step
    assert queue.pending("a") == 0


def test_a_step_without_gradients_fails_and_does_not_hold_up_the_others(queue):
    queue.forward_backward("a", [sample(1)])
    empty, step = queue.optimizer_step("b"), queue.optimizer_step("a")
    later = queue.forward_backward("b", [sample(1, weight=2.0)])
    assert (step.result().grad_norm, later.result().loss) == (1.0, 2.0)
    with pytest.raises(ConfigError, match="'b' cannot step: 0 gradients"):
        empty.result()


def test_an_unknown_adapter_is_an_error_of_the_future(queue, backend):
    for future in (queue.forward_backward("x", [sample(1)]), queue.optimizer_step("x"), queue.forward("x", [])):
        assert future.done()
        with pytest.raises(ConfigError, match=r"unknown adapter 'x'; adapters: 'a', 'b', 'c'"):
            future.result()
    assert queue.pending("x") == 0
    assert queue.run_once() is False
    assert backend.calls == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("device lost")])
@pytest.mark.parametrize("verb", ["forward_backward", "optimizer_step", "forward"])
def test_other_faults_propagate_and_fail_the_unit(queue, backend, fault, verb):
    if verb == "optimizer_step":
        for name in "ab":
            queue.forward_backward(name, [sample(1, weight=50.0)])
        queue.drain()
    arguments = () if verb == "optimizer_step" else ([sample(1)],)
    unit = [getattr(queue, verb)(name, *arguments) for name in "ab"]
    waiting = queue.forward_backward("c", [sample(1)], lambda logprobs, inputs: -logprobs)
    spoiled = queue.optimizer_step("a")
    backend.fault = fault
    with pytest.raises(type(fault)):
        queue.run_once()
    for future in unit:
        assert future.done()
        with pytest.raises(MegascendError if isinstance(fault, KeyboardInterrupt) else RuntimeError):
            future.result()
    assert not waiting.done()
    assert waiting.result().loss == 1.0
    queue.drain()
    with pytest.raises(MegascendError, match="cannot step: 0 gradients" if verb == "forward" else "did not run"):
        spoiled.result()  # a failed forward does not keep the step from running
    queue.forward_backward("a", [sample(1, weight=3.0)])
    assert queue.optimizer_step("a").result().grad_norm == 3.0


def test_a_full_line_is_refused_at_once(queue):
    for _ in range(8):
        queue.optimizer_step("a")
    with pytest.raises(QueueFullError, match=r"adapter 'a' has max_pending=8 requests waiting"):
        queue.optimizer_step("a")
    queue.optimizer_step("b")
    queue.drain()
    queue.optimizer_step("a")


# --- cancelling ---


def test_cancel_fails_only_that_adapter(queue, backend):
    finished = queue.forward_backward("a", [sample(1, weight=50.0)])
    finished.result()
    cancelled = [queue.forward_backward("a", [sample(1)]), queue.optimizer_step("a")]
    other = queue.forward_backward("b", [sample(1)])
    queue.cancel("a")
    for future in cancelled:
        assert future.done()
        with pytest.raises(MegascendError, match="of adapter 'a' was cancelled"):
            future.result()
    assert queue.pending("a") == 0
    assert finished.result().loss == 50.0
    assert other.result().loss == 1.0
    queue.forward_backward("a", [sample(1, weight=3.0)])
    assert queue.optimizer_step("a").result().grad_norm == 3.0  # nothing is left of what was cancelled


# --- data parallel ranks ---


def on_ranks(count, script):
    """Run ``script(queue, backend)`` on every data parallel rank, each a thread; what each returned."""
    world, outcomes = World(count), [None] * count

    def rank_main(rank):
        backend = Backend(world=world, rank=rank)
        try:
            outcomes[rank] = script(AdapterQueue(backend, max_batch_tokens=20), backend)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_run_the_same_and_hear_everything(count):
    def script(queue, backend):
        futures = []
        for turn in range(4):
            for position, name in enumerate("abc"):
                samples = [sample(*range(1, 2 + (turn + position + i) % 5)) for i in range(4)]
                futures.append(queue.forward(name, samples))
                futures.append(queue.forward_backward(name, HIDDEN if (turn, name) == (1, "b") else samples))
                futures.append(queue.optimizer_step(name))
        single = queue.forward("a", [sample(1, 2, 3)])  # fewer samples than ranks
        queue.drain()
        assert single.done()
        outcomes = []
        for future in futures:
            try:
                outcomes.append(str(future.result()))
            except MegascendError as error:
                outcomes.append(str(error))
        shared = [call for call in backend.calls if call[0] != "forward"]  # ranks see their own shares of a forward
        return shared, outcomes, backend.adapters

    outcomes = on_ranks(count, script)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    [single] = on_ranks(1, script)
    assert outcomes[0] == single
    assert sum("did not run" in text for text in single[1]) == 1
    assert sum("weight 0" in text and "did not run" not in text for text in single[1]) == 1


# --- calls ---


def test_call_runs_in_its_adapters_order_without_blocking_others(queue, backend):
    values = []
    queue.forward_backward("a", [sample(1, weight=2.0)])
    queue.optimizer_step("a")
    call = queue.call("a", lambda: values.append(backend.adapters["a"].value) or "saved")
    queue.forward_backward("a", [sample(1, weight=3.0)])
    last = queue.optimizer_step("a")
    other = queue.forward_backward("b", [sample(1)])
    assert call.result() == "saved"
    assert values == [2.0]
    assert other.done()
    assert last.result().grad_norm == 3.0


def test_requests_may_follow_the_call_that_creates_their_adapter(queue, backend):
    created = queue.call("new", lambda: backend.adapters.update(new=Adapter()))
    loss, step = queue.forward_backward("new", [sample(1, weight=2.0)]), queue.optimizer_step("new")
    bad, after = queue.forward_backward("new", BAD), queue.optimizer_step("new")
    assert not any(future.done() for future in (created, loss, step, bad, after))
    assert (loss.result().loss, step.result().grad_norm) == (2.0, 2.0)
    with pytest.raises(DataError, match="vocabulary"):
        bad.result()
    with pytest.raises(MegascendError, match="gradients are incomplete"):
        after.result()


def test_requests_of_an_adapter_that_was_not_created_fail(queue, backend):
    def refuse():
        raise ConfigError("rank 65 is above 64")

    created, loss = queue.call("new", refuse), queue.forward_backward("new", [sample(1)])
    other = queue.forward_backward("a", [sample(1)])
    assert other.result().loss == 1.0
    with pytest.raises(ConfigError, match="rank 65"):
        created.result()
    with pytest.raises(ConfigError, match="unknown adapter 'new'"):
        loss.result()
    assert queue.pending("new") == 0
    backend.adapters["new"] = Adapter()
    assert queue.forward_backward("new", [sample(1)]).result().loss == 1.0


def test_call_out_of_memory_fails_alone_unless_other_ranks_may_wait(queue, backend):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    call, other = queue.call("a", full), queue.forward_backward("a", [sample(1)])
    assert other.result().loss == 1.0
    with pytest.raises(OutOfDeviceMemoryError, match="no room for this request"):
        call.result()
    backend._world.size = 2
    queue.call("a", full)
    with pytest.raises(OutOfDeviceMemoryError):
        queue.run_once()


def test_a_few_calls_run_between_two_units_those_of_all_adapters_in_turns(backend):
    queue, order = AdapterQueue(backend), []
    for turn in range(CALLS_AT_ONCE):
        for name in "ab":
            queue.call(name, lambda entry=(name, turn): order.append(entry))
    unit = queue.forward_backward("c", [sample(1)])
    queue.run_once()
    assert unit.done()
    assert order == [(name, turn) for turn in range(CALLS_AT_ONCE // 2) for name in "ab"]
