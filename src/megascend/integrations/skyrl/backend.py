"""SkyRL's Tinker backend interface on megascend: adapters of any rank and targets, several models in one batch.

Its class path is ``megascend.integrations.skyrl.backend:MegascendBackend`` (see :mod:`megascend.integrations.skyrl.launch`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl.backends.backend import AbstractBackend
from skyrl.tinker import types
from skyrl.utils.storage import download_and_unpack, pack_and_upload

from megascend.apps.serve.api.bodies import parse_adam
from megascend.apps.serve.scheduler.commands import (
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
from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.integrations.skyrl.batches import Pass, pass_of, sample_output, sample_request_of
from megascend.integrations.skyrl.ranks import Ranks
from megascend.integrations.skyrl.settings import BackendConfig, serve_settings

BASE = "base"
"""Name of the command queue for the model without an adapter."""


class MegascendBackend(AbstractBackend):
    """All models of one SkyRL server."""

    config_class = BackendConfig

    def __init__(self, base_model: str, config: BackendConfig) -> None:
        self.config = config
        # Read by SkyRL's engine, so it has to exist, but megascend reports per request.
        self.metrics = types.EngineMetrics()
        self.settings: ServeConfig = serve_settings(base_model, config)
        self._ranks = Ranks(self.settings)
        self._adapters: dict[str, str] = {}
        self._samplers: dict[str, str] = {}
        self._created_count = 0

    def create_model(self, model_id: str, lora_config: types.LoraConfig, model_role: str = "policy") -> None:
        """Create an adapter."""
        if model_role != "policy":
            raise ConfigError(f"model_role {model_role!r}: megascend's backend for SkyRL trains policies")
        targets = self._ranks.base.targets(
            attention=lora_config.train_attn, mlp=lora_config.train_mlp, output=lora_config.train_unembed
        )
        # SkyRL's seed is any integer; the modulus makes it a non-negative one that fits into 64 bits.
        lora = Lora(rank=lora_config.rank, alpha=lora_config.alpha, targets=targets, seed=lora_config.seed % 2**62)
        # Not the model id: SkyRL's is free text, and names of adapters are restricted (megascend.training.lora.registry).
        adapter = f"m{self._created_count}"
        self._run_one(lambda number: Create(number, adapter, lora))
        self._created_count += 1
        self._adapters[model_id] = adapter

    def has_model(self, model_id: str) -> bool:
        return model_id in self._adapters

    def delete_model(self, model_id: str) -> None:
        adapter = self._adapters.pop(model_id)
        # The sampler's copy of the adapter occupies a slot of its own.
        if self._samplers.pop(model_id, None) is not None:
            self._run_one(lambda number: Remove(number, f"{adapter}-sampler"))
        self._run_one(lambda number: Remove(number, adapter))

    # --- training ---

    def forward_backward(
        self, prepared_batch: types.PreparedModelPassBatch
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        """Accumulate gradients of the summed losses, of all models in one batch."""

        def command(request_pass: Pass, number: int) -> Command:
            return ForwardBackward(number, self._adapters[request_pass.model], request_pass.samples, request_pass.loss)

        return self._passes(prepared_batch, command, lambda value: value.logprobs)

    def forward(
        self, prepared_batch: types.PreparedModelPassBatch
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        """Compute log-probabilities and losses, without gradients."""

        def command(request_pass: Pass, number: int) -> Command:
            return Forward(number, self._adapters[request_pass.model], request_pass.samples)

        return self._passes(prepared_batch, command, lambda value: value)

    def _passes(
        self,
        batch: types.PreparedModelPassBatch,
        command: Callable[[Pass, int], Command],
        logprobs: Callable[[Any], Any],
    ) -> dict[str, types.ForwardBackwardOutput | types.ErrorResponse]:
        """Run a batch's passes over the model; return outputs or errors by request."""
        results: dict[str, types.ForwardBackwardOutput | types.ErrorResponse] = {}
        valid: list[Pass] = []
        for index, (request, *_) in enumerate(batch.request_batch_slices):
            try:
                valid.append(pass_of(batch, index))
            except (ConfigError, DataError) as error:
                # Only this request fails: SkyRL puts requests of several clients into one batch.
                results[request] = _error_response(error)
        outcomes = self._ranks.run([partial(command, request_pass) for request_pass in valid])
        for request_pass, outcome in zip(valid, outcomes, strict=True):
            if outcome.error is not None:
                results[request_pass.request] = _error_response(outcome.error)
                continue
            outputs = request_pass.outputs(logprobs(outcome.value))
            # Tinker's names: the client merges metrics of several requests by the reduction after the colon.
            total = sum(sum(output["elementwise_loss"]["data"]) for output in outputs)
            metrics = {"loss:sum": total, "models_in_batch:max": float(outcome.batch_adapters)}
            results[request_pass.request] = types.ForwardBackwardOutput(
                loss_fn_output_type="scalar", loss_fn_outputs=outputs, metrics=metrics
            )
        return results

    def optim_step(self, model_id: str, request_data: types.OptimStepInput) -> types.OptimStepOutput:
        """Take an AdamW step of a model's adapter."""
        adam, adapter = parse_adam(request_data.adam_params.model_dump()), self._adapters[model_id]
        step = self._run_one(lambda number: OptimizerStep(number, adapter, adam)).value
        figures = {"grad_norm": step.grad_norm, "learning_rate": step.lr, "skipped": float(step.skipped)}
        return types.OptimStepOutput(metrics=figures)

    # --- checkpoints ---

    def save_checkpoint(self, output_path: Any, model_id: str) -> None:
        # SkyRL's helper: the folder becomes a tar archive at output_path, which may be in cloud storage.
        with pack_and_upload(output_path) as folder:
            self._save(model_id, folder, optimizer=True)

    def load_checkpoint(self, checkpoint_path: Any, model_id: str, load_optimizer: bool = True) -> None:
        adapter = self._adapters[model_id]
        with download_and_unpack(checkpoint_path) as folder:
            self._run_one(lambda number: Load(number, adapter, str(folder / "adapter"), load_optimizer))

    def save_sampler_checkpoint(self, output_path: Any, model_id: str, persist: bool = True) -> None:
        """Use the current weights for sampling; also write them in peft's format if ``persist``."""
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
        self._run_one(lambda number: Save(number, adapter, str(folder / "adapter"), optimizer))

    def _sample_from(self, model_id: str, folder: Path, checkpoint: str) -> None:
        name, path = f"{self._adapters[model_id]}-sampler", str(folder / "adapter")
        if model_id in self._samplers:
            # Without the optimizer: a sampler is never trained.
            self._run_one(lambda number: Load(number, name, path, False))
        else:
            self._run_one(lambda number: Create(number, name, None, path, False))
        self._samplers[model_id] = checkpoint

    # --- sampling ---

    def sample(self, prepared_batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        """Sample from saved adapters or the base model, all requests together."""
        results: dict[str, types.SampleOutput | types.ErrorResponse] = {}
        names: list[str] = []
        commands: list[Callable[[int], Command]] = []
        # Newer SkyRL versions append fields to the tuple; those are ignored here and read in sample_request_of().
        for index, (request, model_id, start, *_) in enumerate(prepared_batch.request_batch_slices):
            try:
                adapter = self._sampling_adapter(model_id, prepared_batch.all_checkpoint_paths[start])
                sample_request = sample_request_of(prepared_batch, index, adapter)
            except (MegascendError, OSError) as error:
                results[request] = _error_response(error)
                continue
            names.append(request)
            commands.append(partial(Respond, adapter=adapter or BASE, request=sample_request))
        for request, outcome in zip(names, self._ranks.run(commands), strict=True):
            results[request] = _sample_response(outcome)
        return results

    def _sampling_adapter(self, model_id: str, path: str) -> str | None:
        """Return the adapter to sample from, after loading the checkpoint if another one is loaded."""
        # SkyRL's form of a request to the base model.
        if not model_id or not path:
            return None
        if self._samplers.get(model_id) != path:
            from cloudpathlib import AnyPath

            with download_and_unpack(AnyPath(path)) as folder:
                self._sample_from(model_id, folder, path)
        return f"{self._adapters[model_id]}-sampler"

    def _run_one(self, command: Callable[[int], Command]) -> Outcome:
        outcome = self._ranks.run([command])[0]
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def close(self) -> None:
        """End the work on all ranks. SkyRL never calls it; its process exits instead."""
        self._ranks.close()


def _error_response(error: Exception) -> types.ErrorResponse:
    return types.ErrorResponse(error=str(error), status="failed")


def _sample_response(outcome: Outcome) -> types.SampleOutput | types.ErrorResponse:
    if outcome.error is not None or outcome.value.error is not None:
        return types.ErrorResponse(error=str(outcome.error or outcome.value.error), status="failed")
    return sample_output(outcome.value, types.SampleOutput)
