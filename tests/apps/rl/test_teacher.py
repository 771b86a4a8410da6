"""On-policy distillation: the loss of recorded rollouts against plain PyTorch, and a student that learns its teacher."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.rl.test_learn import recorded
from megascend.apps.rl import teacher as teacher_module
from megascend.apps.rl.learn import learn
from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.teacher import Teacher, TeacherScores, TrainerTeacher, check_teacher
from megascend.apps.rl.train import train_rl
from megascend.apps.rl.trial import describe_teacher
from megascend.apps.train.teacher_model import TeacherModel
from megascend.config.rl import Objective, RlConfig, TeacherSettings
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend
from megascend.training.batch.candidates import Candidates
from support.rl_runs import RecordedEngine
from support.runs import metrics

pytestmark = pytest.mark.usefixtures("megatron_imported")
TRAJECTORIES = [trajectory for group in recorded() for trajectory in group.trajectories]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write student and teacher: tiny models with one tokenizer."""
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    folder = tmp_path_factory.mktemp("teacher")
    for seed, name in enumerate(("student", "teacher")):
        write_checkpoint(folder / name, ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), seed)
    teacher = load(folder / "teacher").float()
    with torch.no_grad():  # sure of some tokens, while a random model is of none
        teacher.lm_head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    teacher.save_pretrained(folder / "teacher")
    return folder / "student", folder / "teacher"


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()


def distributions(model: Any, trajectory: Any) -> torch.Tensor:
    """Return log-probabilities [tokens, vocabulary] in the places of the tokens after the prompt."""
    ids = torch.tensor([[*trajectory.prompt_tokens, *trajectory.tokens]])
    return model(ids).logits[0, len(trajectory.prompt_tokens) - 1 : -1].log_softmax(-1)


@pytest.mark.nightly_cases("policy")  # covered: policy and rewards; whole distributions below
@pytest.mark.parametrize("loss", ["policy", "policy and rewards", "forward_kl", "reverse_kl"])
def test_step_on_recorded_rollouts_is_that_of_plain_pytorch(loss: str, models: tuple[Path, Path]) -> None:
    student, teacher = map(load, models)
    rewards, name = loss.endswith("rewards"), loss.split()[0]
    settings = TeacherSettings(model=models[1], loss=name, coefficient=0.5, rewards=rewards, top=5)
    terms, logprobs, candidates = [], [], []
    for group in recorded():
        values = torch.tensor(group.rewards, dtype=torch.float64)
        earned = (values - values.mean()) / (values.std() + 1e-6)
        for trajectory, advantage in zip(group.trajectories, earned, strict=True):
            p, tokens, mask = (
                distributions(student, trajectory),
                torch.tensor(trajectory.tokens),
                torch.tensor(trajectory.mask),
            )
            with torch.no_grad():
                q = distributions(teacher, trajectory)
            logprobs.append(q.gather(1, tokens[:, None])[:, 0].float())
            top = q.topk(5)
            candidates.append(Candidates(top.indices, top.values))
            now, engine = p.gather(1, tokens[:, None])[:, 0], torch.tensor(trajectory.logprobs, dtype=torch.float64)
            advantages = -0.5 * (engine - q.gather(1, tokens[:, None])[:, 0]) + (advantage if rewards else 0.0)
            a, b = (values.exp().gather(1, top.indices) for values in (q, p))
            a, b = (torch.cat([values, 1 - values.sum(1, keepdim=True)], 1) for values in (a, b))
            by_loss = {
                "policy": -(now - engine).exp() * advantages,
                "forward_kl": (a * (a / b).log()).sum(1),
                "reverse_kl": (b * (b / a).log()).sum(1),
            }
            terms.append(by_loss[name][mask])
    expected = torch.cat(terms).mean()
    expected.backward()
    norm = float(torch.nn.utils.get_total_norm([value.grad for value in student.parameters()]))
    scores = TeacherScores(settings, logprobs, None if name == "policy" else candidates)
    total = sum(
        float((torch.tensor(t.logprobs) - part)[torch.tensor(t.mask)].sum())
        for t, part in zip(TRAJECTORIES, logprobs, strict=True)
    )
    assert scores.divergence(recorded()) == pytest.approx(total / sum(t.sampled_tokens for t in TRAJECTORIES))
    objective = Objective(loss="importance_sampling", correction="none", measure_every=0)

    def on_rank() -> tuple[float, float]:
        with case_backend(Case("single"), models[0]) as backend:
            learned = learn(backend, recorded(), objective, measured=False, teacher=scores)
            return learned.result.loss, backend.optimizer_step().grad_norm

    for world_size in (1, 2):
        for result in run_distributed(on_rank, world_size, init=False, timeout_s=120):
            assert result == pytest.approx((float(expected.detach()), norm), rel=2e-4)


@pytest.mark.parametrize(
    ("world_size", "average"), [(1, "tokens"), (2, "responses")], ids=["one rank", "two ranks, by response"]
)
def test_step_with_whole_distributions_is_that_of_plain_pytorch(
    world_size: int, average: Any, models: tuple[Path, Path]
) -> None:
    """Recorded trajectories have several turns; what the environment wrote counts nowhere."""
    student, teacher = map(load, models)
    losses, expected = ("policy", "forward_kl", "reverse_kl", "jsd"), {}
    divergences = []
    for name in losses:
        terms = []
        for trajectory in TRAJECTORIES:
            p, mask = distributions(student, trajectory), torch.tensor(trajectory.mask)
            with torch.no_grad():
                q = distributions(teacher, trajectory)
            tokens = torch.tensor(trajectory.tokens)[:, None]
            engine = torch.tensor(trajectory.logprobs, dtype=torch.float64)
            scores = q.gather(1, tokens)[:, 0]
            m = (0.3 * q.exp() + 0.7 * p.exp()).log()
            values = {
                "policy": (p.gather(1, tokens)[:, 0] - engine).exp() * 0.5 * (engine - scores),
                "forward_kl": (q.exp() * (q - p)).sum(1),
                "reverse_kl": (p.exp() * (p - q)).sum(1),
                "jsd": 0.3 * (q.exp() * (q - m)).sum(1) + 0.7 * (p.exp() * (p - m)).sum(1),
            }[name][mask]
            terms.append(values if average == "tokens" else values.mean()[None])
            if name == "policy":
                divergences.append((engine - scores)[mask])
        student.zero_grad()
        loss = torch.cat(terms).mean()
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([value.grad for value in student.parameters()]))
        expected[name] = (float(loss.detach()), norm, float(torch.cat(divergences).mean()))
    objective = Objective(loss="importance_sampling", correction="none", measure_every=0, average=average)

    def on_rank() -> dict[str, tuple[float, float, float]]:
        results = {}
        still = Case("single", optimizer={"lr": 0.0, "weight_decay": 0.0})
        with case_backend(still, models[0]) as backend:
            model = TeacherModel(backend, models[1], "teacher.model")
            for name in losses:
                settings = TeacherSettings(engine="trainer", model=models[1], loss=name, coefficient=0.5, beta=0.3)
                scores = TrainerTeacher(backend, settings, model).scores(recorded())
                learned = learn(backend, recorded(), objective, measured=False, teacher=scores)
                norm = backend.optimizer_step().grad_norm
                results[name] = learned.result.loss, norm, scores.divergence(recorded())
        return results

    for rank in run_distributed(on_rank, world_size, init=False, timeout_s=240):
        for name in losses:
            assert rank[name] == pytest.approx(expected[name], rel=2e-4), name


def test_engine_returns_the_likeliest_tokens_of_every_position(models: tuple[Path, Path]) -> None:
    tokens = [3, 50, 7, 7, 120]
    with torch.no_grad():
        logprobs = load(models[1])(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)

    async def ask() -> Any:
        engine = LocalEngine(models[1], own_process=False)
        try:
            return await engine.top_logprobs(tokens, 4), await engine.logprobs(tokens)
        finally:
            await engine.close()

    top, plain = asyncio.run(ask())
    assert (
        plain
        == list(top.logprobs)
        == pytest.approx(logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    )
    assert [list(row) for row in top.ids] == logprobs.topk(4).indices.tolist()
    assert [list(row) for row in top.top_logprobs] == [
        pytest.approx(row, abs=1e-5) for row in logprobs.topk(4).values.tolist()
    ]


def settings(models: tuple[Path, Path], folder: Path, **changes: Any) -> dict[str, Any]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"say {number}:"}) + "\n" for number in range(7)), encoding="utf-8"
    )
    values = {
        "model": models[0],
        "output": folder / "out",
        "steps": 30,
        "self_check": False,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.01},
        "rollout": {"prompts": prompts, "prompts_per_step": 4, "group_size": 4, "max_tokens": 6, "max_lag": 0},
        "teacher": {"model": models[1]},
        "objective": {"correction": "none", "measure_every": 0, "loss": "importance_sampling"},
        "plot": False,
        "export": False,
        "timeout_s": 60,
    }
    return values | changes


def test_student_learns_a_teacher_without_rewards(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The whole distributions of a teacher on the trainer's ranks; a step of each loss is compared above."""
    teacher = {"model": models[1], "loss": "reverse_kl", "engine": "trainer"}
    config = RlConfig(**settings(models, tmp_path, teacher=teacher))
    run_distributed(
        lambda: train_rl(
            config, engines=lambda config: [LocalEngine(config.model, name="engine", own_process=False, seed=1)]
        ),
        1, init=False, timeout_s=240,
    )  # fmt: skip
    rows = metrics(tmp_path / "out")
    divergences = [row["teacher_kl"] for row in rows]
    assert len(divergences) == 30
    assert sum(divergences[-5:]) < 0.7 * sum(divergences[:5])
    assert all(row["equal"] == 0 for row in rows)


@pytest.mark.nightly
def test_answers_that_overlap_the_step_change_no_figure(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a run that asks as groups arrive with one that asks before each step: each trajectory is asked about once."""
    requests: list[tuple[str, tuple[int, ...]]] = []
    ask_ahead = Teacher.ask_ahead
    early = 0

    class Counting(LocalEngine):
        async def top_logprobs(self, tokens: Any, count: int, adapter: str | None = None) -> Any:
            requests.append((folder.name, tuple(tokens)))
            return await super().top_logprobs(tokens, count, adapter)

    def count_and_ask(teacher: Teacher, group: Any) -> None:
        nonlocal early
        early += threading.current_thread() is not threading.main_thread()
        if folder.name == "ahead" or threading.current_thread() is threading.main_thread():
            ask_ahead(teacher, group)

    monkeypatch.setattr("megascend.apps.rl.rollout.engines.local.LocalEngine", Counting)
    monkeypatch.setattr(Teacher, "ask_ahead", count_and_ask)
    figures, names = {}, ("step", "loss", "grad_norm", "teacher_kl")
    for name in ("ahead", "before"):
        folder = tmp_path / name
        folder.mkdir()
        teacher = {"model": models[1], "loss": "forward_kl", "top": 8}
        values = settings(models, folder, steps=6, teacher=teacher)
        values["rollout"] |= {"in_order": True, "max_lag": 1}
        config = RlConfig(**values)
        train_rl(config, engines=lambda config: [RecordedEngine(config.model, name="engine", own_process=False)])
        rows = metrics(folder / "out")
        figures[name] = [{key: row[key] for key in names} for row in rows]
    assert figures["ahead"] == figures["before"]
    assert early >= 2 * 6 * 4  # groups of both runs
    sequences = [tokens for name, tokens in requests if name == "before" and tokens != (0, 0)]
    assert len(sequences) == 6 * 16
    assert Counter(sequences) - Counter(tokens for name, tokens in requests if name == "ahead") == Counter()


class InProcess(LocalEngine):
    """Engine of a teacher without a process of its own, whose start would take longer than the run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, own_process=False)


class Silent(InProcess):
    async def logprobs(self, *_: Any, **__: Any) -> list[float]:
        raise EngineError("the teacher is out of order")


def test_teacher_that_fails_ends_the_run_on_every_rank(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollout.engines.local.LocalEngine", Silent)
    config = RlConfig(**settings(models, tmp_path))

    def run() -> None:
        with pytest.raises(EngineError, match="the teacher is out of order"):
            train_rl(config, engines=lambda config: [InProcess(config.model, name="engine")])

    run_distributed(run, 2, init=False, timeout_s=240)


@pytest.mark.parametrize("ending", ["fails", "stopped"])
def test_last_step_is_saved_if_the_teacher_fails_or_a_signal_comes_while_it_is_lost(
    ending: str, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "RETRY_S", 0.05)
    monkeypatch.setattr(teacher_module, "SLICE_S", 0.2)
    monkeypatch.setattr("megascend.apps.rl.rollout.engines.local.LocalEngine", InProcess)
    limit = 1 + 2 * 16  # the check, and the trajectories of two steps

    class Ending(InProcess):
        requests = 0

        async def logprobs(self, *arguments: Any, **options: Any) -> list[float]:
            self.requests += 1
            if self.requests > limit and ending == "fails":
                raise EngineError("the teacher is out of order")
            if self.requests > limit:
                if self.requests == limit + 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                raise EngineLostError("http://host:1: connection refused")
            return await super().logprobs(*arguments, **options)

    def run(name: str, resume: str | None = None) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        values = settings(models, folder, steps=4, checkpoint={"every": 0})
        values["rollout"] |= {"in_order": True}
        config = RlConfig(**values)
        engines = lambda config: [RecordedEngine(config.model, name="engine", own_process=False)]  # noqa: E731
        try:
            return train_rl(config, engines=engines, resume=resume)
        except EngineError as error:
            return str(error)

    def rows(name: str) -> list[tuple[float, ...]]:
        names = ("step", "loss", "grad_norm", "teacher_kl")
        return [tuple(row[key] for key in names) for row in metrics(tmp_path / name / "out")]

    def in_a_fork(*arguments: Any) -> Any:
        return run_distributed(run, 1, *arguments, init=False, timeout_s=240)[0]

    with monkeypatch.context() as patch:
        patch.setattr("megascend.apps.rl.rollout.engines.local.LocalEngine", Ending)
        outcome = in_a_fork("interrupted")
    if ending == "fails":
        assert "the teacher is out of order" in outcome
    else:
        assert (outcome.steps, outcome.stopped) == (2, "SIGTERM")
    assert [path.name for path in (tmp_path / "interrupted/out/checkpoints").glob("step-*")] == ["step-00000002"]
    assert in_a_fork("interrupted", "auto").steps == 4
    in_a_fork("uninterrupted")
    assert rows("interrupted") == rows("uninterrupted")


def test_trainer_teacher_scores_the_distribution_that_was_sampled(models: tuple[Path, Path]) -> None:
    """Compare with transformers' logits, divided by the temperature and over the allowed tokens; a wrong one moves a student."""
    teacher, groups, expected = load(models[1]), [], []
    for group in recorded():
        parts = []
        for part in group.trajectories:
            allowed = tuple((token, 3, 4) if mark else () for token, mark in zip(part.tokens, part.mask, strict=True))
            parts.append(replace(part, temperature=0.5, allowed=tuple(tuple(dict.fromkeys(ids)) for ids in allowed)))
            logprobs = (distributions(teacher, part).detach() / 0.5).log_softmax(-1)
            rows = zip(logprobs, parts[-1].tokens, parts[-1].allowed, strict=True)
            expected.append(
                [float(row[token] - (row[list(ids)].logsumexp(0) if ids else 0)) for row, token, ids in rows]
            )
        groups.append(replace(group, trajectories=tuple(parts)))

    def on_rank() -> list[list[float]]:
        with case_backend(Case("single"), models[0]) as backend:
            settings = TeacherSettings(engine="trainer", model=models[1])
            model = TeacherModel(backend, models[1], "teacher.model")
            return [part.tolist() for part in TrainerTeacher(backend, settings, model).scores(groups).logprobs]

    (result,) = run_distributed(on_rank, 1, init=False, timeout_s=240)
    for values, reference in zip(result, expected, strict=True):
        assert values == pytest.approx(reference, abs=1e-4)


def test_teacher_with_another_vocabulary_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(models[0])
    size = len(tokenizer.get_vocab())
    for engine in ("local", "trainer"):
        config = RlConfig(**settings(models, tmp_path, teacher={"model": models[1], "engine": engine}))
        check_teacher(config, inspect_checkpoint(models[0]), AutoTokenizer.from_pretrained(models[0]))
        tokenizer.add_tokens(["another"])
        with pytest.raises(
            ConfigError, match=rf"another vocabulary than the model \({size} tokens, the model {size + 1}\)"
        ):
            check_teacher(config, inspect_checkpoint(models[0]), tokenizer)


def test_dry_run_asks_a_server_of_the_teacher(models: tuple[Path, Path], tmp_path: Path) -> None:
    class Routes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            count = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"])
            body = json.dumps(
                {"meta_info": {"input_token_logprobs": [[None, 0, None], *[[-1.0, 0, None]] * (count - 1)]}}
            )
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: Any) -> None: ...

    def description(address: str) -> str | None:
        return describe_teacher(RlConfig(**settings(models, tmp_path, teacher={"engine": address})))

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"sglang:http://127.0.0.1:{server.server_port}"
        assert description(address) == f"{address}: policy; answers"
        server.shutdown()
    assert f"{address}: policy; warning: " in str(description(address))
