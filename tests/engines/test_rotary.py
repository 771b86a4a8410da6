"""Length-dependent rotary embeddings: each sample of a micro batch is rotated as transformers rotates it separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascend.engines.common.rotary import RotaryByLength, _borders
from support.host_waits import HostWaits

ORIGINAL, LONG, SHORT, LONGER = 16, 30, 7, 40
FACTORS = {"short_factor": [1.0 + index for index in range(8)], "long_factor": [4.0 + index for index in range(8)]}


def rotary(kind: str) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    settings |= {"original_max_position_embeddings": ORIGINAL} | (FACTORS if kind == "longrope" else {})
    longest = ORIGINAL if kind == "dynamic" else 64  # above which dynamic frequencies change
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": longest}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=settings))


def reference(kind: str, length: int) -> Tensor:
    """Return cosines and sines [2, length, head dim] of a sample, from transformers in a fresh state."""
    return torch.stack(rotary(kind)(torch.zeros(1), torch.arange(length)[None]))[:, 0]


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_packed_samples_get_the_frequencies_of_their_length(kind: str) -> None:
    lengths = [LONG, SHORT, LONGER, SHORT]
    model = nn.Sequential(rotary(kind))
    by_length = RotaryByLength(model)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    for _ in range(2):  # transformers remembers the longest sequence of earlier calls
        by_length.enter_samples(sample, lengths)
        embeddings = torch.stack(model[0](torch.zeros(1), positions))[:, 0].split(lengths, dim=1)
        for part, length in zip(embeddings, lengths, strict=True):
            assert torch.equal(part, reference(kind, length))
    unpatched = torch.stack(rotary(kind)(torch.zeros(1), positions))[:, 0].split(lengths, dim=1)
    assert torch.equal(unpatched[1], reference(kind, SHORT)) == (kind == "default"), "transformers alone mixes them up"


def test_dynamic_frequencies_are_set_without_waiting_for_the_device() -> None:
    lengths = [LONG, SHORT, LONGER]
    model = nn.Sequential(rotary("dynamic"))
    by_length = RotaryByLength(model)
    with HostWaits() as waits:
        sample = torch.arange(len(lengths), device=torch.device("cpu"))[:, None].expand(-1, LONGER)
        positions = torch.arange(LONGER, device=torch.device("cpu")).expand(len(lengths), -1)
        by_length.enter_samples(sample, lengths)
        waits.found.clear()
        model[0](torch.zeros(1, device=torch.device("cpu")), positions)
        waited = dict(waits.found)
    assert not waited


def test_dynamic_border_is_max_position_embeddings() -> None:
    """Ignore ``original_max_position_embeddings``, as transformers does."""
    lengths = [10, 14]  # above the one, below the other
    model = nn.Sequential(rotary("dynamic"))
    model[0].config.rope_parameters["original_max_position_embeddings"] = 8
    by_length = RotaryByLength(model)
    by_length.enter_samples(torch.tensor([[0] * 10 + [1] * 14]), lengths)
    groups = by_length.groups(_borders(model[0], dynamic=True), dynamic=True)
    assert [length for length, _ in groups] == [14], "both have the frequencies of short sequences"


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_padding_behind_a_sample_does_not_make_it_longer(kind: str) -> None:
    lengths, total = [LONG, SHORT, LONGER], LONGER
    model = nn.Sequential(rotary(kind))
    by_length = RotaryByLength(model)
    by_length.enter_samples(torch.arange(len(lengths))[:, None].expand(-1, total), lengths)
    embeddings = torch.stack(model[0](torch.zeros(1), torch.arange(total).expand(len(lengths), -1)))
    for row, length in enumerate(lengths):
        assert torch.equal(embeddings[:, row, :length], reference(kind, length))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_part_of_a_sample_has_the_frequencies_of_all_of_it(kind: str) -> None:
    """Give two ranks halves of each sample."""
    lengths = [LONG, SHORT + 1]
    for rank in range(2):
        model = nn.Sequential(rotary(kind))
        by_length = RotaryByLength(model)
        halves = [torch.arange(length).chunk(2)[rank] for length in lengths]
        sample = torch.cat([torch.full_like(half, index) for index, half in enumerate(halves)])[None]
        by_length.enter_samples(sample, lengths)
        embeddings = torch.stack(model[0](torch.zeros(1), torch.cat(halves)[None]))[:, 0]
        for part, half, length in zip(
            embeddings.split([len(half) for half in halves], 1), halves, lengths, strict=True
        ):
            assert torch.equal(part, reference(kind, length)[:, half])
