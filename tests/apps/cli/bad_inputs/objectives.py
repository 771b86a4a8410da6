"""Data and settings of different objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bad_inputs.row import Bad, data, settings, words

LABELLED = {"prompt": "one?", "completion": "two", "label": True}
OTHER = {"prompt": "red?", "completion": "blue", "label": False}
PAIR = {"prompt": "one?", "chosen": "two", "rejected": "three"}
TEXT = {"prompt": "one?", "completion": "two"}
TOP = {"token_ids": [40, 41], "prompt_length": 1, "top_ids": [[], [41]], "top_logprobs": [[], [-0.1]]}
PLAIN = {"token_ids": [40, 41], "prompt_length": 1}
LOSSES = """
from megascend import Loss


def focal(logprobs, inputs, power=2.0):
    return -((1 - logprobs.exp()) ** power) * logprobs


needy = Loss("needy", focal, requires=("advantages",))
"""


def own_loss(*changes: str, says: str) -> Bad:
    """Set a loss of ``losses.py``."""

    def arrange(folder: Path) -> Any:
        return (folder / "losses.py").write_text(LOSSES)

    return Bad(words(says), settings(*changes, says="").command, arrange)


OBJECTIVES = {
    "labels without kto": data(LABELLED, OTHER, says="holds completions with a 'label': set kto: {beta: 0.1}"),
    "kto of texts": data(TEXT, changes=("loss=kto",), says="kto is set, which learns from completions with a 'label'"),
    "kto of one prompt": data(
        LABELLED, LABELLED | {"label": False}, changes=("loss=kto",), says="all labelled completions have one prompt"
    ),
    "a label that is a number": data(LABELLED | {"label": 1}, changes=("loss=kto",), says="'label' must be true (desirable)"),
    "a loss that is none": settings("loss=orppo", says="unknown loss 'orppo', did you mean orpo?"),
    "no such function": own_loss("loss=losses.py:missing", says="losses.py has no function or class 'missing'; it has focal"),
    "a field that samples do not have": own_loss("loss=losses.py:needy", says="losses.py:needy: the loss requires advantages"),
    "distributions without distillation": data(TOP, says="holds a teacher's distributions ('top_ids'): set distillation"),
    "distillation without distributions": data(
        PLAIN, changes=("distillation={loss: forward_kl}",), says="holds no distributions of a teacher"
    ),
    "a teacher beside distributions": data(
        TOP, changes=("distillation={loss: forward_kl, teacher: model}",), says="distributions ('top_ids') too: remove teacher"
    ),
    "some margins": data(
        PAIR | {"margin": 0.5}, PAIR | {"prompt": "two?"}, changes=("bradley_terry={}",), says="with 'margin' and others without"
    ),
    "a group of no weight": settings(
        "optimizer.groups=[{match: transformer.wte.*}]", says="optimizer.groups.0.match | no trained weight has such a name"
    ),
}  # fmt: skip
