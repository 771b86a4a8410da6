"""Facts about MindSpeed's interface that need no patched process: signatures, arguments, the patch manager.

Part of ``contract_report.py``; runs with whichever ``mindspeed`` is on the path.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

CALLABLES = (
    "args_utils.get_mindspeed_args",
    "args_utils.get_full_args",
    "arguments.process_args",
    "patch_utils.Patch",
    "patch_utils.MindSpeedPatchesManager.register_patch",
    "patch_utils.MindSpeedPatchesManager.remove_wrappers",
    "patch_utils.MindSpeedPatchesManager.remove_patches",
    "patch_utils.MindSpeedPatchesManager.apply_patches",
    "features_manager.create_features_list",
    "features_manager.feature.MindSpeedFeature",
    "features_manager.feature.MindSpeedFeature.is_need_apply",
    "features_manager.feature.MindSpeedFeature.register_args",
    "features_manager.feature.MindSpeedFeature.pre_register_patches",
    "features_manager.feature.MindSpeedFeature.register_patches",
    "features_manager.features_manager.MindSpeedFeaturesManager.set_features_list",
    "features_manager.features_manager.MindSpeedFeaturesManager.register_features_args",
    "features_manager.features_manager.MindSpeedFeaturesManager.apply_features_pre_patches",
    "features_manager.features_manager.MindSpeedFeaturesManager.apply_features_patches",
    "features_manager.features_manager.MindSpeedFeaturesManager.remove_patches",
)
"""Objects below ``mindspeed`` that the bootstrap calls or subclasses. The adaptor's are added after its import."""

COMMAND_LINE = ["train.py", "--hidden-dropout", "0.5", "--some-switch", "--a-list", "x", "y", "--equals=7"]
"""A trainer's own options, none of which MindSpeed knows."""


def signature(qualified: str) -> str:
    """Return names, kinds and defaults of the parameters, without annotations."""
    module, path = _split(f"mindspeed.{qualified}")
    target: Any = module
    for part in path:
        target = getattr(target, part)
    parameters = inspect.signature(target).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def arguments() -> dict[str, Any]:
    """Return the results and side effects of parsing; reset the arguments."""
    from mindspeed import args_utils

    facts: dict[str, Any] = {"unset_before": args_utils._MINDSPEED_ARGS is None}
    facts["defaults"] = vars(args_utils.get_mindspeed_args(get_defaults=True))
    facts["defaults_are_not_kept"] = args_utils._MINDSPEED_ARGS is None
    parsed = vars(_with_command_line(COMMAND_LINE, args_utils.get_mindspeed_args))
    facts["kept_after_parsing"] = args_utils._MINDSPEED_ARGS is not None
    facts["foreign_options"] = {
        name: parsed.get(name) for name in ("hidden_dropout", "some_switch", "a_list", "equals")
    }
    facts["full_args_are_the_kept"] = args_utils.get_full_args() is args_utils._MINDSPEED_ARGS
    for name, line in {"help": ["train.py", "-h"], "bad_level": ["train.py", "--optimization-level", "3"]}.items():
        args_utils._MINDSPEED_ARGS = None
        facts[f"exit_of_{name}"] = _exit_code(line, args_utils.get_mindspeed_args)
    args_utils._MINDSPEED_ARGS = None
    facts["defaults_of_mcore_bridge"] = _mcore_bridge_defaults()
    return facts


def _mcore_bridge_defaults() -> dict[str, Any]:
    """Return MindSpeed's defaults as mcore-bridge's ModelConfig collects them."""
    features = import_module("mindspeed.features_manager")
    process_args = import_module("mindspeed.arguments").process_args
    before = list(features.FEATURES_LIST)
    features.FEATURES_LIST[:] = features.create_features_list()
    try:
        parser = ArgumentParser()
        process_args(parser)
        return vars(parser.parse_args([]))
    finally:
        features.FEATURES_LIST[:] = before


def patch_manager() -> dict[str, Any]:
    """Return facts about replacing, wrapping, forcing and restoring, on modules made for the purpose."""
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    def original() -> str:
        return "original"

    def replacement() -> str:
        return "replacement"

    def outer_wrapper(fn: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"outer({fn()})"

    def inner_decorator(fn: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"inner({fn()})"

    home, elsewhere = (_module(f"contract_{name}", work=original) for name in ("home", "elsewhere"))
    name = "contract_home.work"
    facts: dict[str, Any] = {}
    before = set(Manager.patches_info)
    Manager.register_patch(name, replacement)
    facts["not_before_apply"] = home.work()
    facts["second_replacement"] = _error(Manager.register_patch, name, original)
    Manager.register_patch(name, inner_decorator)
    Manager.register_patch(name, outer_wrapper)
    Manager.register_patch(name, outer_wrapper)
    Manager.apply_patches()
    facts["stacked"] = home.work()
    facts["also_elsewhere"] = elsewhere.work is home.work
    facts["unknown_name"] = _error(Manager.remove_wrappers, "contract_home.nothing", "outer_wrapper")
    facts["unknown_wrapper"] = _error(Manager.remove_wrappers, name, "nothing_wrapper")
    Manager.remove_patches()
    facts["restored"] = home.work is original and elsewhere.work is original
    Manager.register_patch(name, replacement)
    Manager.register_patch(name, original, force_patch=True)
    Manager.register_patch("contract_missing.inside.function", create_dummy=True)
    Manager.apply_patches()
    facts["forced"] = home.work()
    missing = import_module("contract_missing.inside")
    facts["dummy"] = _error(missing.function)
    facts["dummy_spec_has_no_loader"] = missing.__spec__ is not None and missing.__spec__.loader is None
    Manager.register_patch("contract_absent.function", replacement)
    facts["absent"] = _error(Manager.apply_patches).partition(":")[0]
    for added in set(Manager.patches_info) - before:
        del Manager.patches_info[added]
    facts["table_attributes"] = [
        name for name in ("orig_func", "patch_func", "wrappers", "is_applied") if hasattr(_a_patch(), name)
    ]
    return facts


def lazy_modules_hook() -> bool:
    """Check that the scan of ``sys.modules`` uses a ``hasattr`` set in ``mindspeed.patch_utils``."""
    from mindspeed import patch_utils

    scanned = []

    def recording(target: Any, name: str) -> bool:
        scanned.append(target)
        return name in vars(target) if isinstance(target, ModuleType) else hasattr(target, name)

    home = _module("contract_lazy", work=len)
    patch_utils.hasattr = recording  # type: ignore[attr-defined]
    try:
        patch_utils.MindSpeedPatchesManager.register_patch("contract_lazy.work", max)
        patch_utils.MindSpeedPatchesManager.apply_patches()
    finally:
        del patch_utils.hasattr  # type: ignore[attr-defined]
        del patch_utils.MindSpeedPatchesManager.patches_info["contract_lazy.work"]
    return home in scanned


def _split(qualified: str) -> tuple[ModuleType, list[str]]:
    parts = qualified.split(".")
    for end in range(len(parts), 0, -1):
        try:
            return import_module(".".join(parts[:end])), parts[end:]
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(qualified)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


def _a_patch() -> Any:
    from mindspeed.patch_utils import Patch

    return Patch("contract_home.work", len, False)


def _error(fn: Callable[..., Any], *args: Any) -> str:
    """Return ``Type: message`` of the call's exception, or ``no error``."""
    try:
        fn(*args)
    except (RuntimeError, ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _with_command_line(line: list[str], fn: Callable[[], Any]) -> Any:
    before, sys.argv = sys.argv, line
    try:
        return fn()
    finally:
        sys.argv = before


def _exit_code(line: list[str], fn: Callable[[], Any]) -> Any:
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            _with_command_line(line, fn)
    except SystemExit as error:
        return error.code
    return "no exit"
