"""What a run leaves behind beside its figures: answers, profiles, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from megascend.config.section import Count, Seconds, Section, Size


class PromptMessage(TypedDict):
    """A message of a conversation whose next turn the model is asked for."""

    role: str
    content: str


Prompt = Annotated[str, Field(min_length=1)] | Annotated[tuple[PromptMessage, ...], Field(min_length=1)]


class Generation(Section):
    """Prompts that the model answers at intervals, to be read."""

    prompts: tuple[Prompt, ...] = Field(
        min_length=1, description="each a text, or a conversation: [{role: system, content: ...}, {role: user, ...}]"
    )
    every: Size = Field(100, description="steps from one time to the next; the last step is one in any case")
    max_tokens: Size = Field(64, description="longest answer; each token takes a forward pass")
    temperature: float = Field(0.0, ge=0, description="0: the likeliest token")
    seed: Count = Field(
        0, description="of answers at a temperature above 0: the same ones whenever the model is the same"
    )
    chat: bool = Field(
        True, description="a text is the user's turn, written by the chat template; false: it is continued as it is"
    )

    @model_validator(mode="after")
    def _prompts(self) -> Generation:
        if any(self.prompts.count(prompt) > 1 for prompt in self.prompts):
            raise ValueError("generation.prompts: a prompt appears twice")
        if not self.chat and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(
                "generation.chat: false continues texts; a prompt that is a conversation needs the template"
            )
        return self


class Profile(Section):
    """A trace of some steps, by torch.profiler."""

    after: Count = Field(3, description="steps of this process before those that are recorded")
    steps: Size = Field(3, description="how many are recorded")
    ranks: Literal["first", "all"] = Field("first", description="which ranks record: rank 0 alone, or all of them")
    max_mib: Size = Field(
        256, description="largest trace of a rank before it is compressed; fewer steps are recorded if need be"
    )


class Checkpoint(Section):
    """When a run saves what it needs to resume, to OUTPUT/checkpoints, and what becomes of it."""

    every: Count = Field(
        0, description="steps from one to the next, and one at the end; 0: only when a signal stops the run"
    )
    keep_last: Size = Field(2, description="how many of the newest are kept")
    keep_every: Count = Field(0, description="those whose step is a multiple of this stay for good; 0: none")
    asynchronous: bool = Field(True, description="write while training continues, which stands still for a copy only")
    hf: bool = Field(False, description="also export the model into each, for transformers; not in the background")
    timeout_s: Seconds = Field(1800, description="seconds after which a save that is waited for counts as failed")
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="what happens when a checkpoint cannot be written: the run ends, or continues and tries again",
    )
