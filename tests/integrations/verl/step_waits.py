"""verl's training steps on megascend's engine, and the positions where the host would wait for a device.

    python step_waits.py MODEL OUT.json

The same sequences in one micro batch and in five, by verl's own SFT loss and by one that megascend does not know. With
``VERL_PLATFORM=cpu`` waits are those that there would be; on a GPU they are torch's warnings of them, in bf16.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.checkpoint import McoreCheckpointConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from megascend.errors import LossFunctionError
from megascend.integrations.verl import losses
from megascend.training.kernels import linear_logprobs
from support.host_waits import HostWaits

LENGTHS = (7, 12, 5, 9, 12, 8)
ON_CPU = (
    "reference/te/attention.py",
    "reference/te/attention_core.py",
    "reference/te/optimizers.py",
    "training/kernels/linear_logprobs.py",
    "distributed/param_and_grad_buffer.py",  # Gloo's own copy
)
"""What these read or copy, they do on a CPU alone."""


def batch(tokens: int, first: int = 0) -> Any:
    """Build sequences whose first token is trained if ``first`` is 1, in micro batches of so many tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 250, (length,), generator=generator) for length in LENGTHS]
    nested = lambda tensors: torch.nested.as_nested_tensor(tensors, layout=torch.jagged)  # noqa: E731
    masks = [torch.tensor([first, 0] + [1] * (length - 2)) for length in LENGTHS]
    positions = [torch.arange(length) for length in LENGTHS]
    tensors = {"input_ids": nested(ids), "loss_mask": nested(masks), "position_ids": nested(positions)}
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens, "temperature": 1.0, "pad_mode": "no_padding"}
    return tensordict_utils.get_tensordict(tensors, settings)


def own_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Compute the same loss as verl's sft_loss, as a function that megascend does not recognize."""
    return sft_loss(None, model_output, data, dp_group)


def changed(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Compute a loss that a changed sft_loss of verl might be."""
    loss, metrics = sft_loss(config, model_output, data, dp_group)
    return 1.1 * loss, metrics


@contextmanager
def waits_of(engine: Any) -> Iterator[Counter[str]]:
    """Yield a counter of the places where the host waits for the device in the block; complete after it."""
    if get_device_name() == "cpu":
        with HostWaits(ON_CPU) as waits:
            waits.watch(TensorDict, "to")
            waits.mark(on_device(engine.backend.engine))
            yield waits.found
        return
    counts: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.update(
        f"{warning.filename}:{warning.lineno}" for warning in caught if "synchronizing" in str(warning.message)
    )


def on_device(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of model and optimizer on the device."""
    for parameter in engine.bare_chunks[0].parameters():
        yield from (parameter, parameter.main_grad)
    for state in engine.optimizer.parameter_states(loading=False):
        yield from state.tensors.values()


def main(path: str, out: str) -> None:
    initialize_global_process_group_ray()
    dtype = "float32" if get_device_name() == "cpu" else "bfloat16"
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=path),
        engine_config=McoreEngineConfig(override_transformer_config={"params_dtype": dtype}),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=100, weight_decay=0.0),
        checkpoint_config=McoreCheckpointConfig(),
    )
    projections = []  # passes of the output layer over a micro batch
    chunks = linear_logprobs.chunks

    def counted(*args: Any, **settings: Any) -> Any:
        projections.append(1)
        return chunks(*args, **settings)

    linear_logprobs.chunks = counted
    sft = partial(sft_loss, config=None)
    cases = {"sft_loss": (sft, 0), "another": (own_loss, 0), "sft_loss, first trained": (sft, 1)}
    report: dict[str, Any] = {}
    for (name, (loss, first)), tokens in itertools.product(cases.items(), (64, 12)):
        engine.initialize()
        for _ in range(2):  # the first step makes what later ones have
            data = batch(tokens, first)
            projections.clear()
            with waits_of(engine) as waits, engine.train_mode():
                output = engine.train_batch(data, loss)
            engine.lr_scheduler_step()
        report[f"{name}, {tokens}"] = {
            "waits": dict(waits),
            "micro batches": len(output["loss"]),
            "projections": len(projections),
            "loss": sum(output["loss"]),
            "norm": output["metrics"]["grad_norm"],
            "log_probs": [row.tolist() for row in output["model_output"]["log_probs"].unbind()],
        }
    losses.sft_loss = changed
    try:
        engine.train_batch(batch(64), partial(changed, config=None))
    except LossFunctionError as error:
        report["changed"] = str(error)
    with open(out, "w") as file:
        json.dump(report, file, indent=1)


main(*sys.argv[1:])
