"""Parse YAML and JSON that may be a stranger's: a few hundred bytes must not become gigabytes, or hours."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

MAX_VALUES = 100_000
"""Most values of a YAML document, those that its aliases repeat included."""
MAX_DIGITS = 40
"""Longest integer in JSON; tokenizers write 1e30 as one."""


@cache
def yaml_loader() -> Any:
    """Return PyYAML's safe loader with a bound for aliases and for integers, which have at most 64 bits."""
    import yaml

    def refuse(problem: str, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    class BoundedLoader(yaml.SafeLoader):
        def get_single_node(self) -> Any:
            node = super().get_single_node()
            sizes: dict[int, int] = {}

            def size(node: Any) -> int:
                if id(node) not in sizes:
                    sizes[id(node)] = MAX_VALUES  # of a node inside itself
                    children = node.value if isinstance(node, yaml.CollectionNode) else ()
                    pairs = (child if isinstance(child, tuple) else (child,) for child in children)
                    sizes[id(node)] = 1 + sum(size(part) for pair in pairs for part in pair)
                if sizes[id(node)] > MAX_VALUES:
                    refuse(f"more than {MAX_VALUES} values, repeated ones (*alias) included", node)
                return sizes[id(node)]

            if node is not None:
                size(node)
            return node

        def construct_number(self, node: Any) -> Any:
            is_float = node.tag.endswith(":float")
            # Before it is computed, which for 1:1:1 (base 60) takes the square of the length.
            if len(node.value) > 100:
                refuse(f"a number of {len(node.value)} characters", node)
            number = self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
            if not is_float and abs(number) >= 2**64:
                refuse(f"{number} has more than 64 bits", node)
            return number

    for kind in ("int", "float"):
        BoundedLoader.add_constructor(f"tag:yaml.org,2002:{kind}", BoundedLoader.construct_number)
    return BoundedLoader


def load_yaml(text: str) -> Any:
    """Parse YAML; raise yaml.YAMLError if it is not valid, or beyond the bounds."""
    import yaml

    try:
        return yaml.load(text, yaml_loader())
    except (ValueError, RecursionError) as error:  # a date such as 2026-13-01 is a ValueError
        problem = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise yaml.YAMLError(problem) from None


def load_json(content: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is not valid, or beyond the bounds."""
    try:
        return json.loads(content, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)
