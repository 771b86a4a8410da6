"""SkyRL's interface of a Tinker backend on megascend: adapters of any ranks and targets, several models in one batch.

Named to SkyRL as ``megascend.integrations.skyrl.backend:MegascendBackend`` (:mod:`megascend.integrations.skyrl.launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl.backends.backend import AbstractBackend
from skyrl.tinker import types
from skyrl.utils.storage import download_and_unpack, pack_and_upload

from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.integrations.skyrl.batches import Pass, pass_of, sample_request_of
from megascend.integrations.skyrl.ranks import Ranks
from megascend.integrations.skyrl.settings import BackendConfig, settings_of
from megascend.serve.api.bodies import adam_of
from megascend.serve.scheduler.commands import (
    Command,
    Create,
    Forward,
    ForwardBackward,
    Load,
    OptimizerStep,
    Outcome,
    Remove,
    Respond,
    Save,
)

BASE = "base"
"""Line of commands for the model without an adapter."""


class MegascendBackend(AbstractBackend):
    """All models of one SkyRL server.

    Args:
        base_model: directory of a Hugging Face checkpoint.
        config: ``--backend-config``.
    """

    config_class = BackendConfig

    def __init__(self, base_model: str, config: BackendConfig) -> None:
        self.config = config
        self.metrics = types.EngineMetrics()
        self.settings: ServeConfig = settings_of(base_model, config)
        self._ranks = Ranks(self.settings)
        self._adapters: dict[str, str] = {}
        self._samplers: dict[str, str] = {}
        self._made = 0

    def create_model(self, model_id: str, lora_config: types.LoraConfig, model_role: str = "policy") -> None:
        """A new adapter.

        Raises:
            ConfigError: a critic is asked for, or a rank or layers that are not there.
        """
        if model_role != "policy":
            raise ConfigError(f"model_role {model_role!r}: megascend's backend for SkyRL trains policies")
        targets = self._ranks.base.targets(
            attention=lora_config.train_attn, mlp=lora_config.train_mlp, output=lora_config.train_unembed
        )
        lora = Lora(rank=lora_config.rank, alpha=lora_config.alpha, targets=targets, seed=lora_config.seed % 2**62)
        adapter = f"m{self._made}"
        self._one(lambda number: Create(number, adapter, lora))
        self._made += 1
        self._adapters[model_id] = adapter

    def has_model(self, model_id: str) -> bool:
        return model_id in self._adapters

    def delete_model(self, model_id: str) -> None:
        adapter = self._adapters.pop(model_id)
        if self._samplers.pop(model_id, None) is not None:
            self._one(lambda number: Remove(number, f"{adapter}-sampler"))
        self._one(lambda number: Remove(number, adapter))

    # --- training ---

    def forward_backward(
        self, prepared_batch: types.PreparedModelPassBatch
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        """Gradients of the sum of the losses, of all models together."""

        def command(one: Pass, number: int) -> Command:
            return ForwardBackward(number, self._adapters[one.model], one.samples, one.loss)

        return self._passes(prepared_batch, command, lambda value: value.logprobs)

    def forward(
        self, prepared_batch: types.PreparedModelPassBatch
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        """Log-probabilities and losses, without gradients."""

        def command(one: Pass, number: int) -> Command:
            return Forward(number, self._adapters[one.model], one.samples)

        return self._passes(prepared_batch, command, lambda value: value)

    def _passes(
        self,
        batch: types.PreparedModelPassBatch,
        command: Callable[[Pass, int], Command],
        logprobs: Callable[[Any], Any],
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        results: dict[str, types.ForwardBackwardOutput | types.ErrorResponse] = {}
        good: list[Pass] = []
        for index, (request, *_) in enumerate(batch.request_batch_slices):
            try:
                good.append(pass_of(batch, index))
            except (ConfigError, DataError) as error:
                results[request] = _failed(error)
        outcomes = self._ranks.run([lambda number, one=one: command(one, number) for one in good])
        for one, outcome in zip(good, outcomes, strict=True):
            if outcome.error is not None:
                results[one.request] = _failed(outcome.error)
                continue
            outputs = one.outputs(logprobs(outcome.value))
            total = sum(sum(output["elementwise_loss"]["data"]) for output in outputs)
            metrics = {"loss:sum": total, "models_in_batch:max": float(outcome.batch_adapters)}
            results[one.request] = types.ForwardBackwardOutput(
                loss_fn_output_type="scalar", loss_fn_outputs=outputs, metrics=metrics
            )
        return results

    def optim_step(self, model_id: str, request_data: types.OptimStepInput) -> types.OptimStepOutput:
        """One AdamW step of a model's adapter.

        Raises:
            MegascendError: a setting cannot be, or a gradient of this step failed.
        """
        adam, adapter = adam_of(request_data.adam_params.model_dump()), self._adapters[model_id]
        step = self._one(lambda number: OptimizerStep(number, adapter, adam)).value
        figures = {"grad_norm": step.grad_norm, "learning_rate": step.lr, "skipped": float(step.skipped)}
        return types.OptimStepOutput(metrics=figures)

    # --- checkpoints ---

    def save_checkpoint(self, output_path: Any, model_id: str) -> None:
        with pack_and_upload(output_path) as folder:
            self._save(model_id, folder, optimizer=True)

    def load_checkpoint(self, checkpoint_path: Any, model_id: str, load_optimizer: bool = True) -> None:
        adapter = self._adapters[model_id]
        with download_and_unpack(checkpoint_path) as folder:
            self._one(lambda number: Load(number, adapter, str(folder / "adapter"), load_optimizer))

    def save_sampler_checkpoint(self, output_path: Any, model_id: str, persist: bool = True) -> None:
        """Let sampling see the weights of now; write them, in peft's format, if they are to persist."""
        if persist:
            with pack_and_upload(output_path) as folder:
                self._save(model_id, folder, optimizer=False)
                self._sample_from(model_id, folder, str(output_path))
        else:
            with TemporaryDirectory() as folder:
                self._save(model_id, Path(folder), optimizer=False)
                self._sample_from(model_id, Path(folder), str(output_path))

    def _save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        adapter = self._adapters[model_id]
        self._one(lambda number: Save(number, adapter, str(folder / "adapter"), optimizer))

    def _sample_from(self, model_id: str, folder: Path, what: str) -> None:
        name, path = f"{self._adapters[model_id]}-sampler", str(folder / "adapter")
        if model_id in self._samplers:
            self._one(lambda number: Load(number, name, path, False))
        else:
            self._one(lambda number: Create(number, name, None, path, False))
        self._samplers[model_id] = what

    # --- sampling ---

    def sample(self, prepared_batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        """Responses of saved adapters, or of the model itself, all together."""
        results: dict[str, types.SampleOutput | types.ErrorResponse] = {}
        names: list[str] = []
        commands: list[Callable[[int], Command]] = []
        for index, (request, model_id, start, *_) in enumerate(prepared_batch.request_batch_slices):
            try:
                adapter = self._sampler(model_id, prepared_batch.all_checkpoint_paths[start])
                wanted = sample_request_of(prepared_batch, index, adapter)
            except (MegascendError, OSError) as error:
                results[request] = _failed(error)
                continue
            names.append(request)
            commands.append(lambda number, wanted=wanted, line=adapter or BASE: Respond(number, line, wanted))
        for request, outcome in zip(names, self._ranks.run(commands), strict=True):
            results[request] = _answer(outcome)
        return results

    def _sampler(self, model_id: str, path: str) -> str | None:
        """The adapter to sample from: a checkpoint's, loaded if another one is there."""
        if not model_id or not path:
            return None
        if self._samplers.get(model_id) != path:
            from cloudpathlib import AnyPath

            with download_and_unpack(AnyPath(path)) as folder:
                self._sample_from(model_id, folder, path)
        return f"{self._adapters[model_id]}-sampler"

    def _one(self, command: Callable[[int], Command]) -> Outcome:
        outcome = self._ranks.run([command])[0]
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def close(self) -> None:
        """End the work on all ranks. SkyRL has no call for it; its process ends instead."""
        self._ranks.close()


def _failed(error: Exception) -> types.ErrorResponse:
    return types.ErrorResponse(error=str(error), status="failed")


def _answer(outcome: Outcome) -> types.SampleOutput | types.ErrorResponse:
    if outcome.error is not None or outcome.value.error is not None:
        return types.ErrorResponse(error=str(outcome.error or outcome.value.error), status="failed")
    sequences: Sequence[types.GeneratedSequence] = [
        types.GeneratedSequence(stop_reason=each.stop_reason, tokens=list(each.tokens), logprobs=list(each.logprobs))
        for each in outcome.value.samples
    ]
    found = outcome.value.prompt_logprobs
    # SkyRL 0.3.0 takes numbers alone here, and has none for the first token: 0 stands for it.
    prompt = None if found is None else [0.0 if value is None else value for value in found]
    return types.SampleOutput(sequences=list(sequences), prompt_logprobs=prompt)
