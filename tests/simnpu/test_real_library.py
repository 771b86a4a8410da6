"""simnpu's operators against torch_npu's own library, whose kernels do nothing here; at night, from the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_calls import CALLS

import simnpu
from real_torch_npu.__main__ import compare, real_schemas, simulated_schemas
from real_torch_npu.library import FOLDER, VERSIONS, UnavailableError, version_for_torch
from real_torch_npu.names import USED, compare_names, installed_programs, names_of_program, real_package
from real_torch_npu.outcomes import RealLibrary, outcome

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("sim_npu")]


@pytest.fixture(scope="module")
def real() -> Iterator[RealLibrary]:
    """Torch's own version of the library, in a process of its own."""
    try:
        library = RealLibrary(version_for_torch(), FOLDER)
    except UnavailableError as error:
        pytest.skip(str(error))
    yield library
    library.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_are_those_of_torch_npu(version: str) -> None:
    try:
        schemas = real_schemas(version)
    except UnavailableError as error:
        pytest.skip(str(error))
    table = compare(simulated_schemas(), schemas)
    assert len(schemas) > 400
    assert (table["different"], table["absent"]) == ([], [])


def test_names_that_programs_use_are_where_the_documentation_says() -> None:
    """Also of the programs here: those installed, and MindSpeed if there is a checkout."""
    recorded = json.loads(USED.read_text())
    programs = installed_programs()
    if checkout := os.environ.get("MEGASCEND_MINDSPEED"):
        programs["MindSpeed"] = {"names": names_of_program(Path(checkout) / "mindspeed")}
    for program in (*recorded["programs"].values(), *programs.values()):
        assert len(program["names"]) > 4
    used = set().union(*(p["names"] for p in (*recorded["programs"].values(), *programs.values())))
    try:
        compared = compare_names(used)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert compared == {kind: recorded[kind] for kind in compared}


BOOTSTRAP = """
import torch_npu
from simnpu.triton_stand_in import install_triton_stand_in
install_triton_stand_in()  # MindSpeed imports triton
import megascend
runtime = megascend.bootstrap(engine="megatron")
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
print(torch_npu.__version__, runtime.platform.name, HAVE_TE, TEDotProductAttention.__module__.split(".")[0], flush=True)
__import__("os")._exit(0)
"""


def test_bootstrap_and_mindspeed_import_with_torch_npus_own_package() -> None:
    checkout = os.environ.get("MEGASCEND_MINDSPEED")
    if not checkout:
        pytest.skip("MEGASCEND_MINDSPEED names no checkout of MindSpeed")
    source = Path(simnpu.__file__).parents[1]
    try:
        with real_package(Path(checkout), source, source / "simnpu" / "site_packages") as environment:
            command = [sys.executable, "-W", "ignore", "-c", BOOTSTRAP]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{version_for_torch()} npu True mindspeed"


def test_an_argument_that_torch_npu_has_not_is_seen(real: RealLibrary) -> None:
    call = "npu.npu_rms_norm(x=t(2, 4), gamma=t(4))"
    assert "'x'" in outcome(call)["refused"] or "argument 'input'" in outcome(call)["refused"]
    assert outcome(call)["refused"] == real(call)["refused"]


META_DIFFERS = {
    "npu_cross_entropy_loss": "its z-loss is empty on the device",
    "npu_fusion_attention": "of bsnd in small letters it reads other dimensions",
    "npu_grouped_matmul": "of a list it makes one result for split_item 0",
    "npu_moe_init_routing_v2": "it makes no counts where none are asked for, the device unwritten ones",
    "npu_fusion_attention_v2": "of BSND it gives the statistics with the wrong dimension as heads",
    "npu_fusion_attention_grad": "it has no gradient of pse",
    "npu_fusion_attention_grad_v2": "it fails without pse",
}
"""Operators whose shapes on the meta device are not those that torch_npu itself makes on a device: the device's count."""
META_FAILS = {"npu_fusion_attention_grad_v2"}


@pytest.mark.parametrize("operator", CALLS)
def test_generated_calls_are_refused_or_have_the_shapes_and_dtypes_of_torch_npu(
    real: RealLibrary, operator: str
) -> None:
    """simnpu refuses more: what the kernel does, which does nothing in the real library here."""
    accepted: list[str] = []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def compare_one(data: st.DataObject) -> None:
        call = CALLS[operator](data.draw)
        simulated = outcome(call)
        for device in ("npu:0", "meta"):
            expected = real(call, device)
            if "Meta" in expected.get("refused", ""):
                continue  # torch_npu registers no shapes for it
            if "refused" in expected and not (device == "meta" and operator in META_FAILS):
                assert "refused" in simulated, f"{call}\nrefused on {device}: {expected['refused']}"
            elif "results" in simulated and not (device == "meta" and operator in META_DIFFERS):
                accepted.append(call)
                assert simulated == expected, f"{call} on {device}"

    compare_one()
    assert len(set(accepted)) >= 5, "too few calls that both take"
