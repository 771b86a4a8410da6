"""A backend that computes nothing and records its calls, and a service on it behind a test client."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient

from megascend.apps.sampling.request import SampledSequence, SampleRequest, SampleResult
from megascend.apps.serve.api.application import make_application, sweep
from megascend.apps.serve.api.keys import Keys, key_digest
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.scheduler.runner import run_commands
from megascend.apps.serve.served_model import ServedModel
from megascend.apps.serve.service import Service
from megascend.apps.serve.store.recovery import keep_state
from megascend.config.serve import ServeConfig
from megascend.errors import CheckpointError, ConfigError, DataError
from megascend.training.batch.results import AdapterLoss, StepResult

KEYS = {name: f"tml-{name}-0123456789abcdef" for name in ("alice", "bob")}
VOCABULARY = 100
HELD_S = 300.0
"""What a test holds back stays so for so long, in seconds, and no longer if the test forgets it."""
PROJECTIONS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head")


class Result:
    """Return values of forward_backward, forward and optimizer_step."""

    def __init__(self, adapters: Mapping[str, Any], logprobs: Sequence[torch.Tensor] = ()) -> None:
        self.adapters, self.logprobs = adapters, list(logprobs)


class RecordingBackend:
    """Log-probabilities are minus the target's id; ``calls`` has what was run, in order."""

    rank = 0

    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.sampled: list[list[int]] = []  # the last token of every prompt, of each batch
        self.sampling = threading.Event()
        self.sampling.set()

    def from_rank_0(self, produce: Any) -> Any:
        return produce()

    def gather_by_data_rank(self, obj: Any) -> list[Any]:
        return [obj]

    def shard(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples)

    def check_samples(self, samples: Sequence[Any]) -> None:
        for sample in samples:
            if int(sample.target_ids.max()) >= VOCABULARY:
                raise DataError(f"target_ids {int(sample.target_ids.max())}")

    def forward_backward(self, samples: Sequence[Any], loss: Any, logprobs: bool = False) -> Result:
        self.gate.wait(HELD_S)
        names = list(dict.fromkeys(sample.adapter for sample in samples))
        self.calls.append(("forward_backward", *((name, _targets(samples, name)) for name in names)))
        losses = {}
        for name in names:
            adapter_samples = [sample for sample in samples if sample.adapter == name]
            total = sum(float((sample.weights * sample.target_ids).sum()) for sample in adapter_samples)
            losses[name] = AdapterLoss(
                total, sum(map(len, adapter_samples)), sum(map(len, adapter_samples)), {"ratio": math.nan, "kl": 0.5}
            )
        return Result(losses, [-sample.target_ids.float() for sample in samples])

    def forward(self, samples: Sequence[Any]) -> Result:
        self.calls.append(("forward", samples[0].adapter))
        return Result({}, [-sample.target_ids.float() for sample in samples])

    def generate(
        self, requests: Sequence[SampleRequest], tokens: int, cancelled: Any = None
    ) -> Iterator[Mapping[int, SampleResult]]:
        """Continue every response by counting from the last token of its prompt."""
        self.sampled.append([request.prompt[-1] for request in requests if request.prompt])
        self.sampling.wait(HELD_S)
        results = {}
        for number, request in enumerate(requests):
            if not request.prompt:
                results[number] = SampleResult(error="the prompt is empty")
                continue
            counts = tuple(request.prompt[-1] + 1 + offset for offset in range(request.params.max_tokens))
            sample = SampledSequence(counts, tuple(-float(token) for token in counts), "length")
            results[number] = SampleResult((sample,) * request.num_samples)
        yield results

    def optimizer_step(self, adapters: Sequence[str], adam: Any = None) -> Result:
        self.calls.append(("optimizer_step", *adapters, adam))
        return Result({name: StepResult(1.5, adam[name].lr, adam[name].lr == 13.0) for name in adapters})

    def discard_gradients(self, adapters: Sequence[str]) -> None:
        self.calls.append(("discard", *adapters))

    def recover_memory(self) -> bool:
        self.calls.append(("recover_memory",))
        return True

    def add_adapter(self, name: str, lora: Any = None) -> None:
        if lora.rank > 64:
            raise ConfigError(f"rank {lora.rank} is above 64")
        self.adapters[name] = lora
        self.calls.append(("add", name))

    def remove_adapter(self, name: str) -> None:
        del self.adapters[name]
        self.calls.append(("remove", name))

    def save_adapter(self, name: str, path: str, optimizer: bool = True) -> None:
        if Path(path).name == "disk-full":
            raise CheckpointError("no space left")
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "adapter_model.safetensors").write_bytes(b"12345")
        self.calls.append(("save", name, optimizer))

    def load_adapter(
        self, name: str, path: str, lora: Any = None, optimizer: bool = True, replace: bool = False
    ) -> None:
        assert (Path(path) / "adapter_model.safetensors").exists()
        self.adapters[name] = path
        self.calls.append(("load", name, optimizer))


def _targets(samples: Sequence[Any], name: str) -> list[list[int]]:
    return [sample.target_ids.tolist() for sample in samples if sample.adapter == name]


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Caller:
    """One tenant's requests."""

    def __init__(self, client: TestClient, key: str | None) -> None:
        self.client, self.headers = client, {} if key is None else {"X-API-Key": key}

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        headers = {**self.headers, **options.pop("headers", {})}
        return self.client.post(f"/api/v1/{path}", json=body, headers=headers, **options)

    def get(self, path: str, method: str = "GET") -> Any:
        return self.client.request(method, f"/api/v1/{path}", headers=self.headers)

    def ask(self, path: str, body: Any) -> Any:
        """Send a request and return the answer of its future."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return self.fetch(response.json()["request_id"])

    def fetch(self, name: str) -> Any:
        response = self.post("retrieve_future", {"request_id": name})
        assert response.status_code == 200, response.text
        return response.json()

    def model(self, rank: int = 4) -> str:
        """Create a model in a new session."""
        session = self.post("create_session", {"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank}}
        return self.ask("create_model", body)["model_id"]

    def forward_backward(self, model: str, number: int | None, *targets: int, **changes: Any) -> str:
        """Send a forward_backward of one sample; return its request id."""
        response = self.post("forward_backward", train_body(model, number, *targets, **changes))
        assert response.status_code == 200, response.text
        return response.json()["request_id"]

    def optim_step(self, model: str, number: int | None, lr: float = 1e-3) -> str:
        response = self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": lr}})
        assert response.status_code == 200, response.text
        return response.json()["request_id"]


def train_body(
    model: str, number: int | None, *targets: int, loss: str = "cross_entropy", **inputs: Any
) -> dict[str, Any]:
    """Build a JSON request with one sample."""
    tensors = {"target_tokens": {"data": list(targets), "dtype": "int64", "shape": [len(targets)]}}
    tensors |= {name: {"data": value, "dtype": "float32"} for name, value in inputs.items()}
    chunk = {"type": "encoded_text", "tokens": [1] * len(targets)}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}
    return {"model_id": model, "seq_id": number, "forward_backward_input": {"data": [datum], "loss_fn": loss}}


class Served:
    """A service, its backend, and callers."""

    def __init__(self, service: Service, backend: RecordingBackend, client: TestClient, clock: Clock) -> None:
        self.service, self.backend, self.client, self.clock = service, backend, client, clock
        self.alice, self.bob = (Caller(client, KEYS[name]) for name in ("alice", "bob"))

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        assert self.client.portal is not None
        self.client.portal.call(sweep, self.service)


@contextmanager
def served(storage: Path, **settings: Any) -> Iterator[Served]:
    """Run a service on a RecordingBackend in this process."""
    config = ServeConfig(model=storage, storage=storage, window_ms=0, **settings)
    base = ServedModel(("tiny", "/models/tiny"), Path("/models/tiny"), "Tiny", 512, VOCABULARY, PROJECTIONS)
    backend, clock, inbox = RecordingBackend(), Clock(1000.0), Inbox(0, config.batch_tokens)
    service = Service(config, base, inbox, clock)
    if config.durable:
        (storage / "config.json").touch()  # of the model
        keep_state(service)
    keys = Keys({key_digest(key): name for name, key in KEYS.items()})
    with TestClient(make_application(service, keys), raise_server_exceptions=False) as client:

        def report(outcomes: list[Any]) -> None:
            client.portal.call(service.finish, outcomes)  # type: ignore[union-attr]

        worker = threading.Thread(
            target=run_commands, args=(backend, config.batch_tokens, inbox, report, backend.generate)
        )
        worker.start()
        try:
            yield Served(service, backend, client, clock)
        finally:
            backend.gate.set()
            backend.sampling.set()
            inbox.close()
            worker.join(20)
