"""A document: the validated content of one record, in one form for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascend.training.batch.candidates import Candidates

Message = dict[str, Any]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Document:
    """One text, prompt with its completion (which may be labelled), conversation, preference pair, or sequence of tokens.

    Exactly one of ``text``, ``completion``, ``messages``, ``chosen`` and ``token_ids`` is set.

    Attributes:
        source: ``file:line``, ``file[row]`` or the file; every error about the document begins with it.
        messages: a conversation, in the form that the chat template receives; the first ``prompt_messages`` are a prompt, which
            is not learned unless prompts are.
        text: plain text; every token of it is learned.
        begins, ends: False for a block of a longer text, which does not begin or end there: it gets no special tokens.
        prompt, completion: plain text of which only the completion is learned. ``prompt`` also precedes ``chosen`` and
            ``rejected`` of plain text.
        chosen, rejected: the sides of a preference pair, both plain text or both complete conversations.
        margin: least difference of the rewards of a pair's sides, for reward models.
        loss_weights: loss weight of each message; None: 1 for the assistant's, 0 for all others.
        tools, template_options: functions that the conversation may call, and further variables, for the chat template.
        token_ids: a sequence of tokens, with the weight of each as a target, and perhaps a teacher's ``candidates`` for it.
        label: True for a desirable completion, False for an undesirable one.
        class_label: content of the column ``label``, for classifiers.
        mismatch: another document's completion to the prompt of a labelled one: plain text or messages, as its own.
    """

    source: str
    messages: Messages | None = None
    text: str | None = None
    begins: bool = True
    ends: bool = True
    prompt: str | None = None
    completion: str | None = None
    chosen: Messages | str | None = None
    rejected: Messages | str | None = None
    margin: float | None = None
    loss_weights: tuple[float, ...] | None = None
    prompt_messages: int = 0
    tools: tuple[dict[str, Any], ...] | None = None
    template_options: dict[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None
    token_weights: tuple[float, ...] | None = None
    candidates: Candidates | None = None
    label: bool | None = None
    class_label: Any = None
    mismatch: Messages | str | None = None

    @property
    def parts(self) -> tuple[str, str] | tuple[Messages, Messages]:
        """Prompt and completion, both plain text or both messages."""
        if self.messages is None:
            return self.prompt or "", self.completion or ""
        return self.messages[: self.prompt_messages], self.messages[self.prompt_messages :]

    @property
    def kind(self) -> str:
        """Name several documents of this kind, for counts."""
        if self.label is not None:
            return "labelled completions"
        kinds = {
            "text": "texts",
            "completion": "completions",
            "token_ids": "token sequences",
            "messages": "conversations",
        }
        return next((kind for name, kind in kinds.items() if getattr(self, name) is not None), "preference pairs")

    @property
    def is_pair(self) -> bool:
        return self.chosen is not None
