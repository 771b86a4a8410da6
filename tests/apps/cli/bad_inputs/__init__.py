"""Tables of bad inputs, with the words that their error messages must contain."""

from __future__ import annotations

from bad_inputs.commands import COMMANDS
from bad_inputs.data import DATA
from bad_inputs.models import MODELS
from bad_inputs.objectives import OBJECTIVES
from bad_inputs.row import Bad
from bad_inputs.settings import SETTINGS

BAD_INPUTS: dict[str, Bad] = {
    f"{part}: {name}": bad
    for part, rows in {
        "data": DATA,
        "settings": SETTINGS,
        "model": MODELS,
        "objective": OBJECTIVES,
        "command": COMMANDS,
    }.items()
    for name, bad in rows.items()
}
