"""What a checkpoint directory tells about its model before anything is built. Imports neither torch nor Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megascend.huggingface.files import check_vocabulary, read_config, tensor_shapes
from megascend.parallel.topology import ModelShape


@dataclass(frozen=True)
class ModelInfo:
    """Shape and weights of a checkpoint.

    Attributes:
        shape: what the topology has to divide.
        tensor_names: of all weights in the checkpoint.
        parameter_count: elements of all weights.
        active_matmul_parameters: elements of the weights that multiply each token (embedding look-up excluded, the
            output projection included, of the experts only those a token is sent to).
    """

    shape: ModelShape
    tensor_names: list[str]
    parameter_count: int
    active_matmul_parameters: int
    attention_width: int

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of forward and backward for one token of a causal sequence of ``length`` tokens.

        6 per matmul parameter (Kaplan et al. 2020, section 2.1), and for attention 12 * layers * heads * head dim *
        length / 2, the half because of the causal mask (PaLM, appendix B). Recomputation is not counted.
        """
        return 6 * self.active_matmul_parameters + 6 * self.shape.num_layers * self.attention_width * length


def inspect_checkpoint(model_dir: Path) -> ModelInfo:
    """Read ``config.json`` and the headers of the weight files.

    Raises:
        CheckpointError: something is missing, truncated, or of another model.
    """
    config = read_config(model_dir)
    shapes = tensor_shapes(model_dir)
    check_vocabulary(config, shapes)
    shape = ModelShape.from_hf_config(config)
    text = config.get("text_config", config)
    tied = "lm_head.weight" not in shapes
    topk = text.get("num_experts_per_tok") or 0
    active = 0.0
    for name, dims in shapes.items():
        size = math.prod(dims)
        if len(dims) < 2 or (name.endswith("embed_tokens.weight") and not tied):
            continue
        active += size * topk / shape.num_experts if ".experts." in name and shape.num_experts else size
    head_dim = text.get("head_dim") or shape.hidden_size // shape.num_heads
    return ModelInfo(
        shape=shape,
        tensor_names=list(shapes),
        parameter_count=sum(math.prod(dims) for dims in shapes.values()),
        active_matmul_parameters=int(active),
        attention_width=shape.num_heads * head_dim,
    )
