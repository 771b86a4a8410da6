"""Features of images go to their own tokens in padded batches, where mcore-bridge mistakes their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("megatron_imported")

TOKEN = 9
IDS = torch.tensor([[1, 2, TOKEN], [TOKEN, 3, 4]])
"""Two rows: the first image's feature is the last token of the first row, the second's the first of the second row."""
FINAL, INNER = torch.tensor([[10.0], [20.0]]), torch.tensor([[1.0], [2.0]])


class Tower(nn.Module):
    """A tower whose features are :data:`FINAL` and :data:`INNER`, whatever it sees."""

    dtype = torch.float32

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)
        self.config = SimpleNamespace(spatial_merge_size=2, in_channels=1, temporal_patch_size=1, patch_size=1)
        self.grids: list[Any] = []

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        self.grids.append(grid_thw.tolist())
        return SimpleNamespace(pooler_output=FINAL * self.scale, deepstack_features=[INNER * self.scale])


def added(inputs: dict[str, Any]) -> Tensor:
    """Return what the first decoder layer adds to hidden states [sequence, batch, 1], as mcore-bridge's block does."""
    from mcore_bridge.model.mm_gpts.qwen3_vl import Qwen3VLTransformerBlock

    masks, features = inputs["visual_pos_masks"], inputs["deepstack_visual_embeds"]
    block: Any = object.__new__(Qwen3VLTransformerBlock)
    return Qwen3VLTransformerBlock._deepstack_process(block, torch.zeros(3, 2, 1), masks, features[0])


def test_features_go_to_their_tokens() -> None:
    from megascend.engines.megatron.vision import Features

    features = Features(Tower(), TOKEN, SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1))
    inputs = features.insert(
        torch.zeros(2, 3, 1),
        input_ids=IDS,
        pixel_values=torch.zeros(8, 1),
        image_grid_thw=torch.tensor([[1, 2, 2]] * 2),
    )
    assert inputs["inputs_embeds"][..., 0].tolist() == [[0, 0, 10], [20, 0, 0]]
    assert added(inputs)[..., 0].T.tolist() == [[0, 0, 1], [2, 0, 0]]


@pytest.mark.parametrize("trained", [True, False])
def test_text_alone_runs_the_tower_only_if_it_is_trained(trained: bool) -> None:
    from megascend.engines.megatron.vision import Features

    tower = Tower(trained=trained)
    features = Features(tower, TOKEN, SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1))
    embeddings = torch.ones(1, 2, 1, requires_grad=True)
    inputs = features.insert(embeddings, input_ids=torch.tensor([[1, 2]]))
    assert inputs.keys() == {"inputs_embeds"}
    assert inputs["inputs_embeds"].tolist() == embeddings.tolist()
    inputs["inputs_embeds"].sum().backward()
    assert tower.grids == ([[[1, 2, 2]]] if trained else [])
    assert (None if tower.scale.grad is None else float(tower.scale.grad)) == (0.0 if trained else None)
