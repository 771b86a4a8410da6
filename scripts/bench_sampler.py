"""Measure the sampler's tokens a second on the training ranks, with and without its cache, alternating in one process.

    python scripts/bench_sampler.py MODEL                                  # a Hugging Face directory, on any platform
    torchrun --nproc-per-node 2 scripts/bench_sampler.py MODEL --tensor 2

Prompts and seeds are fixed, without stop sequences. Prints one JSON object: for each kind the seconds of every turn and the
median tokens a second, their ratio, and whether both sampled the same tokens (a few may differ if the order of sums differs).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import megascend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="megatron")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="responses, each to a prompt of its own")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--turns", type=int, default=3, help="timed ones, after one of each kind that is not")
    options = parser.parse_args()
    megascend.bootstrap(engine=options.engine)
    settings = {"precision": options.precision, "adapters": megascend.Adapters()}
    if options.engine == "megatron":
        settings |= {
            "parallel": megascend.Parallel(tensor=options.tensor, pipeline=options.pipeline),
            "self_check": False,
        }
    with megascend.make_backend(options.engine, model=options.model, **settings) as backend:
        draw = random.Random(0)
        params = megascend.SamplingParams(options.tokens, seed=1)
        requests = [
            megascend.SampleRequest([draw.randrange(backend.vocab_size) for _ in range(options.prompt)], params)
            for _ in range(options.rows)
        ]
        samplers = {kind: megascend.Sampler(backend, cache=kind == "cache") for kind in ("cache", "recomputed")}
        seconds: dict[str, list[float]] = {kind: [] for kind in samplers}
        tokens = {}
        for _ in range(options.turns + 1):
            for kind, sampler in samplers.items():
                start = time.perf_counter()
                results = sampler.generate(requests)
                seconds[kind].append(time.perf_counter() - start)
                tokens[kind] = [result.samples[0].tokens for result in results]
        count = options.rows * options.tokens
        speeds = {kind: count / statistics.median(durations[1:]) for kind, durations in seconds.items()}
        if backend.rank == 0:
            figures = {
                **vars(options),
                "device": str(backend.engine.device),
                "cache_unsupported_reason": samplers["cache"].cache_unsupported_reason,
                "seconds": seconds,
                "tokens_per_second": speeds,
                "ratio": speeds["cache"] / speeds["recomputed"],
                "same_tokens": tokens["cache"] == tokens["recomputed"],
            }
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
