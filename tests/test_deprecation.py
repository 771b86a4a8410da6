"""Old public names: they warn with the new one and with versions, are on the page that lists them, and go when it is time."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

import megascend
from megascend.deprecation import RENAMED, Renamed, renamed_argument
from megascend.errors import ConfigError

MIGRATION = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
COLOUR = Renamed("argument of paint:", "color", "colour", since="1.2", removal="1.4")


@renamed_argument(COLOUR)
def paint(width: int, colour: str = "blue") -> str:
    return colour * width


def test_an_argument_works_under_its_old_name_with_a_warning_at_the_line_of_the_caller() -> None:
    text = "argument of paint: color is now called colour since version 1.2; 1.4 will no longer know color"
    with pytest.warns(FutureWarning) as told:
        assert paint(2, color="red") == "redred"  # type: ignore[reportCallIssue]
    assert [(str(each.message), each.filename) for each in told] == [(text, __file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (paint(2, "red"), paint(1), paint(1, colour="green")) == ("redred", "blue", "green")


def test_both_names_are_an_error_and_a_signature_has_the_new_one_only() -> None:
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match="color is now called colour, and both are set: leave color out"),
    ):
        paint(2, colour="blue", color="red")  # type: ignore[reportCallIssue]
    assert [*inspect.signature(paint).parameters] == ["width", "colour"]
    assert "mindspeed" not in inspect.signature(megascend.MegatronBackend).parameters


@pytest.mark.parametrize("renamed", RENAMED, ids=str)
def test_an_old_name_is_listed_and_works_for_a_minor_version_at_least(renamed: Renamed) -> None:
    """Fails, too, in the version that is to be without it."""
    [row] = [line for line in MIGRATION.splitlines() if f"{renamed.old}{ENDINGS[renamed.what]}" in line]
    assert renamed.new in row
    assert f"until {renamed.removal}" in row
    assert Version(megascend.__version__) < Version(renamed.removal)
    assert Version(renamed.removal).minor >= Version(renamed.since).minor + 2


ENDINGS = {"setting": ": {", "argument of MegatronBackend:": "="}
