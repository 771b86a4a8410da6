"""The actor that serves one replica of verl's rollout: a megascend inference engine behind verl's interface.

The engine is the local one (transformers) in the actor's process, or vLLM in a separate environment, over HTTP.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess
from megascend.errors import ConfigError, EngineError
from megascend.integrations.verl.rollout_settings import RolloutSettings
from weightwire.engine import InferenceEngine, Sampling
from weightwire.keys import write_key
from weightwire.remote_engine import read_call
from weightwire.vllm.contract import STAGING

START_S = 900.0
"""Deadline of vLLM's start, in seconds."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# verl sends all of them with each request, also at their neutral values.
FIXED = {"top_p": (1.0,), "top_k": (-1, 0), "repetition_penalty": (1.0,), "min_p": (0.0,)}
"""Sampling parameters that are accepted with these values only."""
SUPPORTED = {*FIXED, "temperature", "logprobs", "max_tokens", "max_new_tokens", "stop_token_ids", "ignore_eos", "seed"}


class RolloutServer:
    """Ray actor, started by :class:`megascend.integrations.verl.rollout.Replica`."""

    def __init__(self, settings: RolloutSettings, model: str, replica: int, stop_token_ids: Sequence[int]) -> None:
        self._settings, self._model, self._replica = settings, Path(model), replica
        self._stop = tuple(stop_token_ids)
        self._engine: InferenceEngine | None = None
        self._process: VllmProcess | None = None
        self._steps: dict[int, int | None] = {0: None}
        """Weight version to verl's global step."""

    # --- construction ---

    async def start(self) -> str:
        """Start the engine; return its name, which is unique among replicas."""
        if self._settings.vllm_python is None:
            self._engine = await asyncio.to_thread(self._local)
        else:
            self._engine = await self._vllm(self._settings.vllm_python)
        return self.engine.name

    @property
    def engine(self) -> InferenceEngine:
        if self._engine is None:
            raise EngineError(f"rollout replica {self._replica} has no engine yet: start() comes first")
        return self._engine

    def _local(self) -> LocalEngine:
        settings = self._settings
        return LocalEngine(
            self._model,
            name=f"local engine {self._replica}",
            # This actor is a process of its own already.
            own_process=False,
            timeout_s=settings.timeout_s,
            control_timeout_s=settings.timeout_s,
            precision=settings.precision,
            # Replicas with one seed would sample the same responses to the same prompt.
            seed=settings.seed + self._replica,
            rows=settings.rows,
        )

    async def _vllm(self, python: str) -> VllmEngine:
        settings = self._settings
        # mkdtemp makes it readable by this user alone; the key in it authorizes weight updates.
        folder = Path(tempfile.mkdtemp(prefix=f"megascend-vllm-{self._replica}-"))
        key = write_key(folder / "key")
        self._process = VllmProcess(
            python,
            self._model,
            key_file=folder / "key",
            log=folder / "vllm.log",
            environment={STAGING: "cpu"},  # verl passes the weights in host memory
            options=[
                *("--dtype", DTYPES[settings.precision], "--seed", str(settings.seed + self._replica)),
                *("--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.rows)),
                *("--tensor-parallel-size", str(settings.tensor_parallel), "--skip-tokenizer-init"),
                *(["--enforce-eager"] if settings.eager else []),
                *settings.options,
            ],
        )
        await asyncio.to_thread(self._process.wait_until_listening, START_S)
        engine = VllmEngine(
            self._process.address,
            key=key,
            owner=f"verl {os.getpid()} replica {self._replica}",
            generate_timeout_s=settings.timeout_s,
        )
        await engine.wait_until_ready(START_S)
        return engine

    # --- requests ---

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **ignored: Any,
    ) -> TokenOutput:
        """Sample one response; return its token ids and their log-probabilities."""
        inputs = {"image_data": image_data, "video_data": video_data, **ignored}
        if refused := [name for name, value in inputs.items() if value]:
            raise ConfigError(f"rollout {request_id}: {', '.join(refused)}: only text is supported")
        prompt = [int(token) for token in prompt_ids]
        (response,) = await self.engine.generate(prompt, self._sampling(len(prompt), sampling_params))
        steps = self._steps.get(response.first_version), self._steps.get(response.last_version)
        return TokenOutput(
            token_ids=list(response.tokens),
            log_probs=list(response.logprobs) if sampling_params.get("logprobs") else None,
            # verl only distinguishes completed from aborted; a response cut at its maximum length counts as completed.
            stop_reason="completed",
            num_preempted=0,
            # First and last weights: a response may begin before an update and end after it.
            extra_fields={"global_steps": steps[1], "min_global_steps": steps[0], "max_global_steps": steps[1]},
        )

    def _sampling(self, prompt: int, params: Mapping[str, Any]) -> Sampling:
        settings = self._settings
        for name, value in params.items():
            if name not in SUPPORTED:
                raise ConfigError(f"sampling parameter {name}={value!r}: not supported with the rollout megascend")
            if name in FIXED and value not in FIXED[name]:
                raise ConfigError(
                    f"sampling parameter {name}={value!r}: the rollout megascend has {FIXED[name][0]:g} only"
                )
        room = settings.max_model_len - prompt
        if room < 1:
            raise EngineError(
                f"a prompt of {prompt} tokens leaves no room: sequences have at most {settings.max_model_len}"
            )
        # Either name, as in verl's vLLM server.
        max_tokens = params.get("max_tokens", params.get("max_new_tokens", settings.response_length))
        stop = () if params.get("ignore_eos", settings.ignore_eos) else self._stop
        return Sampling(
            max_tokens=min(int(max_tokens), room),
            temperature=float(params.get("temperature", 1.0)),
            stop_token_ids=(*stop, *(params.get("stop_token_ids") or ())),
            seed=params.get("seed"),
        )

    # --- weights: called by a Delivery ---

    def announce(self, global_steps: int | None) -> int:
        """Return the number of the next weight version, and record its ``global_steps``."""
        # Not the trainer's step, which may be None.
        version = max(self._steps) + 1
        self._steps[version] = global_steps
        return version

    async def call_engine(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method of the engine interface, with JSON arguments and result."""
        return await read_call(call, arguments)(self.engine)

    # --- called by verl around a step ---

    async def sleep(self) -> None:
        """Do nothing: the engine keeps its memory."""

    async def wake_up(self) -> None:
        """Do nothing: the engine does not sleep."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: the commit of an update clears caches of older weights."""

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: engines are not profiled."""

    async def stop_profile(self) -> None:
        """Do nothing: engines are not profiled."""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Raise ConfigError: only verl's asynchronous trainers call this, which are not supported."""
        raise ConfigError("rollout megascend: requests are not aborted; it works with trainer.v1.trainer_mode=sync")

    async def close(self) -> None:
        """Close the engine and its process."""
        if self._engine is not None:
            await self._engine.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self._engine = self._process = None
