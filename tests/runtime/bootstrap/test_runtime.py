"""The bootstrap, in separate processes: a process can be bootstrapped once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.forked_programs import run_forked


def run(program: str, *arguments: str) -> str:
    """Return the standard output of a program that must succeed, in a fork with torch, transformers and peft imported."""
    completed = run_forked(program, *arguments)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def run_started(program: str, **environment: str) -> str:
    """Return the standard output of a program that must succeed, in a new process."""
    inherited = {
        n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "WORLD_SIZE")
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    completed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=inherited | {"PYTHONPATH": path} | environment,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_second_call_returns_the_same_runtime():
    program = """
import megascend
first = megascend.bootstrap('cpu', engine='megatron')
changes = list(first.changes)
assert megascend.bootstrap() is first
assert megascend.bootstrap('cpu', engine='megatron') is first
assert megascend.bootstrap('auto') is first
assert first.changes == changes
first.load_megatron()
loaded = list(first.changes)
first.load_megatron()
assert first.changes == loaded and loaded[:len(changes)] == changes and len(loaded) > len(changes)
print('same')
"""
    assert run(program).endswith("same\n")


def test_other_platform_is_refused_after_the_bootstrap():
    program = """
import megascend
megascend.bootstrap('cpu', engine='megatron')
for name in ('cuda', 'npu', 'tpu'):
    try:
        megascend.bootstrap(name)
    except megascend.ConfigError as error:
        assert "platform 'cpu'" in str(error) and repr(name) in str(error) and 'another process' in str(error), error
    else:
        raise SystemExit(name)
print('refused')
"""
    assert run(program).endswith("refused\n")


def test_the_environment_changes_only_as_reported():
    program = """
import os
before = dict(os.environ)
import megascend
runtime = megascend.bootstrap('cpu', engine='megatron')
after = dict(os.environ)
changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
reported = ' '.join(runtime.changes)
assert all(f'{name}={after[name]}' in reported for name in changed), (changed, reported)
print(*changed)
"""
    # torch and others set variables at their import; those are not the bootstrap's.
    baseline = set(
        run_started("import os; b = dict(os.environ); import torch; print(*set(os.environ) - set(b))").split()
    )
    assert set(run_started(program).split()) - baseline == {"TORCHDYNAMO_DISABLE"}
    assert set(run_started(program, WORLD_SIZE="2").split()) - baseline == {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}
    assert set(run_started(program, WORLD_SIZE="2", OMP_NUM_THREADS="3").split()) - baseline == {"TORCHDYNAMO_DISABLE"}


def test_several_processes_on_a_cpu_get_one_thread_each():
    program = "import megascend, torch; megascend.bootstrap('cpu', engine='megatron'); print(torch.get_num_threads())"
    assert run_started(program, WORLD_SIZE="2") == "1\n"


@pytest.mark.difference  # differs: functions that are replaced when Megatron's modules are imported
def test_reported_modules_and_functions_are_installed():
    program = """
import sys, torch
before = {name: getattr(torch, name) for name in ('empty', 'zeros', 'tensor')}
import megascend
runtime = megascend.bootstrap('cpu', engine='megatron')
text = '\\n'.join(runtime.changes)
import transformer_engine
assert transformer_engine.__version__ in text and 'reference' in text
assert transformer_engine.__megascend_reference__
for name, function in before.items():
    assert name in text and getattr(torch, name) is not function
assert torch.empty(1, device='cuda').device.type == 'cpu'
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
leaves = [line for line in runtime.changes if 'functions that raise' in line or 'get_logger only' in line]
inserted = [line.split(':')[0] for line in leaves]
assert all(name in sys.modules for name in inserted), inserted
from megatron.core.tensor_parallel.mappings import _reduce, _gather_along_first_dim  # by the program, before any engine
assert _reduce.__module__ == 'megascend.runtime.bootstrap.patches'
assert _gather_along_first_dim.__module__ == 'megascend.runtime.bootstrap.reference.gloo'
from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu
assert maybe_move_tensor_to_cpu.__module__ == 'megascend.runtime.bootstrap.reference.cuda_redirect'
from megatron.core.optimizer import clip_grads
from transformer_engine.pytorch import optimizers  # without multi_tensor_scale_tensor, as before 2.14
assert clip_grads.multi_tensor_applier is optimizers.multi_tensor_applier
assert clip_grads.l2_norm_impl is optimizers.multi_tensor_l2norm
assert clip_grads.multi_tensor_scale_impl is optimizers.multi_tensor_scale
runtime.load_megatron()
for line in runtime.changes:
    name = line.split(':')[0]
    if name.endswith('maybe_move_tensor_to_cpu'):
        module, _, function = name.rpartition('.')
        assert getattr(sys.modules[module], function).__module__.startswith('megascend.')
print('true')
"""
    assert run(program).endswith("true\n")


def test_bootstrap_does_not_import_megatron_or_bridge():
    program = """
import sys, megascend
runtime = megascend.bootstrap('cpu', engine='megatron')
assert 'mcore_bridge' not in sys.modules and 'megatron.core' not in sys.modules
assert (runtime.platform.name, runtime.stack.name[:2]) == ('cpu', '0.')
print('lazy')
"""
    assert run(program).endswith("lazy\n")
