"""Scores of texts by a backend's model for lm-eval-harness, on any engine and layout.

Rank 0 runs the harness (:mod:`megascend.apps.train.harness`), which builds prompts and computes metrics. The other ranks follow
it: every request for log-probabilities or responses is sent to all of them as tokens, and computed by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from tqdm import tqdm

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.apps.sampling.sampler import Sampler
from megascend.apps.train.generation import stop_tokens
from megascend.engines.step.step import LOGIT_ROWS, Step
from megascend.errors import ConfigError, EvaluationError, MegascendError
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.backend import Backend
    from megascend.config import ValidationTasks
    from megascend.engines.base import Output
    from megascend.training.batch.micro_batch import MicroBatch

SEQUENCES = 1024
"""Sequences that are sent to all ranks and scored at a time."""
RESPONSE_SLICE = 64
"""Tokens of each response that are sampled between two calls of ``before_batch``."""


@dataclass(frozen=True)
class TaskScores:
    """Metrics of tasks.

    Attributes:
        values: by ``TASK/METRIC``, or ``TASK/METRIC/FILTER`` of filtered responses; also of groups that have metrics.
        errors: standard errors by the same names, as far as they are known.
        higher_is_better: by the same names; None: the task does not say.
        report: the harness's own results with its configuration and every document, on rank 0.
    """

    values: Mapping[str, float]
    errors: Mapping[str, float]
    higher_is_better: Mapping[str, bool | None]
    documents: Mapping[str, int]
    report: Mapping[str, Any] | None = None

    def metric(self, name: str) -> tuple[float, bool]:
        """Return a metric and whether higher is better."""
        if name not in self.values:
            raise EvaluationError(f"validation.metric: {name} was not measured; measured are {', '.join(self.values)}")
        direction = self.higher_is_better.get(name)
        if direction is None:
            raise EvaluationError(f"validation.metric: the task of {name} does not say whether higher is better")
        return self.values[name], direction

    def lines(self) -> list[str]:
        """Return a line for each metric: its name, value and standard error."""
        width = max(map(len, self.values), default=0)
        notes = {name: f" ± {error:.2g}" for name, error in self.errors.items()}
        return [f"{name:<{width}}  {value:.5g}{notes.get(name, '')}" for name, value in self.values.items()]


class Tasks(Protocol):
    """Tasks that rank 0 measures with a scorer."""

    def evaluate(self, scorer: TaskScorer, *, errors: bool) -> TaskScores:
        """Measure all tasks; see :class:`megascend.apps.train.harness.TaskSuite`."""
        ...


class TaskScorer:
    """Log-probabilities and responses of a backend's model for tasks. Collective, unless stated otherwise.

    Args:
        model: the model's directory, whose generation_config.json may name tokens that end a response.
        adapter: name of the adapter that is measured; None: the model itself.
        template: chat template of the run; default: the tokenizer's.
        show: show progress on stderr, on rank 0.
        before_batch: called on every rank before it scores sequences or samples responses; may raise, on all of them.

    Attributes:
        template: chat template of tasks that are rendered as conversations; else None.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        model: Path,
        tasks: ValidationTasks,
        adapter: str | None,
        template: ChatTemplate | None = None,
        *,
        show: bool = False,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        if tasks.chat_template and not tokenizer.chat_template:
            raise ConfigError("chat_template: true of the tasks, and the model's tokenizer has no chat template")
        self.backend, self.tokenizer = backend, tokenizer
        self.template = (template or ChatTemplate(tokenizer)) if tasks.chat_template else None
        # As in the harness: outside conversations, the end of a turn does not end the response.
        self._stops = tuple(sorted(stop_tokens(tokenizer, model, self.template)))
        self._adapter, self._show, self._before_batch = adapter, show, before_batch
        budget = backend.engine.batching.budget
        self.limit = min(backend.max_length, budget - budget % backend.engine.layout.padded_length(1))
        self._computing = False

    def measure(self, suite: Tasks | None, *, errors: bool = False) -> TaskScores:
        """Measure the tasks of ``suite``, which rank 0 has; the same metrics on every rank.

        Raises:
            EvaluationError: on every rank: a task failed.
        """
        backend = self.backend
        with backend.groups.monitor.phase("evaluation"):
            if suite is None:
                return self._follow()
            try:
                scores = suite.evaluate(self, errors=errors)
            except Exception as error:
                if self._computing:  # the other ranks are in the same computation
                    raise
                problem = error
                if not isinstance(error, MegascendError):
                    problem = EvaluationError(f"lm_eval failed at a task: {type(error).__name__}: {error}")
                    problem.__cause__ = error

                def fail() -> None:
                    raise problem

                backend.from_rank_0(fail)
                raise
            backend.from_rank_0(lambda: replace(scores, report=None))
            return scores

    def _follow(self) -> TaskScores:
        """Take part in what rank 0 computes, until it has the metrics."""
        while True:
            request: Any = self.backend.from_rank_0(lambda: None)
            if isinstance(request, TaskScores):
                return request
            name, arguments = request
            getattr(self, name)(*arguments)

    def _everywhere(self, name: Literal["score", "respond"], *arguments: Any) -> Any:
        """Call a method of this class on all ranks; on rank 0, while the others follow."""
        self._computing = True
        self.backend.from_rank_0(lambda: (name, arguments))
        result = getattr(self, name)(*arguments)
        self._computing = False
        return result

    def scores(self, sequences: Sequence[tuple[list[int], int]], *, greedy: bool) -> list[tuple[float, bool]]:
        """Return the log-probability of the last n tokens of each sequence and, with ``greedy``, if all are the likeliest.

        On rank 0, while the others follow.

        Args:
            sequences: token ids and n.
        """
        # The longest first: what does not fit into memory fails at once. Answers to the same question are neighbours.
        order = sorted(range(len(sequences)), key=lambda index: (-len(sequences[index][0]), sequences[index][0]))
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(order), desc="log-probabilities", disable=not self._show) as bar:
            for start in range(0, len(order), SEQUENCES):
                chunk = order[start : start + SEQUENCES]
                values = self._everywhere("score", [sequences[index] for index in chunk], greedy)
                results |= zip(chunk, values, strict=True)
                bar.update(len(chunk))
        return [results[index] for index in range(len(sequences))]

    def responses(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        """Return a response to each prompt. On rank 0, while the others follow."""
        return self._everywhere("respond", list(requests)) if requests else []

    @torch.no_grad()
    def score(self, sequences: Sequence[tuple[list[int], int]], greedy: bool) -> list[tuple[float, bool]]:
        """Compute :meth:`scores` on all ranks, which share the sequences."""
        self._before_batch()
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (tokens, count) in enumerate(sequences):
            # Answers of one token to the same question take one pass; a negative number marks an unused position.
            key = tuple(tokens[:-1]) if greedy and count == 1 else (-1, index)
            groups.setdefault(key, []).append(index)
        samples: dict[int, list[int]] = {}
        batch = []
        for members in groups.values():
            tokens, count = sequences[members[0]]
            batch.append(Sample.causal(tokens, len(tokens) - count, adapter=self._adapter))
            samples[id(batch[-1])] = members  # by identity: shard() returns these objects
        share = self.backend.shard(batch)
        local: dict[int, tuple[float, bool]] = {}
        if greedy:
            answers = [[sequences[index][0][-1] for index in samples[id(sample)]] for sample in share]
            names = ("logprobs", "likeliest", "answers")
            outputs = Step(self.backend.engine).token_scores("lm_eval", share, None, names, answer_scores(answers))
            for number, sample in enumerate(share):
                logprobs, likeliest = outputs["logprobs"][number], outputs["likeliest"][number]
                members = samples[id(sample)]
                for column, index in enumerate(members):
                    tokens, count = sequences[index]
                    value = (
                        logprobs[-count:].double().sum()
                        if len(members) == 1
                        else outputs["answers"][number][-1, column]
                    )
                    local[index] = value.item(), likeliest[-count:].tolist() == tokens[-count:]
        else:
            for sample, logprobs in zip(share, self.backend.forward(share).logprobs, strict=True):
                (index,) = samples[id(sample)]
                local[index] = logprobs[-sequences[index][1] :].double().sum().item(), False
        results: dict[int, tuple[float, bool]] = {}
        for part in self.backend.gather_by_data_rank(local):
            results |= part
        return [results[index] for index in range(len(sequences))]

    def respond(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        """Compute :meth:`responses` on all ranks."""
        requests = [SampleRequest(tokens, params, self._adapter) for tokens, params in prompts]
        # With special tokens: a task may stop at one.
        sampler = Sampler(
            self.backend, decode=lambda tokens: str(self.tokenizer.decode(list(tokens))), end_tokens=self._stops
        )
        results: dict[int, list[int]] = {}
        show = self._show and self.backend.rank == 0
        with tqdm(total=len(requests), desc="responses", disable=not show) as bar:
            for finished in sampler.in_slices(requests, RESPONSE_SLICE):
                self._before_batch()
                for index, result in finished.items():
                    if result.error is not None:
                        raise EvaluationError(f"a task's prompt cannot be answered: {result.error}")
                    results[index] = list(result.samples[0].tokens)
                bar.update(len(finished))
        return [results[index] for index in range(len(requests))]


def answer_scores(answers: Sequence[Sequence[int]]) -> Callable[[MicroBatch, Output], dict[str, torch.Tensor | None]]:
    """Return a function that scores a micro batch's targets, of which those with a weight are a continuation.

    Its results are the targets' log-probabilities, the likeliest token at each target with a weight, and the log-probabilities of
    ``answers`` there [tokens, answers]: tokens that may end a sample, more than one only if its continuation is one token.
    """
    width = max(map(len, answers), default=1)

    def scores(batch: MicroBatch, output: Output) -> dict[str, torch.Tensor | None]:
        likeliest = torch.zeros(len(batch.targets), dtype=torch.int64)
        logprobs = torch.zeros(len(batch.targets), width)
        # Full logits, which travel to the host, only where they are needed: continuations are short and contexts are long.
        rows, samples = batch.weights.cpu().nonzero()[:, 0], batch.sample.tolist()
        for part in rows.split(LOGIT_ROWS) if len(rows) else ():
            logits = output.logits(part)
            likeliest[part] = logits.argmax(-1)
            for row, row_logits in zip(part.tolist(), logits, strict=True):
                tokens = answers[batch.members[samples[row]]]
                if len(tokens) > 1:
                    logprobs[row, : len(tokens)] = row_logits.log_softmax(-1)[list(tokens)]
        return {"logprobs": output.logprobs(False)[0], "likeliest": likeliest, "answers": logprobs}

    return scores
