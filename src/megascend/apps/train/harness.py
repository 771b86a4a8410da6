"""lm-eval-harness on rank 0: its tasks, and its view of a backend's model. Imports lm_eval."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets.config
import datasets.utils
import huggingface_hub.constants
import lm_eval.api.metrics
import lm_eval.api.task
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
from tqdm import tqdm

from megascend.apps.data.messages import parse_message
from megascend.apps.sampling.request import SamplingParams
from megascend.apps.train.task_scorer import TaskScorer, TaskScores
from megascend.changes import patched
from megascend.errors import EvaluationError
from megascend.runtime.io.atomic import replacing

if TYPE_CHECKING:
    from megascend.config import ValidationTasks

logger = logging.getLogger(__name__)

SEEDS = {"random": 0, "numpy": 1234, "fewshot": 1234}
"""Seeds of the harness's own command line."""
RESPONSE_TOKENS = 256
"""Longest response to a task that sets no limit, as in the harness."""
BOOTSTRAP = 1000
"""Resamples for standard errors without a formula."""
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Generation settings that the sampler does not have, with the values at which they have no effect."""
SAMPLED = ("do_sample", "temperature", "top_p", "top_k")


def write_reports(path: Path, scores: Mapping[str, TaskScores]) -> None:
    """Write the harness's own results as JSON, with every document; those of several adapters by name."""
    reports = {adapter: part.report for adapter, part in scores.items()}
    content = next(iter(reports.values())) if len(reports) == 1 else reports
    with replacing(path) as fresh:
        fresh.write_text(json.dumps(content, indent=1, default=handle_non_serializable, ensure_ascii=False), "utf-8")


# --- tasks ---


class TaskSuite:
    """Tasks with their data, on rank 0.

    Args:
        setting: where the tasks are named, for messages.
    """

    def __init__(self, settings: ValidationTasks, setting: str) -> None:
        self.settings = settings
        files = [name for name in settings.names if Path(name).suffix in (".yaml", ".yml")]
        for name in files:
            if not Path(name).is_file():
                raise EvaluationError(f"{setting}: {name} is not a file")
        try:
            # Indexing the harness's own tasks takes ten seconds or more; groups need the index, tasks in files do not.
            needs_index = len(files) < len(settings.names) or any(
                line.startswith("group:") for name in files for line in Path(name).read_text("utf-8").splitlines()
            )
            manager = TaskManager(include_defaults=needs_index)
            for name in settings.names:
                if name not in files and name not in manager.all_tasks:
                    alike = get_close_matches(name, manager.all_tasks, 1)
                    advice = f", did you mean {alike[0]}?" if alike else ""
                    raise EvaluationError(f"{setting}: lm_eval has no task, group or tag {name!r}{advice}")
            with offline():
                self._loaded = manager.load(list(settings.names))
        except EvaluationError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
            raise EvaluationError(
                f"{setting}: {', '.join(settings.names)} cannot be loaded: {reason}. Data are read from files or from the cache "
                "of datasets (HF_HOME), and nothing is downloaded"
            ) from error
        self.tasks: dict[str, Any] = self._loaded["tasks"]
        for name, task in self.tasks.items():
            if missing := missing_metric(task):
                raise EvaluationError(
                    f"{setting}: task {name} has the metric {missing}, which neither lm_eval nor the cache of the package "
                    "evaluate has; nothing is downloaded"
                )
            if settings.fewshot is not None:
                if task.get_config("num_fewshot") == 0 and settings.fewshot:
                    logger.warning(
                        "task %s has num_fewshot: 0, which fewshot: %d does not change", name, settings.fewshot
                    )
                else:
                    task.set_config(key="num_fewshot", value=settings.fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def check_metric(self, name: str) -> None:
        """Raise EvaluationError if no task has a metric of that name, as far as tasks declare theirs."""
        names = [f"{task}/{metric}" for task, entry in self.tasks.items() for metric in entry.aggregation()]
        for group in self._loaded.get("groups", {}).values():
            names += [f"{group.name}/{entry.metric}" for entry in group.aggregate_metric_list or ()]
        if not any(name == metric or name.startswith(f"{metric}/") for metric in names):
            raise EvaluationError(f"validation.metric: no task has {name}; they have: {', '.join(names)}")

    def evaluate(self, scorer: TaskScorer, *, errors: bool) -> TaskScores:
        """Measure all tasks, with the model's log-probabilities and responses.

        Args:
            errors: also estimate standard errors, and keep every document in the report.
        """
        for task in self.tasks.values():
            # At every measurement the same examples.
            task.set_fewshot_seed(seed=SEEDS["fewshot"])
        chat = self.settings.chat_template
        with harness_context():
            report = evaluate(
                HarnessModel(scorer),
                self._loaded,
                limit=self.settings.limit,
                bootstrap_iters=BOOTSTRAP if errors else 0,
                log_samples=errors,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        assert report is not None  # the harness sees a single rank
        return scores_of(report)


def missing_metric(task: Any) -> str | None:
    """Return a metric of responses that the harness could not load, which it logs and reports once all responses are there."""
    # Other tasks, and those with custom functions, do not call the listed ones.
    calls = type(task) is ConfigurableTask and task.get_config("output_type") == "generate_until"
    if not calls or task.get_config("process_results") is not None:
        return None
    return next((name for name, function in task._metric_fn_list.items() if function is None), None)


def scores_of(report: Mapping[str, Any]) -> TaskScores:
    """Return the metrics of the harness's results, whose keys are ``METRIC,FILTER`` and ``METRIC_stderr,FILTER``."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    directions: dict[str, bool | None] = {}
    for task, metrics in report["results"].items():
        for key, value in metrics.items():
            metric, separator, metric_filter = key.partition(",")
            if not separator or not isinstance(value, Real):
                continue
            name = "/".join(
                (task, metric.removesuffix("_stderr"), *([] if metric_filter == "none" else [metric_filter]))
            )
            if metric.endswith("_stderr"):
                errors[name] = float(value)
                continue
            values[name] = float(value)
            directions[name] = report["higher_is_better"].get(task, {}).get(metric)
    documents = {task: counts["effective"] for task, counts in report["n-samples"].items()}
    return TaskScores(values, errors, directions, documents, report)


@contextmanager
def offline() -> Iterator[None]:
    """Read data sets and metrics from files and the cache only, within the context, and without progress bars."""
    bars_enabled = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    evaluate_offline = os.environ.get("HF_EVALUATE_OFFLINE")
    # Read by the package evaluate, which lm_eval imports for metrics that it does not have: in itself that takes seconds.
    os.environ["HF_EVALUATE_OFFLINE"] = "1"
    try:
        with ExitStack() as stack:
            # Both read the variable HF_HUB_OFFLINE once, when they are imported.
            for owner in (huggingface_hub.constants, datasets.config):
                reason = "no downloads while lm_eval's tasks are loaded"
                stack.enter_context(patched(owner, "HF_HUB_OFFLINE", True, reason))
            yield
    finally:
        if evaluate_offline is None:
            del os.environ["HF_EVALUATE_OFFLINE"]
        else:
            os.environ["HF_EVALUATE_OFFLINE"] = evaluate_offline
        if bars_enabled:
            datasets.utils.enable_progress_bars()


@contextmanager
def harness_context() -> Iterator[None]:
    """Seed random numbers as the harness's command line does, within the context, and let it start no processes."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    metrics = lm_eval.api.metrics

    def bootstrap_stderr(metric: Any, values: Any, iters: int) -> float:
        return metrics.sample_stddev(metrics._bootstrap_internal(metric, iters)((0, values)))

    try:
        with (
            # Its own one forks this process, with the threads and connections of a rank.
            patched(metrics, "bootstrap_stderr", bootstrap_stderr, "resamples in this process"),
            patched(lm_eval.api.task, "tqdm", partial(tqdm, disable=True), "no progress bar for each of many tasks"),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# --- the model ---


class HarnessModel(TemplateLM):
    """The harness's view of a model, on rank 0 while the others follow.

    Tokens are those of lm_eval's own model ``hf``, so that the numbers are the same.
    """

    def __init__(self, scorer: TaskScorer) -> None:
        super().__init__()
        self._scorer = scorer
        self.tokenizer: Any = scorer.tokenizer
        self.max_length = scorer.limit

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that a text without a context is predicted from."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise EvaluationError(
                "the tokenizer has neither a bos_token nor an eos_token, from which a text without a context is predicted"
            )
        return eos if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; by default with those that the tokenizer puts before it, unless the text has them."""
        options: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation of a context, and if it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests], greedy=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, whose windows of the model's length are scored one by one."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            texts = [make_disjoint_window(window) for window in windows]
            pairs += texts
            owners += [number] * len(texts)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._scores(pairs, greedy=False), strict=True):
            totals[owner] += logprob
        return totals

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]], *, greedy: bool) -> list[tuple[float, bool]]:
        sequences, cut = [], 0
        for context, continuation in pairs:
            if not 0 < len(continuation) <= self.max_length or not context:
                raise EvaluationError(
                    f"a task has a context of {len(context)} and a continuation of {len(continuation)} tokens: at least 1 of "
                    f"each, at most {self.max_length} of a continuation (batching.max_length, or the model's)"
                )
            tokens = context + continuation
            cut += len(tokens) > self.max_length + 1
            # The last token is a target only.
            sequences.append((tokens[-(self.max_length + 1) :], len(continuation)))
        self._report_cut(cut, len(pairs))
        return self._scorer.scores(sequences, greedy=greedy)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a response to each context, up to the first of its stop texts."""
        end = self.tokenizer.decode(self.eot_token_id) if self.tokenizer.eos_token_id is not None else None
        prompts: list[tuple[list[int], SamplingParams]] = []
        stops, cut = [], 0
        for number, (context, settings) in enumerate(request.args for request in requests):
            options: dict[str, Any] = dict(normalize_gen_kwargs(settings, RESPONSE_TOKENS))
            until = handle_stop_sequences(options.pop("until"), eos=end)
            length = options.pop("max_gen_toks")
            room = self.max_length - length
            if room < 1:
                raise EvaluationError(
                    f"a task has max_gen_toks: {length}, and the model's context (or batching.max_length, micro_batch_tokens) is "
                    f"{self.max_length} tokens"
                )
            tokens = self.tok_encode(context)
            cut += len(tokens) > room
            texts = tuple(text for text in until if text)
            prompts.append((tokens[-room:], sampling_params(options, length, texts, SEEDS["fewshot"] + number)))
            stops.append(until)
        self._report_cut(cut, len(requests))
        responses = self._scorer.responses(prompts)
        return [
            postprocess_generated_text(self.tokenizer.decode(tokens, skip_special_tokens=True), until, None)
            for tokens, until in zip(responses, stops, strict=True)
        ]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation up to the assistant's turn, or up to the beginning of it that is given last."""
        template = self._scorer.template
        if template is None:
            raise EvaluationError("chat_template: true, and the model's tokenizer has no chat template")
        messages = [parse_message(dict(message), "a task's conversation") for message in chat_history]
        if add_generation_prompt:
            return template.rendering(messages, prompt=True).text
        return template.rendering(messages[:-1], prompt=True).text + str(messages[-1]["content"])

    def _report_cut(self, count: int, total: int) -> None:
        if count:
            logger.warning(
                "%d of %d texts of tasks are longer than %d tokens (the model's context, or batching.max_length and "
                "micro_batch_tokens), and were cut at their beginning",
                count,
                total,
                self.max_length,
            )


def sampling_params(options: Mapping[str, Any], length: int, stops: tuple[str, ...], seed: int) -> SamplingParams:
    """Return the sampler's settings for a task's ``generation_kwargs``, without ``until`` and the length."""
    for name, value in options.items():
        if name not in SAMPLED and value != NEUTRAL.get(name):
            raise EvaluationError(
                f"a task has generation_kwargs with {name}: {value}, which the sampler does not have; it has until, "
                f"max_gen_toks, {', '.join(SAMPLED)}"
            )
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
    return SamplingParams(
        length, temperature, float(options.get("top_p", 1.0)), int(options.get("top_k", -1)), seed, stops
    )
