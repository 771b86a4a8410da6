"""``python -m megascend.apps.train.self_check_worker``: small models in transformers and in Megatron-Core, on the CPU.

It imports, reads the name of a file with its job from its standard input, and works; without a name it ends.

The transformers side of every model comes first: building an mcore-bridge model changes what transformers builds
afterwards. The Megatron side is the backend as any program constructs it. Job and result are JSON files:
:mod:`megascend.models.selfcheck.process` says what is in them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.models import register_architecture
from megascend.models.checkpoint_files.architectures import make_known_to_transformers
from megascend.models.registry import from_reference
from megascend.models.selfcheck.process import TrialResult
from megascend.models.selfcheck.trial_inputs import (
    ImageTokens,
    choose_samples,
    description,
    difference,
    plain_options,
    randomise,
    reach_limits,
    settings,
    text_vocabulary,
)
from megascend.reference import fla as reference_fla
from megascend.runtime.bootstrap import patches
from megascend.runtime.bootstrap.import_hooks import after_import
from megascend.runtime.bootstrap.providers import packages
from megascend.surroundings import die_with_parent

HIDDEN_PACKAGES = ("torch_npu", *reference_fla.PACKAGES, *packages())
"""Packages hidden from a check on the CPU even if installed: transformers imports those that it finds. Without the
kernels of linear attention, which run on GPUs only, it computes in plain PyTorch."""


def main() -> None:
    """Run all trials of a job; the error of one of its models is part of the result."""
    die_with_parent()  # without its parent, no process reads the result
    torch.set_num_threads(1)
    after_import(patches.IMPORT_UTILS, patches.cache_import_structure)
    for name in HIDDEN_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM  # noqa: F401  while there may be no job yet

    if not (job_path := sys.stdin.readline().strip()):
        return
    started = time.perf_counter()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    for architecture in job["architectures"]:
        register_architecture(from_reference(architecture))
    folder = Path(job["folder"])
    references = [reference(trial, folder / str(index)) for index, trial in enumerate(job["trials"])]
    made_ready = time.perf_counter()

    import megascend

    megascend.bootstrap("cpu", engine="megatron")
    findings = [
        finding if "models" not in finding else compare(finding, folder / str(i))
        for i, finding in enumerate(references)
    ]
    result = {
        "findings": findings,
        "seconds": time.perf_counter() - started,
        "reference_seconds": made_ready - started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


# --- transformers ---


def reference(trial: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the model of ``trial`` to ``folder``, with its samples, and each sample's logits from a forward pass of its own.

    Samples come in ascending order of length: transformers' dynamic RoPE remembers the longest sequence it has seen.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(trial["config"]), encoding="utf-8")
    try:
        make_known_to_transformers(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        images = ImageTokens.of(trial["config"], trial["seed"])
        loader = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
        model = loader.from_config(config, **plain_options()).eval()
        randomise(model, trial["seed"])
        models = write_models(model, trial, images, folder)
    except Exception as error:  # noqa: BLE001  any architecture's code may raise anything; the report carries it
        return {"transformers_problem": description(error)}
    return {"models": models, "full": settings(config), "default": settings(type(config)())}


def write_models(
    model: Any, trial: dict[str, Any], images: ImageTokens | None, folder: Path
) -> dict[str, dict[str, Any]]:
    """Write a model, and another one at its limits if it has some; return the samples of each by its folder's name."""
    models: dict[str, dict[str, Any]] = {}
    vocabulary, unreached = text_vocabulary(trial["config"]), ""
    for name in ("plain", "at limits"):
        chosen = choose_samples(model, vocabulary, sorted(trial["lengths"]), trial["seed"], images)
        models[name] = chosen | {"images": images, "unreached": unreached}
        model.save_pretrained(folder / name, safe_serialization=True)
        # The user's own config.json: transformers would write the configuration in another form.
        (folder / name / "config.json").write_text(json.dumps(trial["config"]), encoding="utf-8")
        if (unreached := reach_limits(model, chosen, images)) is None:
            break
    return models


# --- Megatron ---


def compare(reference: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compare each model of a trial with transformers'; return the worst result."""
    results = [compare_model(chosen, folder / name) for name, chosen in reference["models"].items()]
    return vars(TrialResult.worst(results)) | {"full": reference["full"], "default": reference["default"]}


def compare_model(chosen: dict[str, Any], folder: Path) -> TrialResult:
    """Compare log-probabilities and logits with transformers', for each sample alone and for all in one micro batch."""
    import megascend

    images = chosen["images"]
    parts = [None if images is None else images.images(ids) for ids in chosen["samples"]]
    samples = [
        megascend.Sample.causal(ids.tolist(), images=None if part is None else megascend.SampleImages(*part))
        for ids, part in zip(chosen["samples"], parts, strict=True)
    ]
    lengths = [len(sample) for sample in samples]
    batching = megascend.Batching(micro_batch_tokens=sum(lengths), max_length=max(lengths))
    try:
        with megascend.MegatronBackend(
            model=folder,
            precision="fp32",
            platform="cpu",
            batching=batching,
            self_check=False,
        ) as backend:
            separate = [part for sample in samples for part in scores(backend, [sample])]
            batched = scores(backend, samples)
    except Exception as error:  # noqa: BLE001  mcore-bridge raises anything; the report carries it
        return TrialResult(megatron_problem=description(error))
    expected = [(logits, ids[1:]) for logits, ids in zip(chosen["logits"], chosen["samples"], strict=True)]
    largest = max(float(logits.abs().max()) for logits, _ in expected)
    differences = [
        [difference(ours, theirs) / largest for ours, theirs in zip(outputs, expected, strict=True)]
        for outputs in (separate, batched)
    ]
    return TrialResult(
        lengths=lengths,
        separate=differences[0],
        batched=differences[1],
        largest_logit=largest,
        margin=chosen["margin"],
        rounding=chosen["rounding"],
        unreached=chosen["unreached"],
    )


def scores(backend: Any, samples: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return logits [n, vocabulary] and log-probabilities of the targets [n] of every sample, from one micro batch."""
    result = backend.forward(samples, logits=True)
    return list(zip(result.logits, result.logprobs, strict=True))


if __name__ == "__main__":
    main()
