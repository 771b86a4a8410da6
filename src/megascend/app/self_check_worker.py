"""``python -m megascend.app.self_check_worker``: small models in transformers and in Megatron-Core, on the CPU.

It imports, reads the name of a file with its job from its standard input, and works; without a name it ends.

The transformers side of every model comes first: building an mcore-bridge model changes what transformers builds
afterwards. The Megatron side is the backend as any program constructs it. Job and result are JSON files:
:mod:`megascend.selfcheck.process` says what is in them.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megascend.bootstrap.import_structure import read_once_on_import
from megascend.bootstrap.providers import packages
from megascend.huggingface.architectures import make_known_to_transformers, register_architecture

HIDDEN_PACKAGES = ("torch_npu", *packages())
"""What must not find its way into a check on the CPU, even where it is installed: transformers looks for it by itself."""
LEAST_MARGIN = 3e-5
"""Of a choice of experts: distance of the last one chosen to the first one left out, over the spread of the scores.

Thirty times what fp32 rounding moves a score by, so that both sides choose the same experts."""
ATTEMPTS = 40
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Work through a job; what goes wrong with one of its models is part of the result."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody waits for the result of a process that is gone
    torch.set_num_threads(1)
    read_once_on_import()
    for name in HIDDEN_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM  # noqa: F401  while there may be no job yet

    if not (job_path := sys.stdin.readline().strip()):
        return
    started = time.perf_counter()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    for architecture in job["architectures"]:
        register_architecture(**architecture)
    folder = Path(job["folder"])
    references = [reference(trial, folder / str(index)) for index, trial in enumerate(job["trials"])]
    made_ready = time.perf_counter()

    import megascend

    megascend.bootstrap("cpu")
    findings = [
        found if "samples" not in found else compare(found, folder / str(i)) for i, found in enumerate(references)
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
    """Write the model of ``trial`` to ``folder``; its samples, and the logits of each by itself in a fresh forward pass.

    Samples come in ascending order of length: transformers' dynamic RoPE remembers the longest sequence it has seen.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(trial["config"]), encoding="utf-8")
    try:
        make_known_to_transformers(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        randomise(model, trial["seed"])
        chosen = choose_samples(model, config.vocab_size, sorted(trial["lengths"]), trial["seed"])
        model.save_pretrained(folder, safe_serialization=True)
    except Exception as error:  # noqa: BLE001  any architecture's code may raise anything; the report carries it
        return {"transformers_problem": described(error)}
    # As the user's file has it: transformers writes the configuration in its own words.
    (folder / "config.json").write_text(json.dumps(trial["config"]), encoding="utf-8")
    return chosen | {"full": settings(config), "default": settings(type(config)())}


def settings(config: Any) -> dict[str, Any]:
    """A configuration of transformers with all its defaults, as JSON has it."""
    return json.loads(config.to_json_string(use_diff=False))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter and buffer of the checkpoint at a scale that lets a mistake show.

    Norm weights around 1, biases around 0, matrices so that activations keep their scale, routers twice that, so that the
    choice of experts is no coin toss.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.1 * noise
            elif tensor.ndim < 2:
                value = 1.0 + 0.2 * noise
            elif "embed" in name or "lm_head" in name:
                value = 0.2 * noise
            else:
                gain = 2.0 if name.endswith(("gate.weight", "router.weight")) else 1.0
                value = gain * noise / tensor.shape[-1] ** 0.5
            tensor.copy_(value)


class Choices(TorchFunctionMode):
    """Watches every ``topk`` and remembers the narrowest margin of its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(self, scores: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        if not 0 < k < scores.shape[dim]:
            return
        best = scores.float().sort(dim, descending=True).values
        gaps = best.select(dim, k - 1) - best.select(dim, k)
        finite = best[best.isfinite()]
        gaps = gaps[gaps.isfinite()] / finite.std()
        if len(gaps):
            self.margin = min(self.margin, float(gaps.min()))


def choose_samples(model: torch.nn.Module, vocabulary: int, lengths: list[int], seed: int) -> dict[str, Any]:
    """Random token ids (one more than a sample's length) on which no choice of experts is close, and the model's logits.

    Raises:
        RuntimeError: none of the attempts was free of near ties.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, logits, margins = [], [], []
    for length in lengths:
        tried = []
        for _ in range(ATTEMPTS):
            ids = torch.randint(vocabulary, (length + 1,), generator=generator)
            with torch.no_grad(), Choices() as choices:
                output = model(ids[None, :-1], use_cache=False).logits[0].float()
            tried.append(choices.margin)
            if choices.margin >= LEAST_MARGIN:
                break
        else:
            raise RuntimeError(f"no inputs without near ties in routing were found (widest margin {max(tried):.1e})")
        samples.append(ids)
        logits.append(output)
        margins.append(choices.margin)
    margin = min(margins)
    return {"samples": samples, "logits": logits, "margin": margin if margin < float("inf") else None}


# --- Megatron ---


def compare(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Hold the backend's log-probabilities and logits against transformers': every sample alone, and all in one micro batch."""
    import megascend

    samples = [megascend.Sample.causal(ids.tolist()) for ids in found["samples"]]
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
            alone = [part for sample in samples for part in scores(backend, [sample])]
            together = scores(backend, samples)
    except Exception as error:  # noqa: BLE001  mcore-bridge raises anything; the report carries it
        return {"megatron_problem": described(error)}
    expected = [(logits, ids[1:]) for logits, ids in zip(found["logits"], found["samples"], strict=True)]
    largest = max(float(logits.abs().max()) for logits, _ in expected)
    return {
        "largest_logit": largest,
        "margin": found["margin"],
        "full": found["full"],
        "default": found["default"],
        "lengths": lengths,
        "alone": [difference(mine, theirs) / largest for mine, theirs in zip(alone, expected, strict=True)],
        "together": [difference(mine, theirs) / largest for mine, theirs in zip(together, expected, strict=True)],
    }


def scores(backend: Any, samples: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Logits [n, vocabulary] and log-probabilities of the targets [n] of every sample, from one micro batch."""
    result = backend.forward(samples, logits=True)
    return list(zip(result.logits, result.logprobs, strict=True))


def difference(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    """Largest absolute difference of the logits and of the targets' log-probabilities; inf where one is not finite."""
    logits, targets = theirs
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    worst = max(float((mine[0] - logits).abs().max()), float((mine[1] - logprobs).abs().max()))
    return worst if worst == worst else float("inf")


def described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


if __name__ == "__main__":
    main()
