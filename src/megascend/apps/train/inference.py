"""Responses and scores of a model that is not in training: ``megascend generate``, ``chat`` and ``eval`` on every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.rl.rollout.prompts import Prompt, prompt_tokens
from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.apps.sampling.sampler import Sampler
from megascend.apps.train.generation import response_text, stop_tokens
from megascend.config import Adapters, Batching, Parallel, PlatformName, Precision
from megascend.config.registry import ENGINES
from megascend.errors import DataError
from megascend.models.checkpoint_files.files import read_config
from megascend.runtime.distributed.launch import Launch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.train.task_scorer import TaskScores
    from megascend.backend import Backend
    from megascend.config import ValidationTasks

ADAPTER_KEY = "adapter"
"""Key of a prompt's line that names the adapter to answer with; null: the base model."""
LONGEST_CONTEXT = 32768
"""Most tokens of prompt and response together, if the model's context is longer."""


@dataclass(frozen=True)
class InferenceSettings:
    """Settings of a model that answers.

    Attributes:
        adapters: directories of LoRA adapters in peft's format, by name.
        tokenizer: directory of the tokenizer and its chat template; default: the model's.
        template_options: further variables of the chat template.
    """

    model: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)
    tokenizer: Path | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "single"
    platform: PlatformName = "auto"
    precision: Precision = "bf16"
    tensor: int = 1

    @property
    def default_adapter(self) -> str | None:
        """Name of the adapter of prompts that name none: the only one."""
        return next(iter(self.adapters)) if len(self.adapters) == 1 else None


@dataclass(frozen=True)
class Response:
    """Response to a prompt.

    Attributes:
        text: without special tokens.
        tokens: number of tokens, with the one that ended it.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        error: why there is none, or None.
    """

    text: str = ""
    tokens: int = 0
    finish_reason: str = ""
    error: str | None = None


class ResponseModel:
    """A loaded model with its tokenizer. Collective: all ranks make the same calls.

    Attributes:
        limit: most tokens of prompt and response together.
    """

    def __init__(self, settings: InferenceSettings, backend: Backend) -> None:
        from transformers import AutoTokenizer

        self.settings, self.backend = settings, backend
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(settings.tokenizer or settings.model)
        self.template = (
            ChatTemplate(self.tokenizer, settings.template_options) if self.tokenizer.chat_template else None
        )
        self._stops = tuple(sorted(stop_tokens(self.tokenizer, settings.model, self.template)))
        self.limit = min(backend.max_length, backend.engine.batching.budget)

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt with ``prompt`` or ``messages``, as training renders them."""
        return prompt_tokens(prompt, self.tokenizer, template_options=self.settings.template_options)

    def request(self, prompt: Prompt, sampling: SamplingParams) -> SampleRequest:
        """Return the sampler's request for a prompt, whose adapter is loaded."""
        stops = (*self._stops, *sampling.stop)
        params = SamplingParams(
            sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, stops
        )
        return SampleRequest(self.tokens(prompt), params, prompt.get(ADAPTER_KEY, self.settings.default_adapter))

    def responses(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Response]]:
        """Yield each request's number and response, in their order, as soon as those before it are there."""
        finished: dict[int, Response] = {}
        following = 0
        for results in Sampler(self.backend).in_slices(requests):
            for number, result in results.items():
                finished[number] = self._response(result)
            while following in finished:
                yield following, finished.pop(following)
                following += 1

    def stream(
        self, request: SampleRequest, write: Callable[[str], None], cancelled: Callable[[], bool] = lambda: False
    ) -> Response:
        """Return the response to a request; pass its text to ``write`` while it is sampled.

        Args:
            cancelled: returns True to end the response as it is; called before each token.
        """
        tokens: list[int] = []
        length = 0

        def on_token(_: int, token: int) -> None:
            nonlocal length
            if token in request.params.stop:
                return
            tokens.append(token)
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            # An incomplete character is decoded as a replacement character.
            if not text.endswith("\ufffd"):
                write(text[length:])
                length = len(text)

        sampler = Sampler(self.backend, on_token=on_token)
        (result,) = sampler.generate([request], lambda: {0} if cancelled() else ())
        response = self._response(result)
        write(response.text[length:])
        return response

    def _response(self, result: SampleResult) -> Response:
        if result.error is not None:
            return Response(error=result.error)
        (sequence,) = result.samples
        return Response(response_text(self.tokenizer, sequence), len(sequence.tokens), sequence.stop_reason)


def bootstrap_model(settings: InferenceSettings) -> None:
    """Make this process ready for the engine, as :func:`megascend.bootstrap`; repeating it is harmless."""
    import megascend

    megascend.bootstrap(settings.platform, Parallel(tensor=settings.tensor), False, settings.engine)


@contextmanager
def loaded_model(settings: InferenceSettings) -> Iterator[ResponseModel]:
    """Load a model and its adapters on this rank, as one of all; unload it at the end."""
    from megascend import backends
    from megascend.training.lora import peft_format

    bootstrap_model(settings)
    loras = [peft_format.read(path)[0] for path in settings.adapters.values()]
    targets = {target for lora in loras if lora.targets != "all-linear" for target in lora.targets}
    all_linear = not loras or any(lora.targets == "all-linear" for lora in loras)
    context = int(read_config(settings.model).get("max_position_embeddings") or LONGEST_CONTEXT)
    values: dict[str, Any] = {
        "precision": settings.precision,
        "parallel": Parallel(tensor=settings.tensor),
        # A frozen model: without main parameters in fp32 and without an optimizer's state.
        "adapters": Adapters(
            max_count=max(1, len(loras)),
            max_rank=max([1, *(lora.rank for lora in loras)]),
            targets="all-linear" if all_linear else tuple(sorted(targets)),
        ),
        "batching": Batching(micro_batch_tokens=min(context, LONGEST_CONTEXT)),
        "platform": settings.platform,
        # An engine that always pads computes rows as transformers does, with which the self-check would compare it.
        "self_check": not ENGINES.require(settings.engine).always_pads,
    }
    backend = backends.make_backend(
        settings.engine, model=settings.model, **backends.applicable(settings.engine, values)
    )
    try:
        for name, path in settings.adapters.items():
            backend.load_adapter(name, path, optimizer=False)
        yield ResponseModel(settings, backend)
    finally:
        backend.close()


def generate(
    settings: InferenceSettings,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    output: Path | None,
    shorten: bool = False,
) -> int:
    """Answer all prompts on this rank, as one of all, and write a line for each; return how many could not be answered.

    Args:
        output: JSONL file, written by rank 0 line by line in the order of the prompts; None: standard output.
        shorten: lower ``max_tokens`` to what the context has left after a prompt.
    """
    refused = 0
    with loaded_model(settings) as model:
        requests = []
        for number, prompt in enumerate(prompts, 1):
            try:
                request = model.request(prompt, sampling)
            except DataError as error:
                raise DataError(f"prompt {number} of {len(prompts)}: {error}") from error
            room = max(1, model.limit - len(request.prompt))
            if shorten and room < sampling.max_tokens:
                request = replace(request, params=replace(request.params, max_tokens=room))
            requests.append(request)
        with ExitStack() as stack:
            stream = sys.stdout
            if model.backend.rank == 0 and output is not None:
                stream = stack.enter_context(output.open("w", encoding="utf-8"))
            for number, response in model.responses(requests):
                refused += response.error is not None
                if model.backend.rank == 0:
                    line = {**prompts[number], **_fields(response)}
                    print(json_line(line, stream.encoding), file=stream, flush=True)
    return refused


def json_line(line: Mapping[str, Any], encoding: str | None) -> str:
    """Return a line as JSON, with escapes only where the encoding lacks a character: a line must not cost those after it."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(line)
    return text


def _fields(response: Response) -> dict[str, Any]:
    if response.error is not None:
        return {"error": response.error}
    return {"response": response.text, "tokens": response.tokens, "finish_reason": response.finish_reason}


def evaluate_model(settings: InferenceSettings, tasks: ValidationTasks, *, show: bool) -> dict[str, TaskScores]:
    """Measure a model that is not in training, or each of its adapters, on this rank as one of all.

    Returns:
        Metrics by the adapter's name, empty for the model itself.
    """
    from megascend.apps.train.task_scorer import TaskScorer

    bootstrap_model(settings)
    # Before the model, which may take minutes to load.
    suite = None
    if Launch.from_environment().rank == 0:
        from megascend.apps.train.harness import TaskSuite

        suite = TaskSuite(tasks, "--tasks")
    scores: dict[str, TaskScores] = {}
    with loaded_model(settings) as loaded:
        for adapter in settings.adapters or (None,):
            scorer = TaskScorer(
                loaded.backend, loaded.tokenizer, settings.model, tasks, adapter, loaded.template, show=show
            )
            scores[adapter or ""] = scorer.measure(suite, errors=True)
    return scores
