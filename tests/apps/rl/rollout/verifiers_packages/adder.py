"""A task of verifiers with a tool, which a server beside the harness runs."""

from collections.abc import Iterator

import verifiers.v1 as vf


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TaskConfig):
    tools: AdderConfig = AdderConfig()


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Adder(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def tool_use(self, trace: vf.Trace) -> float:
        return float([message.content for message in trace.tool_messages] == [self.data.answer])


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        yield Sum(SumData(prompt="2+3?", answer="5"), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
