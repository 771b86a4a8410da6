"""A task of verifiers without end: write letters. Its reward may raise, or never return."""

import asyncio
import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class LettersConfig(vf.TaskConfig):
    fault: str = ""


class Letters(vf.Task[vf.TaskData, vf.State, LettersConfig]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        if self.config.fault == "raises":
            raise KeyError("no such answer")
        if self.config.fault == "hangs":
            await asyncio.Event().wait()
        return sum(letter.isascii() and letter.isalpha() for letter in trace.last_reply) / max(1, len(trace.last_reply))


class TasksConfig(vf.TasksetConfig):
    task: LettersConfig = LettersConfig()


class Tasks(vf.Taskset[Letters, TasksConfig]):
    INFINITE = True

    def load(self) -> Iterator[Letters]:
        for number in itertools.count():
            yield Letters(vf.TaskData(prompt=f"{number}?"), self.config.task)


__all__ = ["Tasks"]
