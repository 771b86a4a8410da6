"""MindSpeed's runtime arguments: parsed from the command line of whatever program happens to run, unless seeded."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed.features_manager import MindSpeedFeaturesManager

_MINDSPEED_ARGS: Namespace | None = None
"""Seed this before the adaptor is imported, or ``sys.argv`` is parsed."""


def get_mindspeed_args(get_defaults: bool = False) -> Namespace:
    """The arguments of all features.

    Args:
        get_defaults: a fresh namespace of defaults, neither read from the command line nor kept. Otherwise what
            ``_MINDSPEED_ARGS`` holds, after filling it from ``sys.argv``: options of the program itself are taken along
            as strings, ``-h`` prints this parser's help and exits, a known option with a bad value exits with 2.
    """
    global _MINDSPEED_ARGS
    if _MINDSPEED_ARGS is not None and not get_defaults:
        return _MINDSPEED_ARGS
    parser = ArgumentParser(description="MindSpeed Arguments", allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    known, rest = parser.parse_known_args([] if get_defaults else sys.argv[1:])
    args = Namespace(**(vars(known) | foreign_options(rest)))
    if not get_defaults:
        _MINDSPEED_ARGS = args
    return args


def get_full_args() -> Namespace:
    """What patched code reads at run time. ``megatron.training`` would be asked first; the PyPI wheel lacks it."""
    return get_mindspeed_args()


def foreign_options(tokens: list[str]) -> dict[str, Any]:
    """Options that no feature declared: True without a value, else a string, or a list of several strings."""
    options: dict[str, Any] = {}
    name = None
    for token in tokens:
        if token.startswith("-"):
            flag, equals, value = token.partition("=")
            name = flag[2:].replace("-", "_")
            options[name] = value if equals else True
        elif name is not None:
            before = options[name]
            if before is True:
                options[name] = token
            else:
                options[name] = [*(before if isinstance(before, list) else [before]), token]
    return options
