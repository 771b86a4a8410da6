"""simnpu's operators against torch_npu's own library, whose kernels do nothing here; at night, from the package index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

from real_torch_npu.__main__ import FOLDER, VERSIONS, compare, real_schemas, simulated_schemas
from real_torch_npu.library import UnavailableError
from real_torch_npu.outcomes import RealLibrary, outcome

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("sim_npu")]


@pytest.fixture(scope="module")
def real() -> Iterator[RealLibrary]:
    """Torch's own version of the library, in a process of its own."""
    version = next(v for v in VERSIONS if Version(v).release == Version(torch.__version__).release)
    try:
        library = RealLibrary(version, FOLDER)
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


def test_an_argument_that_torch_npu_has_not_is_seen(real: RealLibrary) -> None:
    call = "npu.npu_rms_norm(x=t(2, 4), gamma=t(4))"
    assert "'x'" in outcome(call)["refused"] or "argument 'input'" in outcome(call)["refused"]
    assert outcome(call)["refused"] == real(call)["refused"]
