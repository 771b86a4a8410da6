"""Chat templates as a renderer of the package ``renderers``, which verifiers renders and parses conversations with."""

from __future__ import annotations

from typing import Any, ClassVar

from renderers import DefaultRendererConfig, RenderedTokens
from renderers.default import DefaultRenderer

from megascend.apps.rl.rollout.environments import PromptRenderer

EARLIER = [{"role": "user", "content": "?"}]
"""Stands for the conversation before a reply, on which what a template writes after the reply does not depend."""


class ChatRenderer(DefaultRenderer):
    """Renderer of the tokenizer's chat template that continues the tokens of earlier turns as they were sampled."""

    config_class: ClassVar[type[DefaultRendererConfig]] = DefaultRendererConfig

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: list[Any], **_: Any
    ) -> RenderedTokens | None:
        """Return the earlier tokens and those that the template writes between the last reply and the next one."""
        # Without special tokens at its end the reply was cut off, or ended at a stop token that is text.
        tokenizer: Any = self._tokenizer
        closed = previous_completion_ids[-1] in tokenizer.all_special_ids
        last = tokenizer.decode(previous_completion_ids[-1:]) if closed else ""
        between = PromptRenderer(tokenizer).continuation(EARLIER, new_messages, last)
        tokens = [*previous_prompt_ids, *previous_completion_ids, *between]
        roles = [message["role"] for message in new_messages]
        # -1: no message's. What lies between two replies is context as a whole.
        return RenderedTokens(token_ids=tokens, message_indices=[-1] * len(tokens), message_roles=roles)
