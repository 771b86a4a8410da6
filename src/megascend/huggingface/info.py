"""What a checkpoint directory tells about its model before anything is built. Imports neither torch nor Megatron."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface import scalar_head as scalar_heads
from megascend.huggingface.exported import extra_tensors
from megascend.huggingface.files import TensorHeader, check_vocabulary, read_config, tensor_headers
from megascend.huggingface.model_shape import ModelShape, optional_size
from megascend.huggingface.scalar_head import HeadKind, ScalarHead


@dataclass(frozen=True)
class ModelInfo:
    """Shape and weights of a checkpoint.

    Attributes:
        shape: what the topology has to divide.
        tensors: headers of all weights in the checkpoint that the model has; heads for multi-token prediction are not built.
        parameter_count: elements of these weights.
        active_matmul_parameters: elements of the weights that multiply each token (embedding look-up excluded, the
            output projection included, of the experts only those a token is sent to).
        scalar_head: what stands in the output layer's place; None for a causal language model.
    """

    shape: ModelShape
    tensors: Mapping[str, TensorHeader]
    parameter_count: int
    active_matmul_parameters: int
    attention_width: int
    scalar_head: ScalarHead | None = None

    @property
    def tensor_names(self) -> list[str]:
        """Names of :attr:`tensors`."""
        return list(self.tensors)

    def flops_per_token(self, length: int, frozen: bool = False) -> float:
        """Model FLOPs of forward and backward for one token of a causal sequence of ``length`` tokens.

        6 per matmul parameter (Kaplan et al. 2020, section 2.1): 2 forward, 2 for the gradient of its input, 2 for its
        own. For attention, which has no weights, 12 * layers * heads * head dim * length / 2, the half because of the
        causal mask (PaLM, appendix B). Recomputation is not counted.

        Args:
            frozen: the weights have no gradients, so 4 per matmul parameter; attention as before. What adapters compute
                is not counted: with low ranks it is little.
        """
        of_weights = (4 if frozen else 6) * self.active_matmul_parameters
        return of_weights + 6 * self.shape.num_layers * self.attention_width * length


def linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of the layers that a LoRA adapter may target, from the names and shapes of a checkpoint's weights. Pure.

    Experts' layers have the names under which transformers fuses them; routers are left out. Embedding and output layer
    are among them unless they share a weight.
    """
    untied = "lm_head.weight" in shapes
    found: dict[str, None] = {}
    for weight, dims in shapes.items():
        name = re.sub(r"\.experts\.\d+\.", ".experts.", weight.removesuffix(".weight"))
        name = re.sub(r"\.experts\.(gate|up)_proj$", ".experts.gate_up_proj", name)
        linear = ".layers." in name and len(dims) > 1 and not name.endswith("gate")
        if linear or (untied and name.split(".")[-1] in ("embed_tokens", "lm_head")):
            found[name] = None
    return list(found)


def inspect_checkpoint(model_dir: Path, head: HeadKind = "lm") -> ModelInfo:
    """Read ``config.json`` and the headers of the weight files.

    Args:
        head: what the model shall end with.

    Raises:
        CheckpointError: something is missing, truncated, or of another model.
        ConfigError: there is no such ``head``.
    """
    config = read_config(model_dir)
    text = config.get("text_config") or config
    try:
        shape = ModelShape.from_hf_config(config)
        topk, head_dim = optional_size(text, "num_experts_per_tok") or 0, optional_size(text, "head_dim")
        optional_size(text, "num_nextn_predict_layers")
    except ConfigError as error:
        raise CheckpointError(f"{Path(model_dir) / 'config.json'}: {error}") from None
    tensors = tensor_headers(model_dir)
    check_vocabulary(shape, {name: header.shape for name, header in tensors.items()})
    for name in extra_tensors(config, tensors):
        del tensors[name]
    scalar_head = scalar_heads.find(head, config, tensors, model_dir)
    tensors = scalar_heads.with_head(tensors, scalar_head, config)
    shapes = {name: header.shape for name, header in tensors.items()}
    tied = "lm_head.weight" not in shapes and scalar_head is None
    active = 0.0
    for name, dims in shapes.items():
        size = math.prod(dims)
        if len(dims) < 2 or (name.endswith("embed_tokens.weight") and not tied):
            continue
        active += size * topk / shape.num_experts if ".experts." in name and shape.num_experts else size
    head_dim = head_dim or shape.hidden_size // shape.num_heads
    return ModelInfo(
        shape=shape,
        tensors=tensors,
        parameter_count=sum(math.prod(dims) for dims in shapes.values()),
        active_matmul_parameters=int(active),
        attention_width=shape.num_heads * head_dim,
        scalar_head=scalar_head,
    )
