"""Client of an SGLang server over its HTTP interface.

SGLang cannot stage weights, and its workers do not join our groups. So this object receives for it, in host memory, and verifies;
a commit writes the tensors to a directory that SGLang can read, pauses it, makes it load them (``/update_weights_from_disk``) and
resumes it. If that fails, it reloads the directory of the old weights, and is then resumed; if that fails too it stays paused,
and this object reports it.

Limitation: SGLang does not end a pause when the process that requested it is killed. The next ``begin_update`` of another one
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.rl.rollout.http_client import EngineServer
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.runtime.io.atomic import honour_umask
from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs
from weightwire.errors import CommitError, NotServingError, UnsupportedCallError, UpdateError
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.transports.choice import Location

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_S = 60.0
LOAD_S = 1800.0


class SglangEngine(InferenceEngine):
    """Client of one SGLang server.

    Args:
        address: ``http://HOST:PORT``.
        model: directory of the checkpoint from which the server was started, as the server reads it; reloaded if the first update
            fails. None: the server gets no updates, as a teacher.
        directory: holds weight versions: on a disk, or in memory (``/dev/shm``), which the server reads under the same path. It
            contains the active version and, during a commit, the next one. To be set with ``model``.
        api_key: the server's ``--api-key``.
        generate_timeout_s: deadline of a request, including time in the server's queue.

    Raises:
        ConfigError: the address is malformed, or the checkpoint does not exist.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str | Path | None = None,
        directory: str | Path | None = None,
        api_key: str | None = None,
        generate_timeout_s: float = 600.0,
    ) -> None:
        self._server = EngineServer("SGLang", address)
        if (model is None) != (directory is None):
            raise ConfigError(
                f"{self._server.name}: updates need both model and directory, got {model} and {directory}"
            )
        if model is not None and not (Path(model) / "config.json").is_file():
            raise ConfigError(f"no checkpoint at {model}, which SGLang reloads if an update fails")
        self.name = self._server.name
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._generate_timeout_s = generate_timeout_s
        self._updatable = model is not None
        self._model, self._directory = Path(model or ""), Path(directory or "")
        self._in_force = self._model
        self._versions = {"model": 0}
        self._receiver = Receiver(self.name, device="cpu")
        # Commit, pause and adapters stop the same server.
        self._changing = asyncio.Lock()
        self._pause: asyncio.Task[None] | None = None
        self._not_serving: str | None = None

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        """See :class:`InferenceEngine`. ``first_version`` is the one active when the request was sent."""
        if sampling.routed_experts:
            raise UnsupportedCallError(
                f"{self.name} does not return routed experts: use a vLLM server for router replay"
            )
        if sampling.truncates:
            raise UnsupportedCallError(
                f"{self.name} does not return which tokens top_p and top_k allowed: use a vLLM server"
            )
        before = self._versions["model"]
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        request = {"input_ids": list(prompt), "return_logprob": True, "lora_path": adapter}
        if sampling.seed is None:
            request["sampling_params"] = {**params, "n": n}
        else:
            # SGLang draws all n responses of a request with its one seed, as a hash of seed and position; it takes 31 bits.
            seeds = [(sampling.seed + number) % 2**31 for number in range(n)]
            request["input_ids"] = [list(prompt)] * n
            request["sampling_params"] = [{**params, "sampling_seed": seed} for seed in seeds]
        answer = await self._serving("/generate", request)
        return [self._completion(output, before) for output in (answer if isinstance(answer, list) else [answer])]

    def _completion(self, answer: dict[str, Any], before: int) -> Completion:
        try:
            meta = answer["meta_info"]
            rows = meta["output_token_logprobs"]
            return Completion(
                tokens=tuple(row[1] for row in rows),
                logprobs=tuple(row[0] for row in rows),
                finish_reason=meta["finish_reason"]["type"],
                # Bounds: the version that was active when the request was sent, and the one that is active now.
                first_version=before,
                last_version=max(before, self._versions["model"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{self.name}: /generate: the answer cannot be read ({error!r})") from error

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        return list((await self.top_logprobs(tokens, 0, adapter)).logprobs)

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        request = {
            "input_ids": list(tokens),
            # Log-probabilities of a prompt are those at temperature 1.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": count,
            "lora_path": adapter,
        }
        answer = await self._serving("/generate", request)
        try:
            meta = answer["meta_info"]
            # (log-probability, id, text); the first token has no prediction.
            logprobs = tuple(row[0] for row in meta["input_token_logprobs"][1:])
            rows = [tuple(zip(*row, strict=True)) for row in meta["input_top_logprobs"][1:]] if count else []
            ids, values = (tuple(tuple(row[column]) for row in rows) for column in (1, 0))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(f"{self.name}: /generate: the answer cannot be read ({error!r})") from error
        if (
            None in logprobs
            or len(logprobs) != len(tokens) - 1
            or (count and [*map(len, ids)] != [count] * len(logprobs))
        ):
            raise EngineError(
                f"{self.name}: /generate returned log-probabilities of {len(logprobs)} tokens and {len(ids)} rows of likeliest "
                f"ones for {len(tokens)} tokens and top_logprobs_num: {count}"
            )
        if not count:
            ids = values = ((),) * len(logprobs)
        return TopLogprobs(logprobs, ids, values)

    async def _serving(self, path: str, request: dict[str, Any]) -> Any:
        if self._not_serving is not None:
            raise NotServingError(self._not_serving)
        return await self._ask(path, request, self._generate_timeout_s)

    async def receivers(self) -> int:
        """Return 1: this object, for any number of the server's workers."""
        return 1

    async def locations(self) -> list[Location | None]:
        """Return the memory of this process, which receives on behalf of the server."""
        return [self._receiver.location()]

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`. Adapters need :meth:`load_adapter`.

        Raises:
            UpdateError: the offer is of an adapter, or the server gets no updates.
        """
        if not self._updatable:
            raise UpdateError(f"{self.name}: updates need model and directory of {type(self).__name__}")
        if offer.manifest.adapter is not None:
            raise UpdateError(f"{self.name}: adapters are loaded from directories: write it, and call load_adapter()")
        async with self._changing:
            if self._pause is None and self._not_serving is None:
                await self._ask("/continue_generation", {}, CONTROL_S)  # end a pause left by a previous owner
            self._receiver.open(offer)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await asyncio.to_thread(self._receiver.verify, seal, timeout_s)

    async def commit(self, update: str) -> None:
        """See :class:`InferenceEngine`. The server does not answer while it loads; its cache is flushed.

        Raises:
            CommitError: it failed, and the old weights were reloaded.
            NotServingError: the reload failed too. The server stays paused until a commit succeeds.
        """
        # A caller that gives up must not leave the server paused halfway.
        await asyncio.shield(asyncio.ensure_future(self._commit(update)))

    async def _commit(self, update: str) -> None:
        async with self._changing:
            status = self._receiver.status()["update"]
            if status is None:
                raise UpdateError(f"{self.name}: {update:.120} is not under way: none is")
            target = self._directory / f"version-{status['version']}"
            # Nothing to undo: files do nothing until SGLang loads them.
            await asyncio.to_thread(
                self._receiver.commit, update, lambda tensors: self._write(tensors, target), lambda: None
            )
            try:
                await self._ask("/pause_generation", {"mode": "retract"}, CONTROL_S)
            except BaseException:
                self._discard(target)
                # It may have paused, although its answer was lost.
                with contextlib.suppress(EngineError):
                    await self._continue()
                raise
            try:
                await self._load(target, status["version"])
            except EngineError as error:
                self._discard(target)
                await self._go_back(error)
                await self._continue()
                raise CommitError(f"{error}. The weights from before it are active") from error
            except BaseException:
                await self._continue()
                raise
            # The directory is kept while its version is active: a failed update reloads it.
            previous, self._in_force = self._in_force, target
            self._versions["model"], self._not_serving = status["version"], None
            await self._continue()
            # The checkpoint from which the server was started is the user's.
            if previous != self._model:
                await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    def _discard(self, target: Path) -> None:
        """Remove a version that is not loaded. The receiver has committed it, to files: it may be offered again."""
        shutil.rmtree(target, ignore_errors=True)
        self._receiver.forget("model")

    async def _go_back(self, cause: EngineError) -> None:
        try:
            await self._load(self._in_force, self._versions["model"])
        except EngineError as error:
            message = f"Loading {self._in_force} again failed as well ({error})"
            self._not_serving = f"{cause}. {message}: the server stays paused until a commit succeeds"
            raise NotServingError(self._not_serving) from error

    async def _load(self, directory: Path, version: int) -> None:
        request = {
            "model_path": str(directory),
            "abort_all_requests": False,
            "flush_cache": True,
            "weight_version": str(version),
        }
        answer = await self._ask("/update_weights_from_disk", request, LOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self.name}: {directory} was not loaded: {str(answer)[:500]}")

    async def _continue(self) -> None:
        # The owner's own pause continues.
        if self._pause is None:
            await self._ask("/continue_generation", {}, CONTROL_S)

    def _write(self, tensors: Iterable[tuple[str, Tensor]], target: Path) -> None:
        from safetensors.torch import save_file

        shutil.rmtree(target, ignore_errors=True)
        # Configuration and tokenizer beside the weights: SGLang reloads a complete checkpoint, not tensors.
        try:
            shutil.copytree(self._model, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.pt"))
            save_file(dict(tensors), target / "model.safetensors", metadata={"format": "pt"})
            honour_umask(target / "model.safetensors")  # the server may run as another user
        except BaseException:
            # Part of a model would take the room of the next version, and no later one would remove it.
            shutil.rmtree(target, ignore_errors=True)
            raise

    async def drop(self, update: str) -> None:
        self._receiver.drop(update)

    async def pause(self, lease_s: float) -> None:
        """See :class:`InferenceEngine`. The lease is held by this process."""
        async with self._changing:
            await self._ask("/pause_generation", {"mode": "retract"}, CONTROL_S)
            if self._pause is not None:
                self._pause.cancel()
            self._pause = asyncio.get_running_loop().create_task(self._lapse(lease_s))

    async def _lapse(self, lease_s: float) -> None:
        await asyncio.sleep(lease_s)
        self._pause = None
        async with self._changing:
            await self._ask("/continue_generation", {}, CONTROL_S)

    async def resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            async with self._changing:
                await self._ask("/continue_generation", {}, CONTROL_S)

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """See :class:`InferenceEngine`. The server is paused meanwhile, and its cache flushed: it identifies adapters by name."""
        async with self._changing:
            await self._ask("/pause_generation", {"mode": "retract"}, CONTROL_S)
            try:
                if f"adapter {name}" in self._versions:
                    await self._ask("/unload_lora_adapter", {"lora_name": name}, CONTROL_S)
                answer = await self._ask("/load_lora_adapter", {"lora_name": name, "lora_path": directory}, LOAD_S)
                if not isinstance(answer, dict) or answer.get("success") is not True:
                    raise EngineError(f"{self.name}: adapter {name} was not loaded: {str(answer)[:500]}")
                before = self._versions.get(f"adapter {name}", 0)
                self._versions[f"adapter {name}"] = before + 1 if version is None else version
                # Cached prefixes are keyed by the adapter's name, and this name now has other weights.
                await self._ask("/flush_cache", {}, CONTROL_S)
            finally:
                await self._continue()

    async def version(self, target: str = "model") -> int:
        """See :class:`InferenceEngine`. The version is the one set by this object."""
        return self._versions.get(target, 0)

    async def close(self) -> None:
        """Drop the open update, and end a pause."""
        self._receiver.close()
        with contextlib.suppress(EngineLostError):
            await self.resume()

    # --- HTTP ---

    async def _ask(self, path: str, fields: dict[str, Any], timeout_s: float) -> Any:
        answer = await self._server.ask(path, json.dumps(fields).encode(), self._headers, timeout_s)
        if answer.status != 200:
            text = answer.body[:500].decode("utf-8", "replace")
            raise EngineError(f"{self.name}: {path}: status {answer.status}: {text}")
        return answer.json()
