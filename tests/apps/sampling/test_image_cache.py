"""A KV cache with images in prompts: responses against transformers' ``generate``, on every engine; adapters against peft."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_responses import VARIED, assert_cached_equal, engine_results, megatron_results

from megascend import Adapters, Batching, Parallel
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from megascend.training.batch.images import SampleImages
from support.generated import GREEDY, assert_equal, generated
from support.images import END, GRIDS, MERGE, TOKEN, image_tokens, pixels, tower_adapter
from support.stacks import FIRST_STACK

pytestmark = [
    pytest.mark.usefixtures("megatron_imported"),
    pytest.mark.skipif(not FIRST_STACK, reason="models with images need the first stack"),
]

LAYOUTS = {
    "single": (1, Parallel()),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
    "TP2 x EP2 + SP": (2, Parallel(tensor=2, expert=2, expert_tensor=1)),
}
CASES = [
    ("qwen3_vl", "TP2 + SP", True),
    ("qwen3_5", "PP2", True),
    *(
        pytest.param(arch, layout, packing, marks=pytest.mark.nightly)
        for arch, layout, packing in (
            ("qwen3_vl", "single", True),  # covered: TP2 + SP
            ("qwen3_vl", "single", False),
            ("qwen3_vl", "PP2", True),
            ("qwen3_vl", "DP2", True),
            ("qwen3_vl_moe", "TP2 x EP2 + SP", True),
            ("qwen3_5", "single", False),
            ("qwen3_5", "TP2 + SP", True),
            ("qwen3_5_moe", "TP2 x EP2 + SP", True),
        )
    ),
]
ENGINES: dict[str, tuple[str, int, str, bool]] = {
    "fsdp": ("fsdp", 2, "qwen3_vl", True),
    "fsdp, padded": ("fsdp", 1, "qwen3_5", False),
    "single": ("single", 1, "qwen3_vl", False),
    "single, linear attention": ("single", 1, "qwen3_5", False),
}


def prompts() -> list[tuple[list[int], SampleImages | None, dict[str, Any]]]:
    """Return prompts with one, several and no images, and the same for transformers; the last one ends with an image."""
    result = []
    for number in (0, 1, 2, 5, 7):
        tokens, patches, grids = image_tokens()[number], pixels()[number], torch.tensor(GRIDS[number])
        if number == 7:
            # The response begins behind the token that ends the image. Not at the image itself: transformers' generate takes
            # new tokens for those of an image if the prompt's last one is.
            tokens = tokens[: len(tokens) - tokens[::-1].index(END)]
        row = torch.tensor([tokens])
        extra: dict[str, Any] = {"mm_token_type_ids": (row == TOKEN).int()}
        images = None
        if patches is not None:
            images = SampleImages(patches, grids)
            extra |= {"pixel_values": patches, "image_grid_thw": grids}
            assert int(grids.prod(1).sum()) // MERGE**2 == tokens.count(TOKEN)
        result.append((tokens, images, extra))
    return result


def requests() -> list[SampleRequest]:
    """Return greedy requests, and one whose responses share an image and end after different numbers of tokens."""
    tokens, images, _ = prompts()[1]
    group = SampleRequest(tokens, VARIED, num_samples=3, images=images)
    return [*(SampleRequest(tokens, GREEDY, images=images) for tokens, images, _ in prompts()), group]


def expected_responses(checkpoint: Path, adapter: Path | None = None) -> list[Any]:
    return generated(checkpoint, [(tokens, adapter) for tokens, *_ in prompts()], [extra for *_, extra in prompts()])


@pytest.mark.parametrize(("arch", "layout", "packing"), CASES)
def test_responses_of_megatrons_engine_equal_transformers_generate(
    arch: str, layout: str, packing: bool, parity_folder: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, arch)
    ranks = megatron_results(checkpoint, LAYOUTS[layout], packing, requests())
    assert_cached_equal(ranks, expected_responses(checkpoint))
    assert all(len({len(sample.tokens) for sample in results[-1].samples}) > 1 for results, *_ in ranks)


@pytest.mark.nightly_cases("single*", "*, padded")  # covered: fsdp; padded by test_recurrent_cache.py
@pytest.mark.parametrize("name", ENGINES)
def test_responses_of_engines_without_megatron_equal_transformers_generate(
    name: str, parity_folder: Path, tmp_path: Path
) -> None:
    engine, ranks, arch, packing = ENGINES[name]
    checkpoint = case_checkpoint(parity_folder, arch)
    assert_cached_equal(
        engine_results(tmp_path, engine, ranks, checkpoint, packing, requests()), expected_responses(checkpoint)
    )


def test_adapters_in_the_tower_sample_as_peft(parity_folder: Path) -> None:
    """Answer prompts of two adapters and of the base model in one batch."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")
    adapters = {f"tenant-{seed}": tower_adapter(checkpoint, seed) for seed in range(2)}
    names = [None, *adapters]

    def on_rank() -> list[SampleResult]:
        from megascend.apps.sampling.sampler import Sampler
        from megascend.backends import MegatronBackend

        with MegatronBackend(
            model=checkpoint,
            precision="fp32",
            adapters=Adapters(),
            vision_tower="train",
            batching=Batching(micro_batch_tokens=512),
            self_check=False,
        ) as backend:
            for name, path in adapters.items():
                backend.load_adapter(name, path, optimizer=False)
            requests_by_name = [
                dataclasses.replace(request, adapter=name) for request in requests()[:-1] for name in names
            ]
            sampler = Sampler(backend)
            results = sampler.generate(requests_by_name)
            assert sampler.cache_unsupported_reason is None
            return results

    [results] = run_distributed(on_rank, 1, init=False, timeout_s=120)
    for number, name in enumerate(names):
        expected = expected_responses(checkpoint, None if name is None else adapters[name])
        assert_equal(results[number :: len(names)], expected)
