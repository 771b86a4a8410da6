"""The registry of providers: choice by name or platform, refusals, and a provider from outside the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megascend.config import Parallel
from megascend.config.registry import PROVIDERS
from megascend.errors import ConfigError, PlatformError
from megascend.runtime.bootstrap import providers
from megascend.runtime.bootstrap.providers import (
    PatchProvider,
    ProviderSetup,
    TransformerEngine,
    create,
    names,
    register,
)
from megascend.runtime.bootstrap.reference import Reference
from megascend.runtime.bootstrap.versions import STACKS
from megascend.runtime.platforms import load
from support.forked_programs import run_forked


class NotedProvider(PatchProvider):
    name = "noted"

    def before_megatron(self) -> list[str]:
        return ["noted"]


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with mock.patch.dict(PROVIDERS):
        yield


def setup(platform: str) -> ProviderSetup:
    return ProviderSetup(load(platform), STACKS[0], Parallel())


def test_provider_is_chosen_by_name_or_import_path() -> None:
    register("noted", NotedProvider)
    assert isinstance(create("noted", setup("cpu")), NotedProvider)
    assert names("npu") == ["mindspeed", "megatron_adaptor", "noted"]
    path = "megascend.runtime.bootstrap.reference:Reference"
    assert isinstance(create(path, setup("cpu")), Reference)


def test_unknown_or_unsuitable_provider_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown provider 'mindsped', did you mean mindspeed\? Known: mindspeed, megatron_adaptor, transformer_engine",
    ):
        create("mindsped", setup("npu"))
    with pytest.raises(
        ConfigError, match=r"'mindspeed' is for platform npu, .* on 'cpu'; providers for 'cpu': reference"
    ):
        create("mindspeed", setup("cpu"))
    with pytest.raises(ConfigError, match=r"'megascend\.nowhere:Provider' cannot be found"):
        create("megascend.nowhere:Provider", setup("cpu"))
    register("number", lambda setup: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"returned a int, not a megascend\.PatchProvider"):
        create("number", setup("cpu"))


def test_a_name_belongs_to_one_factory() -> None:
    register("noted", NotedProvider)
    register("noted", NotedProvider)  # a module that is imported twice
    with pytest.raises(ConfigError, match="another provider is called 'noted'"):
        register("noted", Reference)
    with pytest.raises(ConfigError, match="colon"):
        register("a:b", NotedProvider)


def test_options_of_a_provider_without_any_are_refused() -> None:
    assert NotedProvider(setup("cpu")).for_model(None, {}) == []
    with pytest.raises(ConfigError, match="provider_options: fast set, but provider 'noted' has none"):
        NotedProvider(setup("cpu")).for_model(None, {"fast": True})


# --- CUDA's ---


def test_cuda_without_transformer_engine_raises_with_remedies(monkeypatch) -> None:
    monkeypatch.setattr(providers, "is_installed", lambda name: False)
    with pytest.raises(PlatformError) as raised:
        TransformerEngine(setup("cuda")).before_megatron()
    message = str(raised.value)
    assert "platform 'cuda' needs Transformer Engine: pip install" in message
    assert "transformer-engine[pytorch]" in message
    assert "MEGASCEND_REFERENCE_TE=1" in message


def test_reference_on_cuda_is_forced_and_redirects_nothing(monkeypatch) -> None:
    forced = []
    monkeypatch.setattr("megascend.reference.te.install", lambda force: forced.append(force) or ["reference"])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    provider = Reference(setup("cuda"))
    assert provider.before_megatron()[:1] == ["reference"]
    assert provider.after_megatron() == []
    assert forced == [True]
    assert not provider.setup.platform.has_transformer_engine_kernels


def test_cuda_sets_max_connections_unless_the_user_has(monkeypatch) -> None:
    monkeypatch.setattr(providers, "is_installed", lambda name: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    provider = TransformerEngine(setup("cuda"))
    assert provider.before_megatron() == []
    assert provider.setup.platform.has_transformer_engine_kernels
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert provider.before_megatron() == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]


# --- a provider from outside the package, in a separate process ---

OUTSIDE = """
import sys
from collections.abc import Iterator
import megascend
from megascend.reference import te as reference_te

seen = []

class Own(megascend.PatchProvider):
    name = "own"

    def before_megatron(self):
        assert "megatron.core" not in sys.modules
        seen.append(("before", self.setup.platform.name, self.setup.parallel.tensor))
        from megascend.runtime.bootstrap.reference import cuda_redirect
        return ["own: begins"] + reference_te.install() + cuda_redirect.install()

    def after_megatron(self):
        assert "megatron.core" in sys.modules and "mcore_bridge" in sys.modules
        seen.append("after")
        from megascend.runtime.bootstrap.reference import cuda_redirect
        return [line for name in cuda_redirect.MOE_MODULES for line in cuda_redirect.patch_moe_device_check(name)]

    def for_topology(self, topology):
        seen.append(("topology", topology.world_size))
        return []

    def for_model(self, config, options):
        seen.append(("model", config.num_layers, dict(options)))
        return [f"own: told {sorted(options)}"]
"""

REGISTERED = (
    OUTSIDE
    + """
megascend.register_provider("own", Own, platforms=["cpu"])
backend = megascend.MegatronBackend(
    sys.argv[1], precision="fp32", platform="cpu", provider="own", provider_options={"speed": 3}, self_check=False
)
sample = megascend.Sample(list(range(1, 9)), list(range(2, 10)), [1.0] * 8)
losses = [backend.forward_backward([sample]).loss for _ in range(2)]
backend.close()
assert losses[0] == losses[1] > 0
assert seen == [("before", "cpu", 1), "after", ("topology", 1), ("model", 4, {"speed": 3})], seen
runtime = megascend.bootstrap(provider="own")
assert runtime.provider.name == "own" and "own: begins" in runtime.changes and "own: told ['speed']" in runtime.changes
try:
    megascend.bootstrap(provider="reference")
except megascend.ConfigError as error:
    assert "with provider 'own'" in str(error), error
else:
    raise SystemExit("another provider")
print("called in order")
"""
)


def test_external_provider_is_called_in_order(tmp_path: Path, python) -> None:
    from megascend.testing.tiny_models import write_tiny_checkpoint

    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3")
    assert python(REGISTERED, str(checkpoint)).endswith("called in order\n")


@pytest.fixture
def python():
    def run(program: str, *arguments: str) -> str:
        completed = run_forked(program, *arguments)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    return run
