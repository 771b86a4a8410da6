"""Convert a container file to a shell script that works on a directory instead of an image, to test it without a builder.

    python scripts/container_steps.py containers/Containerfile.cpu

COPY and RUN become commands; absolute paths that COPY creates are placed in ``$ROOT``, and an ARG is a variable that the
environment may set.
``pip`` and ``python`` come from PATH. FROM, USER, WORKDIR, ENTRYPOINT and commands that would change this machine (useradd)
are left out, which the script prints.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

LEFT_OUT = ("FROM", "USER", "WORKDIR", "ENTRYPOINT")
CHANGES_THE_MACHINE = ("useradd",)


def instructions(text: str) -> list[tuple[str, str]]:
    """Parse the instructions of a container file with their arguments, without comments and with continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def shell(text: str) -> str:
    """Build the script.

    Raises:
        ValueError: an instruction is not supported.
    """
    steps = instructions(text)
    targets = [rest.split()[-1].rstrip("/") for name, rest in steps if name == "COPY"]
    folders = sorted({Path(target).parts[1] for target in targets if target.startswith("/")})
    lines = ["set -eu"]
    for name, rest in steps:
        rooted = re.sub(rf"(?<![\w/.])/({'|'.join(folders)})\b", r"$ROOT/\1", rest) if folders else rest
        if name == "ARG":
            variable, _, value = rest.partition("=")
            lines.append(f"export {variable}=${{{variable}:-{value}}}")
        elif name == "COPY":
            *sources, target = rooted.split()
            folder = target if target.endswith("/") else f"$(dirname {target})"
            lines += [f"mkdir -p {folder}", f"cp -r {' '.join(sources)} {target}"]
        elif name == "RUN" and rest.split()[0] not in CHANGES_THE_MACHINE:
            lines.append(f"( {rooted} )")
        elif name in (*LEFT_OUT, "RUN"):
            lines.append(f"echo {shlex.quote(f'left out: {name} {rest}')}")
        else:
            raise ValueError(f"{name} {rest}: not known to this script")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(shell(Path(sys.argv[1]).read_text()), end="")
