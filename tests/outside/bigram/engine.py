"""The engine: the members of ``megascend.engines.base.Engine``, with the parts of the package's own engines that fit."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megascend
from megascend.batch.micro_batch import SequenceLayout
from megascend.engines.chunks import OPTIMIZER_KEY, Chunks
from megascend.engines.export import export
from megascend.engines.full_model import FullModel
from megascend.engines.hf_parts import HfPart
from megascend.engines.plain_head import HeadOutput
from megascend.engines.single.optimizer import Optimizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class BigramEngine:
    kind = "bigram"

    def __init__(self, context, adam, schedule, batching, precision, seed):
        if precision != "fp32":
            raise megascend.ConfigError(f"engine bigram: precision is fp32 only, got {precision}; set precision: fp32")
        self.topology, self.groups, self.info = context.topology, context.groups, context.info
        self.device, self.precision, self.batching = context.groups.device, precision, batching
        self.max_length, self.layout = batching.max_length or 4096, SequenceLayout(packing=False)
        self.model_dir = context.model_dir
        torch.manual_seed(seed)
        weights = load_file(context.model_dir / "model.safetensors")
        self.embedding, self.head = (torch.nn.Parameter(weights[name].to(self.device)) for name in (EMBEDDING, HEAD))
        self.model = torch.nn.ParameterDict({"embedding": self.embedding, "head": self.head})
        self.optimizer = Reducing(self.model, adam, schedule, precision, self.groups.device_group("dp"))
        self.trainable = FullModel(self.optimizer)

    def scales(self, micro_batches):
        return 1.0, 1.0  # gradients of micro batches and ranks add up

    def run(self, batches, on_output, *, forward_only):
        kept = []
        for batch in batches:
            hidden = torch.nn.functional.embedding(batch.input_ids.flatten(), self.embedding)
            output = HeadOutput(hidden, self.head, batch.targets, self.info.shape.vocab_size)
            loss, found = on_output(batch, output)
            kept.append(found)
            if not forward_only:
                loss.backward()
        return kept

    def evaluating(self):
        return contextlib.nullcontext()  # there is no dropout

    def state(self, *, everything):
        if self.groups.rank > 0 and not everything:
            return {}  # every rank has the same, and the main one writes it
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, kind, values in self.optimizer.tensors():
            found[OPTIMIZER_KEY.format(state=kind, key=name)] = values
        chunks = {name: Chunks(tuple(values.shape), values.dtype) for name, values in found.items()}
        for name, values in found.items():
            chunks[name].add((0,) * values.dim(), values)
        return chunks

    def hf_parts(self):
        whole = {"embedding": (EMBEDDING, self.embedding), "head": (HEAD, self.head)}
        return {name: [HfPart((0, 0), tuple(own.shape), weight, (0, 0))] for name, (weight, own) in whole.items()}

    def named_weights(self, adapter=None, *, receivers="all", device=None):
        if receivers == "all" or self.groups.rank in ({0} if receivers == "main" else receivers):
            for name, parameter in ((EMBEDDING, self.embedding), (HEAD, self.head)):
                yield name, parameter.detach().to(device or self.device)

    def export(self, path, adapter):
        weights = self.named_weights(adapter, receivers="main", device="cpu")
        export(weights, self.model_dir, path, "float32", self.groups, self.info)

    def random_streams(self):
        return None

    def restore_random_streams(self, state):
        pass

    def close(self):
        pass


class Reducing(Optimizer):
    """torch's AdamW on gradients that are summed over the data parallel ranks."""

    def __init__(self, model, adam, schedule, precision, group):
        super().__init__(model, adam, schedule, precision)
        self._parameters, self._group = list(model.parameters()), group

    def step(self, number, reduced):
        for parameter in self._parameters:
            dist.all_reduce(parameter.grad, group=self._group)
        return super().step(number, reduced)
