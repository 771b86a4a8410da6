"""Load-balancing loss of a sharded model's routers over the samples' tokens, equal in every layout.

transformers computes it for one forward pass on one rank. Here it is computed for a micro batch that several ranks may have parts
of, by either formula of :mod:`megascend.engines.common.load_balancing`, and averaged over the micro batches of all ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.config import Moe
from megascend.engines.common import load_balancing
from megascend.engines.common.load_balancing import Formula
from megascend.errors import ConfigError
from megascend.runtime.distributed.objects import all_reduce_numbers
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.micro_batch import MicroBatch

FUNCTION = "load_balancing_loss_func"
"""Function in the module of every model for which transformers has such a loss; routers of these models use softmax."""


class RouterLoss:
    """Load-balancing loss, from the logits that hooks record in a model's routers.

    Args:
        model: a transformers model.
        moe: settings with a formula and a coefficient.
        frozen: the model's own parameters are not trained.
    """

    def __init__(self, model: Any, moe: Moe, groups: ProcessGroups, *, frozen: bool) -> None:
        assert moe.aux_loss != "none"
        self._formula: Formula = moe.aux_loss
        self._coefficient, self._groups = moe.aux_loss_coefficient, groups
        self._weight = 0.0
        self._recording = False
        self._logits: list[Tensor] = []
        recorder = router_recorder(model, moe, frozen=frozen)
        self._top_k = model.config.get_text_config().num_experts_per_tok
        self._index = recorder.index
        self._routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        for router in self._routers:
            router.register_forward_hook(self._after)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Set the loss's weight for a call's micro batches, of which dummies do not count. Collective."""
        count = sum(not batch.dummy for batch in batches)
        total = all_reduce_numbers([float(count)], "dp", self._groups, purpose="micro batches")[0]
        # Gradients are averaged over all ranks: the world size turns that into a sum.
        self._weight = self._coefficient * self._groups.topology.world_size / max(total, 1.0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record router logits of the forward pass in the block; later router calls are recomputation."""
        self._logits, self._recording = [], True
        try:
            yield
        finally:
            self._recording = False

    def loss(self, batch: MicroBatch) -> Tensor:
        """Return the scalar to add to this rank's loss of the last micro batch. Collective.

        It has the gradient of the load-balancing loss but not its value: token counts have no gradient.
        """
        logits, self._logits = self._logits, []
        assert len(logits) == len(self._routers), f"{len(logits)} of {len(self._routers)} routers were called"
        # The tokens of a dummy do not count: it exists only so that its rank joins the others' collectives.
        real = batch.real[:, None]
        probabilities = [load_balancing.scores(layer.view(-1, layer.shape[-1]), "softmax") for layer in logits]
        counts = torch.stack([load_balancing.counts(layer.detach(), self._top_k, real) for layer in probabilities])
        if self._groups.topology.context > 1:
            # The loss is not linear in the counts, so parts of a sample cannot be balanced separately.
            dist.all_reduce(counts, group=self._groups.device_group("cp"))
        tokens = 0 if batch.dummy else sum(batch.lengths)
        factors = load_balancing.gradients(self._formula, counts, tokens, self._top_k)
        sums = torch.stack([(layer * real).sum(0) for layer in probabilities])
        return self._weight * (factors * sums).sum()

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        if self._recording:
            self._logits.append(output[self._index] if isinstance(output, tuple) else output)


def router_recorder(model: Any, moe: Moe, *, frozen: bool) -> Any:
    """Return transformers' OutputRecorder of a model's router logits; ConfigError if it has no such loss."""
    setting, name = f"moe.aux_loss={moe.aux_loss!r}", type(model).__name__
    if frozen:
        raise ConfigError(
            f"{setting} with adapters would make every adapter's gradients depend on the others' samples; set none"
        )
    recorders = getattr(model, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    if not hasattr(sys.modules[type(model).__module__], FUNCTION) or not hasattr(recorder, "target_class"):
        raise ConfigError(f"{setting}: transformers has no such loss for {name}; set none")
    return recorder
