"""Convert SkyRL's prepared batches to samples and requests, and results back. Needs neither SkyRL nor ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.apps.serve.api.wire import Datum
from megascend.apps.serve.samples import loss_of, samples_of, values_of
from megascend.errors import DataError
from megascend.training.batch.loss import Loss
from megascend.training.batch.sample import Sample


@dataclass(frozen=True)
class Pass:
    """One request of a batch: samples of one model under one loss."""

    request: str
    model: str
    samples: Sequence[Sample]
    loss: Loss

    def outputs(self, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Build SkyRL's output per sample: log-probabilities of the targets, and the loss of each target."""
        values = values_of(self.loss, self.samples, logprobs).split([len(sample) for sample in self.samples])
        return [
            {"elementwise_loss": _tensor(value), "logprobs": _tensor(target_logprobs)}
            for value, target_logprobs in zip(values, logprobs, strict=True)
        ]


def pass_of(batch: Any, number: int) -> Pass:
    """Build the Pass of one request of a ``PreparedModelPassBatch``, by its index in ``request_batch_slices``."""
    request, model, start, end = batch.request_batch_slices[number]
    if start == end:
        raise DataError("the request has no samples")
    loss = loss_of(batch.all_loss_fns[start], batch.all_loss_fn_configs[start] or {})
    samples = [sample for index in range(start, end) for sample in samples_of(_datum(batch, index, loss), loss)]
    return Pass(request, model, samples, loss)


def _datum(batch: Any, index: int, loss: Loss) -> Datum:
    inputs: dict[str, np.ndarray] = {"target_tokens": np.array(batch.all_targets[index], np.int64)}
    # SkyRL fills fields that the client left out with empty lists.
    if batch.all_token_weights[index]:
        inputs["weights"] = np.array(batch.all_token_weights[index], np.float32)
    # A cross entropy has neither; SkyRL's lists are then empty and must not be read as fields of length 0.
    if loss.requires:
        inputs["logprobs"] = np.array(batch.all_sampling_logprobs[index], np.float32)
        inputs["advantages"] = np.array(batch.all_advantages[index], np.float32)
    return Datum(np.array(tokens_of(batch.all_model_inputs[index]), np.int64), inputs)


def tokens_of(model_input: Any) -> list[int]:
    """Return the token ids of a ``ModelInput``."""
    other = next((chunk.type for chunk in model_input.chunks if chunk.type != "encoded_text"), None)
    if other is not None:
        raise DataError(f"model_input: {other} chunks are not supported, encoded_text is")
    return [token for chunk in model_input.chunks for token in chunk.tokens]


def sample_request_of(batch: Any, number: int, adapter: str | None) -> SampleRequest:
    """Build one request of a ``PreparedSampleBatch``, by its index, with the first of its seeds, which SkyRL counts up from."""
    # The number of top prompt log-probabilities is the last field, and only some SkyRL versions have it.
    _, _, start, end, prompt_logprobs, *rest = batch.request_batch_slices[number]
    skyrl_params = batch.all_sampling_params[start]
    params = SamplingParams(
        max_tokens=skyrl_params.max_tokens,
        temperature=skyrl_params.temperature,
        top_p=skyrl_params.top_p,
        top_k=skyrl_params.top_k,
        seed=skyrl_params.seed,
        # One tuple for ids and strings, as in the Tinker API.
        stop=(*(skyrl_params.stop_tokens or ()), *(skyrl_params.stop_strings or ())),
    )
    return SampleRequest(
        prompt=tokens_of(batch.all_model_inputs[start]),
        params=params,
        adapter=adapter,
        # SkyRL repeats the prompt once per sample; megascend takes it once, with the count.
        num_samples=end - start,
        prompt_logprobs=bool(prompt_logprobs),
        topk_prompt_logprobs=rest[0] if rest else 0,
    )


def sample_output(result: SampleResult, kind: Any) -> Any:
    """Build SkyRL's answer to a request.

    Args:
        kind: SkyRL's ``SampleOutput``. After 0.3.0 it has top log-probabilities of prompt tokens, and None for the first token,
            which has no log-probability; 0.3.0 has neither, requires a number for every token, and gets 0 there.
    """
    sequences = [
        {"stop_reason": sequence.stop_reason, "tokens": list(sequence.tokens), "logprobs": list(sequence.logprobs)}
        for sequence in result.samples
    ]
    prompt = None if result.prompt_logprobs is None else list(result.prompt_logprobs)
    if "topk_prompt_logprobs" in kind.model_fields:
        top = result.topk_prompt_logprobs
        pairs = None if top is None else [None if position is None else list(position) for position in top]
        return kind(sequences=sequences, prompt_logprobs=prompt, topk_prompt_logprobs=pairs)
    numbers = None if prompt is None else [0.0 if value is None else value for value in prompt]
    return kind(sequences=sequences, prompt_logprobs=numbers)


def _tensor(values: Any) -> dict[str, Any]:
    return {"data": values.float().tolist(), "dtype": "float32", "shape": [len(values)]}
