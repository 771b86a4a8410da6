"""The engine: the members of ``megascend.engines.base.Engine`` that have no default, with parts of the package's own engines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megascend
from megascend.engines.base import Engine
from megascend.engines.common.adamw import ModelAdamW
from megascend.engines.common.full_model import FullModel
from megascend.engines.common.heads import PlainOutput
from megascend.training.batch.micro_batch import SequenceLayout
from megascend.training.checkpoint.hf_slices import HfSlice
from megascend.training.checkpoint.slices import TensorSlices

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class BigramEngine(Engine):
    kind = "bigram"

    def __init__(self, spec, context):
        super().__init__(spec, context)
        if spec.precision != "fp32":
            raise megascend.ConfigError(
                f"engine bigram: precision is fp32 only, got {spec.precision}; set precision: fp32"
            )
        self.layout = SequenceLayout(packing=False)
        torch.manual_seed(spec.seed)
        weights = load_file(context.model_dir / "model.safetensors")
        self.embedding, self.head = (torch.nn.Parameter(weights[name].to(self.device)) for name in (EMBEDDING, HEAD))
        self.model = torch.nn.ParameterDict({"embedding": self.embedding, "head": self.head})
        self.optimizer = Reducing(self.model, spec, self.groups.device_group("dp"))
        self.trainable = FullModel(self.optimizer)

    def run(self, batches, on_output, *, forward_only):
        results = []
        for batch in batches:
            hidden = torch.nn.functional.embedding(batch.input_ids.flatten(), self.embedding)
            output = PlainOutput(hidden, self.head, batch.targets, self.info.shape.vocab_size)
            loss, result = on_output(batch, output)
            results.append(result)
            if not forward_only:
                loss.backward()
        return results

    def weights(self):
        replica = self.groups.rank > 0  # every rank has the same, and the main one writes it
        return {
            name: TensorSlices.whole(parameter.detach(), replica=replica)
            for name, parameter in self.model.named_parameters()
        }

    def hf_slices(self):
        weights = {"embedding": (EMBEDDING, self.embedding), "head": (HEAD, self.head)}
        return {
            name: [HfSlice((0, 0), tuple(parameter.shape), weight, (0, 0))]
            for name, (weight, parameter) in weights.items()
        }

    def training_state(self, *, loading):
        return self.optimizer.state(self.weights(), loading=loading)

    def named_weights(self, adapter=None, *, receivers="all", device=None):
        if receivers == "all" or self.groups.rank in ({0} if receivers == "main" else receivers):
            for name, parameter in ((EMBEDDING, self.embedding), (HEAD, self.head)):
                yield name, parameter.detach().to(device or self.device)


class Reducing(ModelAdamW):
    """torch's AdamW on gradients that are summed over the data parallel ranks."""

    def __init__(self, model, spec, group):
        super().__init__(model, spec.optimizer, spec.schedule, spec.precision)
        self._parameters, self._group = list(model.parameters()), group

    def step(self, number, reduced, lr=None):
        for parameter in self._parameters:
            dist.all_reduce(parameter.grad, group=self._group)
        return super().step(number, reduced, lr)
