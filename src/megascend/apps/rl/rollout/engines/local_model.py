"""Model of the local engine: samples requests in batches on a thread, and changes weights between two tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.apps.rl.rollout.engines.sampler import Row, make_rows, sample, sequence_logprobs
from megascend.engines.common.heads import model_class
from megascend.engines.common.rotary import depends_on_length
from megascend.engines.common.transformers_names import is_transposed, persistent_tensors, tensor_slices
from megascend.errors import CheckpointError, EngineError
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.files import TensorHeader, tensor_headers
from megascend.models.checkpoint_files.padding_rows import restore_padding_rows
from megascend.training.checkpoint.hf_slices import HfSlice
from weightwire.background import BackgroundThread
from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs
from weightwire.errors import ManifestError, UnsupportedCallError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import spec_of, with_index
from weightwire.slices import index_of
from weightwire.transports.choice import Location

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class LocalModel(InferenceEngine):
    """A causal language model of transformers in this process, with weight updates."""

    def __init__(
        self,
        model: Path,
        *,
        name: str = "local engine",
        precision: str = "fp32",
        device: str = "cpu",
        seed: int = 0,
        rows: int = 256,
    ) -> None:
        """
        Args:
            seed: seed for requests that have none.
            rows: maximum number of responses in a batch.
        """
        self._device = with_index(torch.device(device))
        self._model = load(model, DTYPES[precision], self._device)
        self.name = name
        self._receiver = Receiver("local engine", device=self._device, check=self._check)
        # Tensors of the last update's manifest, and what each of them holds of the model's.
        self._specs: tuple[TensorSpec, ...] = ()
        self._sources: Mapping[str, Sequence[tuple[str, HfSlice]]] = {}
        self._rows, self._seeds = rows, itertools.count(seed * 1_000_003)
        self._requests: queue.SimpleQueue[tuple[list[Row], Future[list[Completion]]] | None] = queue.SimpleQueue()
        # Held during a forward pass, and while weights change: no pass mixes two versions.
        self._weights = threading.RLock()
        self._resumed = threading.Condition()
        self._paused_until = 0.0
        # A daemon: sampling that still runs must not keep an engine's process alive.
        self._thread = BackgroundThread(self._work, name="local-engine")
        self._thread.start()

    # --- requests ---

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        self._require_no_adapter(adapter)
        if sampling.routed_experts:
            raise UnsupportedCallError(
                f"{self.name} does not return routed experts: use a vLLM server for router replay"
            )
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if not prompt or sampling.max_tokens < 1 or n < 1:
            raise EngineError(
                f"{self.name}: {len(prompt)} prompt tokens, max_tokens {sampling.max_tokens}, n {n}: at least 1 of each"
            )
        if limit is not None and len(prompt) + sampling.max_tokens > limit:
            raise EngineError(
                f"{self.name}: {len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed {limit} positions"
            )
        future: Future[list[Completion]] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: its batch is sampled to the end
        self._requests.put((make_rows(prompt, sampling, n, next(self._seeds)), future))
        return await asyncio.wrap_future(future)

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        return list((await self.top_logprobs(tokens, 0, adapter)).logprobs)

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        self._require_no_adapter(adapter)

        def compute() -> TopLogprobs:
            with self._weights, self._on_device():
                return sequence_logprobs(self._model, tokens, count)

        return await asyncio.to_thread(compute)

    def _work(self) -> None:
        """Sample waiting requests as one batch, until None arrives."""
        while (first := self._requests.get()) is not None:
            batch, stop = [first], False
            # Requests that wait already are sampled together; none is waited for.
            while sum(len(rows) for rows, _ in batch) < self._rows:
                try:
                    request = self._requests.get_nowait()
                except queue.Empty:
                    break
                if request is None:
                    stop = True
                    break
                batch.append(request)
            try:
                sample(self._model, [row for rows, _ in batch for row in rows], self._step)
                completions = [[row.completion() for row in rows] for rows, _ in batch]
            except BaseException as error:  # noqa: BLE001  passed to the callers; the next batch may succeed
                for _, future in batch:
                    future.set_exception(EngineError(f"{self.name}: sampling failed: {type(error).__name__}: {error}"))
            else:
                for result, (_, future) in zip(completions, batch, strict=True):
                    future.set_result(result)
            if stop:
                return

    @contextlib.contextmanager
    def _step(self) -> Iterator[int]:
        """Surround each forward pass: wait for the end of a pause, and keep the weights unchanged."""
        with self._resumed:
            # A loop: the pause may be renewed while this waits.
            while (remaining := self._paused_until - time.monotonic()) > 0:
                self._resumed.wait(remaining)
        with self._weights, self._on_device():
            yield self._version()

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the model's device the current one, on which kernels of other libraries run; each thread has its own."""
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        module: Any = torch.get_device_module(self._device)
        return module.device(self._device)

    # --- updates and pauses ---

    def _version(self, target: str = "model") -> int:
        return self._receiver.version(target) or 0

    async def version(self, target: str = "model") -> int:
        return self._version(target)

    async def receivers(self) -> int:
        return 1

    async def locations(self) -> list[Location | None]:
        return [self._receiver.location()]

    async def pause(self, lease_s: float) -> None:
        with self._resumed:
            self._paused_until = time.monotonic() + lease_s

        def wait_for_step() -> None:
            with self._weights:
                pass

        await asyncio.to_thread(wait_for_step)  # a running forward pass ends first

    async def resume(self) -> None:
        self._resume()

    def _resume(self) -> None:
        with self._resumed:
            self._paused_until = 0.0
            self._resumed.notify_all()

    async def begin_update(self, offer: Offer) -> None:
        await asyncio.to_thread(self._receiver.open, offer)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await asyncio.to_thread(self._receiver.verify, seal, timeout_s)

    async def commit(self, update: str) -> None:
        """See :class:`InferenceEngine`. Weights change between two tokens."""

        def commit() -> None:
            # References suffice for undoing: a load replaces the tensors' memory and writes to none of it.
            before = {name: tensor.data for name, tensor in persistent_tensors(self._model).items()}
            with self._weights:
                self._receiver.commit(update, self._load, lambda: self._set_tensors(before))
            self._receiver.settle(update)

        await asyncio.to_thread(commit)

    async def drop(self, update: str) -> None:
        await asyncio.to_thread(self._receiver.drop, update)

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """Raise EngineError: adapters are not supported."""
        self._require_no_adapter(name)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # New memory: views would keep the whole staging memory allocated.
        model = persistent_tensors(self._model)
        loaded = {name: torch.empty_like(tensor, device=self._device) for name, tensor in model.items()}
        for weight, tensor in tensors:
            for name, part in self._sources.get(weight, ()):
                source = tensor.mT if is_transposed(tensor.shape, part.sizes) else tensor
                loaded[name][index_of(part.offsets, part.sizes)].copy_(source.reshape(part.sizes))
        self._set_tensors(loaded)

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the memory of parameters and persistent buffers by tensors of the same names."""
        for name, tensor in persistent_tensors(self._model).items():
            tensor.data = tensors[name]

    def _check(self, manifest: Manifest) -> None:
        """Raise ManifestError unless a manifest has exactly the model's tensors, by their names in its checkpoint.

        Tied ones may be included. transformers joins some tensors of checkpoints, such as those of experts.
        """
        if manifest.adapter is not None:
            raise ManifestError("local engine: adapters are not loaded; push the model with the adapter merged")
        if manifest.tensors == self._specs:
            return
        model = persistent_tensors(self._model)
        # The model lists a tied tensor once, and a manifest may list it twice.
        tied = self._model.state_dict().keys() - model.keys()
        headers = {
            spec.name: TensorHeader(spec.dtype, spec.shape) for spec in manifest.tensors if spec.name not in tied
        }
        try:
            slices = tensor_slices(self._model, headers)
        except CheckpointError as error:
            raise ManifestError(f"local engine: not the model's tensors: {error}") from error
        sources = defaultdict[str, list[tuple[str, HfSlice]]](list)
        for name, parts in slices.items():
            dtype = spec_of(name, model[name]).dtype
            for part in parts:
                sources[part.weight].append((name, part))
                if (sent := headers[part.weight].dtype) != dtype:
                    raise ManifestError(f"local engine: {part.weight} is {sent}, not {dtype}")
        self._specs, self._sources = manifest.tensors, sources

    def _require_no_adapter(self, adapter: str | None) -> None:
        if adapter is not None:
            raise EngineError(
                f"{self.name} does not load adapters ({adapter!r}): push the model with the adapter merged"
            )

    async def close(self) -> None:
        """Complete the requests being sampled, and end the thread. May be called twice."""
        self._receiver.close()
        self._resume()
        # After the pause has ended: a paused thread would never reach it.
        self._requests.put(None)
        await asyncio.to_thread(self._thread.join)


def load(model: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a transformers model from a directory, for inference."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loader = model_class(transformers_config(model), None)
        loaded, report = loader.from_pretrained(model, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"local engine: transformers cannot load {model}: {error}") from error
    # transformers would initialise these at random and only log it.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            raise CheckpointError(f"local engine: {model}: {problem.replace('_', ' ')}: {sorted(report[problem])[:3]}")
    if depends_on_length(loaded):
        raise CheckpointError(
            f"local engine: {model} has RoPE of kind longrope or dynamic, where shorter responses of a batch get wrong "
            "log-probabilities; use another rollout engine"
        )
    restore_padding_rows(loaded, tensor_headers(model))
    return loaded.to(device).eval().requires_grad_(False)
