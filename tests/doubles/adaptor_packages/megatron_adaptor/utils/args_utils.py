"""Arguments of the features, parsed from the command line of whatever program runs."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

_ARGS: Namespace | None = None


def get_mindspeed_args(get_defaults: bool = False) -> Namespace:
    """Return the arguments, which callers may change; or, with ``get_defaults``, a new namespace of defaults.

    The first call parses ``sys.argv``; options of the program itself are taken along as strings.
    """
    global _ARGS
    if _ARGS is not None and not get_defaults:
        return _ARGS
    from megatron_adaptor.features_manager.features_manager import FeaturesManager

    parser = ArgumentParser(description="Arguments", allow_abbrev=False)
    FeaturesManager.register_features_args(parser)
    args, rest = parser.parse_known_args([] if get_defaults else sys.argv[1:])
    for name, value in zip(rest[::2], rest[1::2], strict=False):
        setattr(args, name.lstrip("-").replace("-", "_"), value)
    if not get_defaults:
        _ARGS = args
    return args


def get_full_args() -> Namespace:
    """Return the arguments of Megatron's training script if it runs, else those of :func:`get_mindspeed_args`."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None) or get_mindspeed_args()


def set_full_args(args: Namespace) -> None:
    """Replace the arguments."""
    global _ARGS
    _ARGS = args
