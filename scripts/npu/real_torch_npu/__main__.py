"""Compare the schemas of simnpu's operators with those of torch_npu: same, different, absent.

    PYTHONPATH=src:scripts/npu python -m real_torch_npu [VERSION ...]    # default: the range that the nightly test checks
    ... --names                                                          # write the names of its operators, for docs/simnpu.md

The schemas are read from the library's strings; for torch's own version they are also those of the loaded library.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import Version

from real_torch_npu.library import FOLDER, VERSIONS, normalised, printed_schemas, unpack
from real_torch_npu.outcomes import RealLibrary

NAMES = Path(__file__).resolve().parents[3] / "benchmarks" / "integrations" / "torch_npu-operators.txt"


def simulated_schemas() -> dict[str, str]:
    """Return simnpu's schemas by qualified name."""
    from simnpu.operators.dispatch import OPERATORS
    from simnpu.operators.library import schema

    return {name: normalised(schema(name, operator)) for name, operator in OPERATORS.items()}


def compare(simulated: dict[str, str], real: set[str]) -> dict[str, list[str]]:
    """Sort simnpu's operators; an operator is absent if torch_npu has none of that name and overload."""
    by_name = {text.partition("(")[0]: text for text in real}
    table: dict[str, list[str]] = {"same": [], "different": [], "absent": []}
    for name, text in simulated.items():
        if name not in by_name:
            table["absent"].append(name)
        else:
            table["same" if text == by_name[name] else "different"].append(name)
    return table


def real_schemas(version: str, folder: Path = FOLDER) -> set[str]:
    """Return the schemas of a version: of its loaded library if it is the one for this torch, else as printed in it."""
    import torch

    if Version(version).release != Version(torch.__version__).release:
        return printed_schemas(unpack(version, folder))
    library = RealLibrary(version, folder)
    try:
        return {normalised(text) for text in library("schemas")}
    finally:
        library.close()


def main(arguments: list[str]) -> int:
    simulated = simulated_schemas()
    versions = [a for a in arguments if not a.startswith("--")] or list(VERSIONS)
    failed = False
    for version in versions:
        real = real_schemas(version)
        table = compare(simulated, real)
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in table.items())
        print(f"torch_npu {version}: {len(real)} schemas; of simnpu's {len(simulated)}: {counts}")
        by_name = {text.partition("(")[0]: text for text in real}
        for name in table["different"]:
            print(f"  {name}\n    simnpu    {simulated[name]}\n    torch_npu {by_name[name]}")
        for name in table["absent"]:
            print(f"  {name} is not in torch_npu")
        failed |= bool(table["different"] or table["absent"])
        if "--names" in arguments:
            names = sorted({text.partition("(")[0].partition(".")[0] for text in real})
            NAMES.write_text(
                f"# names of torch_npu {version}'s operators, by python -m real_torch_npu {version} --names\n"
                + "".join(f"{n}\n" for n in names)
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
