"""Every change of the process is listed in ``Runtime.changes``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from megascend import changes
from megascend.changes import ABSENT, change_list, changed, patch, patched, restore
from support.forked_programs import run_forked


def test_a_patch_is_listed_once_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_ledger", {})
    module, target = ModuleType("theirs"), Patched()
    vars(module)["f"] = len
    before = patch(module, "f", max, "takes the largest")
    for _ in range(2):
        patch(target, "run", min, "takes the smallest")
    assert (module.f, target.run) == (max, min)
    assert (before, patch(module, "g", max, "is new")) == (len, ABSENT)
    restore(module, "f", before)
    restore(module, "g", ABSENT)
    assert vars(module)["f"] is len
    assert not hasattr(module, "g")
    changed("A=1")
    qualified_name = f"objects of {__name__}.Patched.run"
    assert change_list() == [
        "theirs.f: takes the largest",
        f"{qualified_name}: takes the smallest",
        "theirs.g: is new",
        "A=1",
    ]


def test_temporary_patch_is_undone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_ledger", {})
    target = Patched()
    with pytest.raises(ZeroDivisionError), patched(target, "run", lambda: 1 / 0, "for a while"):
        target.run()
    assert target.run() == "its own"
    assert len(change_list()) == 1


class Patched:
    def run(self) -> str:
        return "its own"


REAL = """
import json, sys, types
import megascend
backend = megascend.MegatronBackend(
    sys.argv[1], precision="fp32", platform="cpu", self_check=False, batching=megascend.Batching(micro_batch_tokens=64),
    adapters=megascend.Adapters(max_count=2, max_rank=4) if sys.argv[2] == "adapters" else None,
    moe=None if sys.argv[2] == "adapters" else megascend.Moe(aux_loss="megatron", aux_loss_coefficient=0.01),
)
sample = megascend.Sample(list(range(1, 9)), list(range(2, 10)), [1.0] * 8)
if sys.argv[2] == "adapters":
    backend.add_adapter("a", megascend.Lora(rank=2))
backend.forward_backward([sample], adapter="a" if sys.argv[2] == "adapters" else None)

root = megascend.__path__[0] + "/"

def ours(value):  # by file: functools.wraps copies __module__. The reference Transformer Engine is listed as a whole.
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return file.startswith(root) and not file.startswith(root + "reference/te/")
    kind = value if isinstance(value, type) else type(value)
    module = str(kind.__module__)
    return module.startswith("megascend.") and not module.startswith("megascend.reference.te")

found, standing_in = {}, set()  # by object: upstream modules import our objects under other names

def note(value, place, attribute):
    key = id(value) if isinstance(value, (type, types.FunctionType)) else id(type(value))
    found.setdefault(key, []).append((place, attribute))

for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("megascend", "__main__", "__mp_main__") or not isinstance(module, types.ModuleType):
        continue
    if str(getattr(module.__spec__, "origin", "")).startswith("megascend"):  # a stub module
        standing_in.add(name)
    for attribute, value in list(vars(module).items()):
        if ours(value):
            note(value, f"{name}.{attribute}", attribute)
        if isinstance(value, type) and not ours(value):
            for inner, held in list(vars(value).items()):
                if ours(held):
                    note(held, f"{name}.{attribute}.{inner}", inner)
import gc, torch
for thing in gc.get_objects():
    if isinstance(thing, torch.nn.Module) or str(type(thing).__module__).startswith(("megatron", "mcore_bridge")):
        for attribute, value in list(getattr(thing, "__dict__", {}).items()):
            if isinstance(value, types.FunctionType) and ours(value):
                note(value, f"{type(thing).__module__}.{type(thing).__qualname__}.{attribute}", attribute)
found, standing_in = list(found.values()), sorted(standing_in)
print(json.dumps({"found": found, "standing_in": standing_in, "changes": megascend.bootstrap().changes}))
backend.close()
"""

EXPECTED = {
    "model": {"forward", "gating", "_reduce", "_gather_along_first_dim", "maybe_move_tensor_to_cpu", "zeros", "to"},
    "adapters": {"forward", "dispatch_preprocess", "dispatch_postprocess", "_reduce", "zeros", "to"},
}
WHOLE_PACKAGES = ("transformer_engine", "fla", "causal_conv1d", "mamba_ssm")
"""Packages that are listed as one change."""
CALLBACKS = {"grad_scale_func", "finalize_model_grads_func", "no_sync_func"}
"""Settings of Megatron's configuration that take functions of the caller."""


@pytest.mark.parametrize("kind", EXPECTED)
def test_changes_list_all_our_functions_in_foreign_objects(kind: str, tmp_path: Path) -> None:
    from megascend.testing.tiny_models import write_tiny_checkpoint

    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    completed = run_forked(REAL, checkpoint, kind)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    words = set(re.findall(r"[\w.]+", "\n".join(report["changes"])))
    words |= {part for word in words for part in word.split(".")}
    assert {attribute for places in report["found"] for _, attribute in places} >= EXPECTED[kind]
    assert {
        name.partition(".")[0] if name.partition(".")[0] in WHOLE_PACKAGES else name for name in report["standing_in"]
    } <= words
    unlisted = [
        places
        for places in report["found"]
        if not any(
            attribute in words | CALLBACKS or path.rpartition(".")[0] in report["standing_in"]
            for path, attribute in places
        )
    ]
    assert unlisted == []
    text = "\n".join(report["changes"])
    for temporary in ("gpt_bridge.tqdm", "ROPE_INIT_FUNCTIONS"):
        assert temporary in text
