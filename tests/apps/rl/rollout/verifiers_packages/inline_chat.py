"""A harness of verifiers that talks to the model from this process: others start a program for every turn of the user."""

from typing import Any

import httpx
import verifiers.v1 as vf


class InlineConfig(vf.HarnessConfig):
    histories: bool = False
    """Continue the first reply in two ways, and a changed one in a third."""


class InlineChat(vf.Harness[InlineConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"}) as client:

            async def ask(messages: list[dict[str, Any]]) -> httpx.Response:
                return await client.post(
                    f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
                )

            answer = await ask(messages)
            if self.config.histories:
                reply = answer.json()["choices"][0]["message"]["content"]
                for text, question in ((reply, "Other?"), (reply, "Again?"), (reply.upper(), "More?")):
                    turn = [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
                    answer = await ask([*messages, *turn])
        return vf.ProgramResult(int(answer.is_error), "", answer.text)


__all__ = ["InlineChat"]
