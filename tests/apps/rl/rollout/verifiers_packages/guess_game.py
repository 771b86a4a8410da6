"""A game of verifiers: guess a number; the environment is the user of a conversation of up to three turns."""

from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class Guess(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    count: int = 4


class GuessTaskset(vf.Taskset[Guess, GuessConfig]):
    def load(self) -> Iterator[Guess]:
        for number in range(self.config.count):
            yield Guess(GuessData(prompt="Guess!", system_prompt="Digits.", number=number), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == str(task.data.number):
                    break
                segment = await interaction.turn("No, again!")
        trace = interaction.trace
        trace.record_reward("right", float(trace.last_reply == str(task.data.number)), 2.0)
        trace.record_reward("brief", float(len(trace.last_reply) < 3), 0.5)


__all__ = ["GuessEnv", "GuessTaskset"]
