"""Replacing functions and classes by dotted name, everywhere they were imported to, and putting them back."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WRAPPER_SUFFIXES = ("wrapper", "decorator")


class Patch:
    """Everything that is to happen to one name.

    Attributes:
        orig_module: the module or class that owns the name; None until first applied.
        orig_func: what was there before; the patched name returns to it.
        patch_func: the replacement, if there is one.
        wrappers: called in order, each with what the one before returned.
        final_patch_func: what the name holds while applied.
    """

    def __init__(self, orig_func_name: str, new_func: Any, create_dummy: bool) -> None:
        owner, dot, name = orig_func_name.rpartition(".")
        self.orig_module_name = owner if dot else orig_func_name
        self.orig_func_name: str | None = name if dot else None  # a bare module: only made importable
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self.is_applied = False
        self.create_dummy = create_dummy
        self.set_patch_func(_missing(orig_func_name) if new_func is None else new_func)

    def set_patch_func(self, new_func: Any, force_patch: bool = False) -> None:
        """Register a replacement, or a wrapper if its name ends like one.

        Raises:
            RuntimeError: there is a replacement already, and not ``force_patch``.
        """
        if getattr(new_func, "__name__", "").endswith(WRAPPER_SUFFIXES):
            if new_func not in self.wrappers:
                self.wrappers.append(new_func)
        elif self.patch_func and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new_func
        self.is_applied = False

    def remove_wrappers(self, wrapper_names: str | list[str] | None = None) -> None:
        """Forget wrappers by function name, or all of them."""
        names = [wrapper_names] if isinstance(wrapper_names, str) else wrapper_names
        self.wrappers[:] = [] if names is None else [each for each in self.wrappers if each.__name__ not in names]

    def apply_patch(self) -> None:
        """Put the replacement wherever the current object of that name is found."""
        if self.is_applied:
            return
        owner, current = resolve(self.orig_module_name, self.orig_func_name, self.create_dummy)
        if self.orig_module is None:
            self.orig_module, self.orig_func = owner, current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        if self.orig_func_name is not None:
            setattr(self.orig_module, self.orig_func_name, final)
            for holder in holders(self.orig_func_name, current, sys.modules.copy()):
                setattr(holder, self.orig_func_name, final)
        self.final_patch_func = final
        self.is_applied = True

    def remove_patch(self) -> None:
        """Put the original back; the wrappers stay registered until :meth:`remove_wrappers`."""
        if self.orig_func_name is not None:
            modules = {
                name: module
                for name, module in sys.modules.copy().items()
                if "mindspeed" not in name and name != "torch.classes"
            }
            if inspect.isclass(self.orig_module):
                class_name = self.orig_module_name.rpartition(".")[2]
                modules = {
                    name: getattr(module, class_name) if hasattr(module, class_name) else module
                    for name, module in modules.items()
                }
            for holder in holders(self.orig_func_name, self.final_patch_func, modules):
                setattr(holder, self.orig_func_name, self.orig_func)
        self.patch_func = None
        self.final_patch_func = None
        self.is_applied = False


class MindSpeedPatchesManager:
    """The patches of the process, by name. Registered first, applied together."""

    patches_info: dict[str, Patch] = {}  # noqa: RUF012  # the registry is the class's, as callers expect

    @staticmethod
    def register_patch(
        orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Note a replacement or a wrapper; nothing changes before :meth:`apply_patches`.

        Args:
            orig_func_name: dotted name.
            new_func: the replacement; a function whose name ends in ``wrapper`` or ``decorator`` is called with the
                function it wraps. None: a function that raises.
            force_patch: allow replacing a replacement.
            create_dummy: make missing modules and names up.
        """
        info = MindSpeedPatchesManager.patches_info
        if orig_func_name in info:
            info[orig_func_name].set_patch_func(new_func, force_patch)
        else:
            info[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)

    @staticmethod
    def remove_wrappers(orig_func_name: str, wrappers_name: str | list[str], remove_check: bool = True) -> None:
        """Forget wrappers of a name; they are out of effect once patches are applied anew."""
        patch = MindSpeedPatchesManager.patches_info.get(orig_func_name)
        if patch is None:
            raise ValueError(f"The function <{orig_func_name}> not exist.")
        before = len(patch.wrappers)
        patch.remove_wrappers(wrappers_name)
        if remove_check and len(patch.wrappers) == before:
            raise RuntimeError("Remove wrappers has not remove anything.")

    @staticmethod
    def remove_patches() -> None:
        """Take every patch back. The names stay in ``patches_info``, which therefore only grows."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @staticmethod
    def apply_patches() -> None:
        """Bring every registered patch into effect that is not yet."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()


def holders(name: str, value: Any, modules: dict[str, Any]) -> Iterator[Any]:
    """Modules (or classes) whose attribute ``name`` is ``value``.

    ``hasattr`` is deliberately looked up as a global of this module: on modules that load lazily it triggers their
    import, and megascend replaces it here to prevent that.
    """
    for module in modules.values():
        if type(module) is ModuleType and name not in module.__dict__ and "__getattr__" not in module.__dict__:
            continue  # what hasattr would say of thousands of modules, in less time
        if hasattr(module, name) and getattr(module, name) is value:
            yield module


def resolve(owner_name: str, name: str | None, create_dummy: bool) -> tuple[Any, Any]:
    """The module or class called ``owner_name`` and its attribute ``name``, imported or, if allowed, made up."""
    parts = owner_name.split(".")
    for depth in range(1, len(parts) + 1):
        path, parent = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            container = importlib.import_module(parent) if parent else None
            if container is not None and hasattr(container, parts[depth - 1]):
                return _member(getattr(container, parts[depth - 1]), name, create_dummy)  # a class, not a module
            if not create_dummy:
                raise
            _make_dummy(path, container)
    module = sys.modules[owner_name]
    if name is None:
        return module, None
    if not hasattr(module, name):
        setattr(module, name, None)
    return module, getattr(module, name)


def _member(owner: Any, name: str | None, create_dummy: bool) -> tuple[Any, Any]:
    if name is not None and hasattr(owner, name):
        return owner, getattr(owner, name)
    if create_dummy:
        return owner, _missing(str(name))
    raise RuntimeError(f"no exist {name} of {owner}")


def _make_dummy(path: str, container: ModuleType | None) -> None:
    module = ModuleType(path)
    module.__file__ = "mindspeed.dummy_module.py"
    module.__spec__ = ModuleSpec(path, None)
    sys.modules[path] = module
    if container is not None:
        setattr(container, path.rpartition(".")[2], module)


def _missing(name: str) -> Callable[..., Any]:
    def dummy_function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"function {name} no exist")

    return dummy_function
