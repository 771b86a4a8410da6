"""A document: what one record of the data says, checked, in one form for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Document:
    """One text, one prompt with its completion, one conversation, or one preference pair, and where it stands.

    Exactly one of ``text``, ``completion``, ``messages`` and ``chosen`` is set.

    Attributes:
        source: ``file:line``, ``file[row]`` or the file; every error about the document begins with it.
        messages: of a conversation, as the chat template shall see them.
        text: plain text; every token of it is learned.
        prompt, completion: plain text of which only the completion is learned. With ``chosen`` and ``rejected`` that are
            plain text, ``prompt`` is what stands before either.
        chosen, rejected: of a preference pair, both plain text or both whole conversations.
        loss_weights: of each message, or None for 1 on the assistant's and 0 on all others.
        prompt_messages: how many of ``messages`` are a prompt: of those nothing is learned, unless prompts are learned, too.
        tools: what the conversation may call, for the chat template.
        template_options: further variables of the chat template, ``{"enable_thinking": False}`` for example.
    """

    source: str
    messages: Messages | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    chosen: Messages | str | None = None
    rejected: Messages | str | None = None
    loss_weights: tuple[float, ...] | None = None
    prompt_messages: int = 0
    tools: tuple[dict[str, Any], ...] | None = None
    template_options: dict[str, Any] | None = None

    @property
    def is_pair(self) -> bool:
        """True for a preference pair."""
        return self.chosen is not None
