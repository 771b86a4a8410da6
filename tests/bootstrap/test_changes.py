"""Every change of the process is in ``Runtime.changes``: what is set in the code, and what is found in a real process."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import megascend
from forked_programs import run_forked
from megascend import changes
from megascend.changes import ABSENT, changed, listed, patch, patched, restore

ROOT = Path(megascend.__file__).parent
ELSEWHERE = ("testing/", "acceptance/", "cli/", "diagnostics/faults.py")
"""Not looked at: processes of tests, of the acceptance run, and of commands, which are no user's program."""
SOURCES = {
    path: path.read_text()
    for path in sorted(ROOT.rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(ELSEWHERE) and path != Path(changes.__file__)
}

OURS = {"self", "cls", "ctx"}
SETTERS = {"setattr", "delattr"}
PROCESS_WIDE = {
    "filterwarnings",
    "simplefilter",
    "setLevel",
    "signal",
    "set_num_threads",
    "set_float32_matmul_precision",
}

FINE = (
    dict.fromkeys(
        [
            # Functions, modules and packages that have just been made here.
            "_CallablePackage.__call__.__doc__",
            "sys.modules[__name__].__class__",
            # Of a tokenizer that has just been copied here.
            "own.backend_tokenizer.post_processor",
            # The specification of a module that is being imported, and the module's loader, which is put back.
            "spec.loader",
            "module.__spec__.loader",
            "module.__loader__",
            "function.__name__",
            "function.__qualname__",
            "function.__megascend__",
            "maybe_move_tensor_to_cpu.__megascend__",
            "module.__spec__",
            "module.__path__",
            "module.__package__",
            "spec.submodule_search_locations",
            "sys.modules[self.source]",
            "sys.modules[source]",  # a stand-in while a module is imported; removed behind it
            "sys.modules[__name__]",  # a sitecustomize under megascend run: the user's own takes its name
            "modules[name]",
            "setattr(modules[parent], child, module)",
            "setattr(modules[ROOT], MARK, True)",
            "error.__cause__",
            "view._get_weight",  # a copy of the bridge, which the model's own does not see
            "view._all_gather_tp",
            "view._broadcast_ep_pp",
            "view._set_layer_state",
            "view._convert_hf_state_dict",
            "view.__class__",
            "view.pp_size",
            "view.ep_pp_size",
            "first.width",  # of a table that the run log has made
            "session.on_trace_ready",  # of the profiler that the run has made
            "backend.groups.monitor.last_words",
            "backend.on_micro_batch",
            "monitor.on_phase",
            "kept.activation_offloading",  # of what SwiGLU keeps for its gradient, as Megatron has it
            "parameter.main_grad",  # of the single engine's own model
            "message.token_ids",  # an answer of megascend serve
            "message.logprobs",
            "message.k",
            "message.length",
            "tensor.sparse_csr.crow_indices",
            "tensor.sparse_csr.col_indices",
            "sys.argv",  # of a program that is run in this process
            "journaled.when_recovered",  # of the journal that has just been opened
            *("entry.uid", "entry.gid", "entry.uname", "entry.gname", "entry.mode"),  # of an archive that we write
            "function.argtypes",  # of a library that has just been loaded
            "server.should_exit",  # uvicorn's, which megascend serve has made
            "load.__megascend__",
            "ScalarHeadBridge.__name__",
            *("context.__name__", "context.__qualname__", "context.__doc__"),
            "module.__file__",
            "made.__init__",  # of a recipe of the reference Transformer Engine
        ],
        "made here",
    )
    | dict.fromkeys(
        [
            "router.expert_bias",  # values of the model's own
            "setattr(module, key, nn.Parameter(own, requires_grad=value.requires_grad))",  # a rank's share of the experts
            "setattr(module, SHARE, share)",  # read by our experts function, which is listed
            "setattr(module, COMPUTED_BY, (function, along))",
            "setattr(config, name, value)",  # fields of the ModelConfig that is being configured
            "parameter.tensor_model_parallel",  # what Megatron's initialization would have set; told by a line of its own
            "parameter.partition_dim",
            "parameter.partition_stride",
            "parameter.sequence_parallel",
            "parameter.allreduce",
            "last.output_layer",  # the scalar head of the model that is being made
            *(
                "config.num_labels",
                "config.classifier_dropout",
                "config.token_classification_bias",
            ),  # of its configuration
            "config.tie_word_embeddings",
        ],
        "the model's data",
    )
    | dict.fromkeys(
        [
            # Listed by the lines that the function which holds them returns or records.
            "args_utils._MINDSPEED_ARGS",
            "config.bridge.__class__",  # of a model with a scalar head
            "logging.getLogger('mindspeed.args_utils').setLevel(logging.ERROR)",
            "setattr(owner, name, value)",  # cuda_redirect: a line for each group of names
            "setattr(mappings, name, _with_uneven_path(original, uneven))",
            "os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')",
            "mcore_bridge.get_logger().setLevel(logging.WARNING)",
            "warnings.filterwarnings('ignore', module=pattern)",
            "sys.modules[name]",
            "setattr(sys.modules[parent], child, module)",
            "sys.modules.update(modules)",
            "environment['CUDA_DEVICE_MAX_CONNECTIONS']",
            "environment['HCCL_IF_BASE_PORT']",
            "environment[OBJECTS_VARIABLE]",
            "environment[VARIABLE]",
            "environment[name]",
            "os.environ['OMP_NUM_THREADS']",
            "torch.set_num_threads(1)",
            "torch.set_float32_matmul_precision('high')",
            "setattr(module, attribute, None)",
            "ROPE_INIT_FUNCTIONS.clear()",
            "ROPE_INIT_FUNCTIONS.update(before)",
        ],
        "listed by its function",
    )
    | dict.fromkeys(
        [
            # Undone when the block ends, within one call of ours.
            "warnings.simplefilter('ignore')",
            "warnings.filterwarnings('ignore', message='torch.distributed is disabled')",
            "root.setLevel(level)",
            "signal.signal(number, self._take_note)",
            "signal.signal(number, handler)",
            # In a process that becomes another program at once.
            "signal.signal(number, signal.SIG_DFL)",
        ],
        "until the block ends",
    )
)
"""What the scan finds and why it need not go through :func:`megascend.changes.patch`."""


def own_attributes() -> set[str]:
    """Names of what objects of megascend's own classes hold; not of methods."""
    names = set()
    for path, source in SOURCES.items():
        if path.relative_to(ROOT).parts[0] == "reference_te":  # has the attributes of the real one
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        names.add(each.target.id)
                    if isinstance(each, ast.FunctionDef) and any(
                        isinstance(decorator, ast.Attribute) and decorator.attr == "setter"
                        for decorator in each.decorator_list
                    ):
                        names.add(each.name)
            if isinstance(node, ast.Assign):
                targets = [each for target in node.targets for each in flattened(target)]
                names |= {each.attr for each in targets if isinstance(each, ast.Attribute) and root(each) == "self"}
    return names


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of everything in a module that may set something of somebody else's."""
    for node in ast.walk(ast.parse(source)):
        targets = []
        if isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in flattened(target)]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            whole = isinstance(target, ast.Subscript) and ast.unparse(target.value).rpartition(".")[2] in (
                "environ",
                "environment",
                "modules",
            )
            if whole or (isinstance(target, ast.Attribute) and root(target) not in OURS):
                yield target.lineno, ast.unparse(target)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if (
                (name in SETTERS and not (node.args and getattr(node.args[0], "id", "") in OURS))
                or name in PROCESS_WIDE
                or (
                    name in ("update", "setdefault", "clear")
                    and owner.endswith(("environ", "sys.modules", "FUNCTIONS"))
                )
            ):
                yield node.lineno, ast.unparse(node)


def flattened(target: ast.expr) -> list[ast.expr]:
    return [each for part in target.elts for each in flattened(part)] if isinstance(target, ast.Tuple) else [target]


def root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def test_a_patch_is_listed_once_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_ledger", {})
    module, thing = ModuleType("theirs"), Thing()
    vars(module)["f"] = len
    before = patch(module, "f", max, "takes the largest")
    for _ in range(2):
        patch(thing, "run", min, "takes the smallest")
    assert (module.f, thing.run) == (max, min)
    assert (before, patch(module, "g", max, "is new")) == (len, ABSENT)
    restore(module, "f", before)
    restore(module, "g", ABSENT)
    assert vars(module)["f"] is len
    assert not hasattr(module, "g")
    changed("A=1")
    place = f"objects of {__name__}.Thing.run"
    assert listed() == ["theirs.f: takes the largest", f"{place}: takes the smallest", "theirs.g: is new", "A=1"]


def test_a_patch_for_a_while_is_undone_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_ledger", {})
    thing = Thing()
    with pytest.raises(ZeroDivisionError), patched(thing, "run", lambda: 1 / 0, "for a while"):
        thing.run()
    assert thing.run() == "its own"
    assert len(listed()) == 1


class Thing:
    def run(self) -> str:
        return "its own"


def test_nothing_of_others_is_set_past_the_list() -> None:
    """A new line that sets an attribute of an object that may be somebody else's is found here: see ``docs/contributing.md``."""
    ours = own_attributes()
    assert not ours & {"forward", "gating", "tqdm", "hasattr", "return_layernorm_output"}
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, source in SOURCES.items()
        for line, text in findings(source)
        if text not in FINE and ("(" in text or text.rpartition(".")[2] not in ours)
    ]
    assert unknown == [], "set it with megascend.changes.patch, or say in FINE why that is not needed"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.compile = None", ["torch.compile"]),
        ("a.b, c.d[0].e = 1, 2", ["a.b", "c.d[0].e"]),
        ("setattr(module, name, value)", ["setattr(module, name, value)"]),
        ("os.environ['A'] = 'b'", ["os.environ['A']"]),
        ("sys.modules.update(modules)", ["sys.modules.update(modules)"]),
        ("signal.signal(2, f)", ["signal.signal(2, f)"]),
        ("self.a = 1\nx = 2\nx[3] = 4\nobject.__setattr__(self, 'a', 1)\nsetattr(self, 'a', 1)", []),
    ],
)
def test_the_scan_finds_what_it_is_for(source: str, found: list[str]) -> None:
    assert [text for _, text in findings(source)] == found


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

def ours(value):  # wrapped functions say that they are others'; what is in the reference Transformer Engine is listed as a whole
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return file.startswith(root) and not file.startswith(root + "reference_te/")
    kind = value if isinstance(value, type) else type(value)
    module = str(kind.__module__)
    return module.startswith("megascend.") and not module.startswith("megascend.reference_te")

found, standing_in = {}, set()  # by object: others import what we have put in place, under their own names

def note(value, place, attribute):
    key = id(value) if isinstance(value, (type, types.FunctionType)) else id(type(value))
    found.setdefault(key, []).append((place, attribute))

for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("megascend", "__main__", "__mp_main__") or not isinstance(module, types.ModuleType):
        continue
    if str(getattr(module.__spec__, "origin", "")).startswith("megascend"):  # a whole module of ours
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
CALLBACKS = {"grad_scale_func", "finalize_model_grads_func", "no_sync_func"}
"""Settings of Megatron's configuration that are there for a caller's functions."""


@pytest.mark.parametrize("kind", EXPECTED)
def test_whatever_of_ours_sits_in_others_modules_classes_and_objects_is_listed(kind: str, tmp_path: Path) -> None:
    from megascend.testing.tiny_models import write_tiny_checkpoint

    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    done = run_forked(REAL, checkpoint, kind)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    words = set(re.findall(r"[\w.]+", "\n".join(report["changes"])))
    words |= {part for word in words for part in word.split(".")}
    assert {attribute for places in report["found"] for _, attribute in places} >= EXPECTED[kind]
    assert {
        name.partition(".")[0] if name.startswith("transformer_engine") else name for name in report["standing_in"]
    } <= words
    unlisted = [
        places
        for places in report["found"]
        if not any(
            attribute in words | CALLBACKS or place.rpartition(".")[0] in report["standing_in"]
            for place, attribute in places
        )
    ]
    assert unlisted == []
    text = "\n".join(report["changes"])
    for temporary in ("gpt_bridge.tqdm", "ROPE_INIT_FUNCTIONS"):
        assert temporary in text
