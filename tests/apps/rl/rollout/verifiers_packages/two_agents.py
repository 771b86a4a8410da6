"""Two agents of verifiers: one writes, the other one answers; a package may keep an agent from being trained."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Topics(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterator[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="Say."))


class PairConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    fixed_critic: bool = False


class Pair(vf.Env[PairConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = not self.config.fixed_critic

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        text = await agents.writer.run(task)
        verdict = await agents.critic.run(vf.Task(vf.TaskData(prompt=f"{text.last_reply}?")))
        text.record_reward("good", float(verdict.last_reply == "yes"))
        verdict.record_reward("brief", float(len(verdict.last_reply) <= 3), 0.5)


__all__ = ["Pair", "Topics"]
