"""The bootstrap by engine: patches for Megatron only, and no second kind of engine in a process."""

from __future__ import annotations

import pytest
from test_runtime import run

from megascend.config.registry import ENGINES, EngineEntry
from megascend.errors import ConfigError, VersionError
from megascend.runtime.bootstrap import engines
from megascend.runtime.bootstrap.versions import PACKAGES, require_supported


def test_engine_without_megatron_gets_an_unpatched_process():
    program = """
import os, sys, torch
before = {name: vars(torch).get(name) for name in ('empty', 'zeros', 'tensor', 'arange')} | {
    f'cuda.{name}': value for name, value in vars(torch.cuda).items() if callable(value)} | {
    f'Tensor.{name}': value for name, value in vars(torch.Tensor).items() if callable(value)}
environment = dict(os.environ)
import megascend
runtime = megascend.bootstrap('cpu', engine='single')
assert megascend.bootstrap(engine='single') is megascend.bootstrap() is runtime
after = {name: getattr(torch, name) for name in ('empty', 'zeros', 'tensor', 'arange')} | {
    f'cuda.{name}': value for name, value in vars(torch.cuda).items() if callable(value)} | {
    f'Tensor.{name}': value for name, value in vars(torch.Tensor).items() if callable(value)}
assert before == after
loaded = [name for name in sys.modules if name.split('.')[0] in ('megatron', 'transformer_engine', 'mcore_bridge', 'mindspeed')]
assert loaded == [] and 'swift' not in sys.modules, loaded
assert dict(os.environ) == environment
assert [line.partition(':')[0] for line in runtime.changes] == ['fla, causal_conv1d']
assert runtime.provider is None and runtime.engine == 'single'
runtime.configure_model(object(), {})
for call in (runtime.load_megatron, lambda: runtime.configure_model(object(), {'fast': 1})):
    try:
        call()
    except megascend.ConfigError as error:
        assert "engine 'single'" in str(error), error
    else:
        raise SystemExit('not refused')
try:
    import megascend.engines.megatron
except megascend.ConfigError as error:
    assert "'single'" in str(error)
assert not [name for name in sys.modules if name.startswith('megatron.core')]
print('untouched')
"""
    assert run(program).endswith("untouched\n")


@pytest.mark.parametrize(("first", "second"), [("megatron", "single"), ("single", "megatron")])
def test_second_engine_is_refused_if_either_needs_patches(first, second):
    program = f"""
import megascend
runtime = megascend.bootstrap('cpu', engine={first!r})
changes = runtime.changes
try:
    megascend.bootstrap(engine={second!r})
except megascend.ConfigError as error:
    for part in ("engine '{first}'", "engine '{second}'", "Start another process", "engine='{second}'"):
        assert part in str(error), error
else:
    raise SystemExit('not refused')
assert runtime.changes == changes and megascend.bootstrap() is runtime
print('refused')
"""
    assert run(program).endswith("refused\n")


def test_unpatched_engines_share_a_process_and_refuse_a_provider():
    program = """
import megascend
from megascend.config.registry import ENGINES, EngineEntry
ENGINES.add('sharded', EngineEntry(print))
try:
    megascend.bootstrap('cpu', engine='sharded', provider='reference')
except megascend.ConfigError as error:
    assert "engine 'sharded' needs no Megatron" in str(error), error
runtime = megascend.bootstrap('cpu', engine='sharded')
assert megascend.bootstrap(engine='single') is runtime and len(runtime.changes) == 1
print('shared')
"""
    assert run(program).endswith("shared\n")


def test_unknown_engine_error_lists_the_registered_ones(monkeypatch):
    with pytest.raises(
        ConfigError, match="unknown engine 'megatorn', did you mean megatron\\? Known: megatron, single"
    ):
        engines.needs("megatorn")
    monkeypatch.setitem(ENGINES, "own", EngineEntry(print, megatron=True))
    assert engines.needs("own").packages == PACKAGES


def test_engine_without_megatron_does_not_require_its_package():
    versions = {
        "torch": "2.13.0",
        "megatron-core": None,
        "mcore-bridge": None,
        "transformers": "5.5.0",
        "peft": "0.19.1",
        "numpy": "2.4.6",
    }
    with pytest.raises(VersionError, match="megatron-core is not installed"):
        require_supported(versions)
    packages = engines.needs("single").packages
    assert require_supported(versions, packages).requirement("peft").contains("0.19.1")
    with pytest.raises(VersionError, match=r"torch 2\.5\.0 is installed"):
        require_supported(versions | {"torch": "2.5.0"}, packages)
