"""Get a torch_npu wheel, read its operators' schemas, and build the CANN on which its library runs on a CPU.

torch_npu checks an operator's arguments and allocates its results itself, and then calls a kernel of CANN by name. Here that call
finds a function that does nothing: what torch_npu refuses, and shapes and dtypes of results, are the real ones; values are not.
Needs pip, gcc and nm; nothing of the wheel is kept but in the folder that is named.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from packaging.version import Version

VERSIONS = ("2.10.0.post7", "2.13.0", "2.14.0")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / "real_torch_npu"
SOURCE = Path(__file__).with_name("cann.c")
CALLED_BY_NAME = {
    "aclrtSetDeviceSatMode", "aclSetCompileopt", "aclrtGetSysParamOpt", "aclrtSetOpExecuteTimeOut", "aclopCompileAndExecuteV2",
    "aclrtSynchronizeDeviceWithTimeout", "aclDestroyScalar", "aclDestroyIntArray", "aclDestroyFloatArray", "aclDestroyBoolArray",
    "aclDestroyTensorList", "aclDestroyScalarList",
}  # fmt: skip
"""Functions that torch_npu looks up when it runs, and whose absence is an error."""
SYSTEM = (
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "ld-linux-x86-64.so.2",
)


class UnavailableError(RuntimeError):
    """The wheel, or a tool to build the stand-in for CANN, cannot be had."""


def version_for_torch() -> str:
    """Return the version of torch_npu for the torch in this environment."""
    return next(v for v in VERSIONS if Version(v).release == Version(torch.__version__).release)


def unpack(version: str, folder: Path) -> Path:
    """Download and unpack a wheel once; return its package folder ``torch_npu``."""
    package = folder / version / "torch_npu"
    if (package / "lib" / "libtorch_npu.so").is_file():
        return package
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"torch-npu=={version}"]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        raise UnavailableError(
            f"torch-npu {version} cannot be downloaded: {(done.stderr.strip() or '?').splitlines()[-1]}"
        )
    (wheel,) = folder.glob(f"torch_npu-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / version)
    wheel.unlink()
    return package


def printed_schemas(package: Path) -> set[str]:
    """Read the schemas of all operators from the library's strings, which needs no torch of its version."""
    content = (package / "lib" / "libtorch_npu.so").read_bytes()
    schemas = set()
    for match in re.finditer(rb"[ -~]{12,}", content):
        text = match.group().decode()
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?\(.*\) -> .+", text):
            with contextlib.suppress(
                RuntimeError
            ):  # types that PyTorch's parser does not know: Dimname, classes of its own
                schemas.add(normalised(text))
    return schemas


def normalised(text: str) -> str:
    """Return a schema as PyTorch prints it, without namespace and the names of alias sets."""
    return re.sub(r"\([a-z]!?\)", "", str(torch._C.parse_schema(text))).removeprefix("npu::")


def run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(f"{command[0]} failed, which the stand-in for CANN is built with: {error}") from error


def symbols(paths: Iterable[Path], *options: str) -> set[str]:
    """Return names of dynamic symbols, without their versions."""
    lines = [line for path in paths for line in run(["nm", "-D", *options, str(path)]).splitlines()]
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()}


def build_cann(package: Path, folder: Path) -> dict[str, str]:
    """Build the libraries that torch_npu needs of CANN in ``folder``; return the variables with which it finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    torch_libraries = Path(torch.__file__).parent / "lib"
    own, graphs = [*package.glob("lib/*.so"), *package.glob("_C*.so")], [*package.glob("dynamo/**/*.so")]
    bundled = [*own, *package.parent.glob("torch_npu.libs/*.so*"), *torch_libraries.glob("*.so*")]
    system = [path for name in SYSTEM if (path := find_system(name))]
    defined = symbols([*bundled, *system], "--defined-only")
    missing = symbols(own, "--undefined-only") - defined
    strings = (package / "lib" / "libtorch_npu.so").read_bytes()
    kernels = {name.decode() for name in re.findall(rb"\x00(aclnn\w+)(?=\x00)", strings)}
    missing |= kernels | {f"{name}GetWorkspaceSize" for name in kernels} | CALLED_BY_NAME
    text = SOURCE.read_text()
    missing -= set(re.findall(r"^(?:int|void \*|const char \*) ?\*?(\w+)\(", text, re.MULTILINE))
    libraries = needed(own, bundled) | {"libopapi.so", "libascendcl.so", "libacl_op_compiler.so"}
    build(libraries, text + stubs(missing), folder)
    # Apart: torch_npu behaves otherwise if libascendcl.so has the names that only torchair needs.
    more = symbols(graphs, "--undefined-only") - defined - missing - symbols(graphs, "--defined-only")
    build(needed(graphs, [*bundled, *graphs]) - libraries, stubs(more), folder)
    return {"LD_LIBRARY_PATH": f"{folder}:{torch_libraries}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def needed(paths: Iterable[Path], bundled: Iterable[Path]) -> set[str]:
    """Return the libraries that others need and that are neither bundled with them nor the system's."""
    names = {name for path in paths for name in re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "-d", str(path)]))}
    return {name for name in names - {path.name for path in bundled} if not find_system(name)}


def stubs(names: Iterable[str]) -> str:
    """Return C code of functions that return 0, and of empty data for C++ types."""
    lines = []
    for number, name in enumerate(sorted(names)):
        if not re.match(r"_?Py|__cxa_finalize|_ITM|__gmon", name):
            data = name.startswith(("_ZTV", "_ZTI", "_ZTS"))
            lines.append(f'{"char" if data else "long"} s{number}{"[256]" if data else "(void)"} __asm__("{name}");')
            lines.append(f"char s{number}[256] = {{0}};" if data else f"long s{number}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def build(libraries: Iterable[str], code: str, folder: Path) -> None:
    (folder / "stubs.c").write_text(code)
    for name in sorted(libraries):
        target = [f"-Wl,-soname,{name}", "-o", str(folder / name)]
        run(["gcc", "-shared", "-fPIC", "-w", "-O0", str(folder / "stubs.c"), *target])


def find_system(name: str) -> Path | None:
    folders = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
    return next((path for folder in folders if (path := Path(folder) / name).exists()), None)
