"""Environments of the verifiers format, as they are: their tasks, tools and rewards, with the policy as their model.

verifiers (0.4) samples for training through a client that sends token ids to ``/inference/v1/generate``, an endpoint of vLLM. A
server in this process answers it with the policy, so that sampling, versions and failures are those of any other environment.
What verifiers records is compared with what the engine sampled: a trajectory holds nothing else.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from megascend.apps.rl.rollout.environments import EpisodeTokens, FullContextError, Policy
from megascend.apps.rl.rollout.group import Trajectory
from megascend.errors import ConfigError, DataError
from weightwire.engine import Completion

if TYPE_CHECKING:
    from aiohttp import web

    from megascend.apps.rl.rollout.prompts import Prompt

PREFIX = "verifiers:"
"""Begins the name of such an environment in run files; the name of an installed package with a taskset follows."""
SUPPORTED = SpecifierSet(">=0.4,<0.5", prereleases=True)
RENDERER = {"name": "custom", "import_path": "megascend.apps.rl.rollout.chat_renderer:ChatRenderer"}
ROUTE = "/inference/v1/generate"
MODEL = "policy"
"""Name of the policy, which agents have unless the run file gives them another model."""
REQUEST_SETTINGS = {
    "temperature",
    "max_tokens",
    "stop_token_ids",
    "logprobs",
    "skip_special_tokens",
    "routed_experts_prompt_start",
}
"""Sampling settings of a request that are followed, or that change no sampled token."""
LIBRARIES = re.compile(r"/verifiers/v1/|/python3\.\d+/(?!(site|dist)-packages)")
"""Files that are no place of an error for people: verifiers and Python's own."""
EARLIER = (
    "; environments written for versions before 0.4 (SingleTurnEnv, ToolEnv, MultiTurnEnv) are not supported: install a release "
    "of the package for verifiers 0.4, or bring its dataset and rewards as prompts and rollout.reward, its turns as a class with "
    "async run(policy, example) (docs/environments.md)"
)
"""What to do with an environment of the earlier format."""
MAX_REQUEST = 2**30
"""Bytes of a request: a long context as JSON."""


@dataclass
class _Session:
    """Requests of one trace, and what the engine sampled for each (context, response)."""

    policy: Policy
    completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Completion] = field(default_factory=dict)


class VerifiersEnvironment:
    """An environment of verifiers; see :class:`megascend.apps.rl.rollout.environments.Environment`.

    Attributes:
        examples: tasks of the environment in place of a prompt file: their index, and verifiers' key of their content.
    """

    def __init__(
        self,
        package: str,
        /,
        *,
        renderer: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            package: name of an installed package with a taskset.
            renderer: settings of a renderer (``RendererConfig``); without ``name``, those of a chat template's, such as
                ``tool_parser``.
            select: tasks to learn from (``SelectConfig``): ``include``, ``exclude``, ``shuffle``, ``skip``, ``limit``.
            settings: those of verifiers' ``EnvConfig``: ``taskset``, ``id``, the agents, ``timeout``, ``retries``.
        """
        import verifiers.v1 as vf

        self._vf: Any = vf
        config = {**settings, "taskset": {**settings.get("taskset", {}), "id": package}}
        self._env: Any = vf.load_environment(vf.resolve_env_config(config))
        self._renderer = {**({} if renderer and "name" in renderer else RENDERER), **(renderer or {})}
        # Checked now, not in the first episode.
        self._client("http://127.0.0.1", package)
        tasks = self._env.taskset.select(vf.SelectConfig(**(select or {})))
        if not tasks.bounded:
            raise ConfigError(
                f"rollout.environment: {PREFIX}{package} has tasks without end; set options.select: {{limit: N}}"
            )
        self._tasks = {task.data.idx: task for task in tasks}
        self.examples: list[Prompt] = [{"idx": index, "key": task.key} for index, task in self._tasks.items()]
        self._sessions: dict[str, _Session] = {}
        self._ready: asyncio.Future[Any] | None = None
        self._server: asyncio.Task[None] | None = None

    async def run(self, policy: Policy, example: Prompt) -> list[Trajectory]:
        """Play one episode of a task; return a trajectory for each history of each agent that is trained."""
        client = await self._served(policy)
        sessions: dict[str, _Session] = {}

        def register(trace: Any) -> None:
            self._sessions[trace.id] = sessions[trace.id] = _Session(policy)

        sampling = self._vf.SamplingConfig(
            temperature=policy.sampling.temperature, max_tokens=policy.sampling.max_tokens
        )
        context = self._vf.ModelContext(model=MODEL, client=client, sampling=sampling)
        task = self._task(example).with_data()
        # A copy: episodes of a task change its data independently.
        task.data = task.data.model_copy(deep=True)
        [slot] = self._env.slots(task)
        try:
            episode = await self._env.run_slot(slot, context, on_trace=register)
        finally:
            for trace in sessions:
                del self._sessions[trace]
        if not self._env.complete(episode):
            raise DataError(_failure(episode))
        return [
            trajectory
            for trace in episode.traces
            # Agents with a client of their own have sampled elsewhere.
            if trace.agent.trainable and sessions[trace.id].completions
            for trajectory in _trajectories(trace, sessions[trace.id])
        ]

    def _task(self, example: Prompt) -> Any:
        """Return the task of an example, which may be one that ``select`` leaves out: those of evaluations are."""
        index = example.get("idx")
        if not isinstance(index, int) or index < 0:
            raise DataError(f"an example of a verifiers environment is {{'idx': N}}, found {example!r:.80}")
        if index not in self._tasks:
            tasks = list(self._env.taskset.include(idx=[index]))
            if not tasks:
                raise DataError(f"the taskset has no task {index}")
            self._tasks[index] = tasks[0]
        return self._tasks[index]

    # --- the policy as an endpoint ---

    def _client(self, url: str, tokenizer: str) -> Any:
        # A variable that nobody sets: with the default, verifiers would read the user's account.
        return self._vf.TrainClientConfig(
            base_url=f"{url}/v1", api_key_var="MEGASCEND_NO_KEY", renderer=self._renderer, renderer_model_name=tokenizer
        )

    async def _served(self, policy: Policy) -> Any:
        """Return the client's configuration, once the endpoint and what the environment shares between episodes run."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._server = asyncio.ensure_future(self._serve(policy, self._ready))
        # Shielded: an episode that is cancelled must not end the others' wait.
        return await asyncio.shield(self._ready)

    async def _serve(self, policy: Policy, ready: asyncio.Future[Any]) -> None:
        """Serve until the loop closes, and cancels this task."""
        import renderers.client
        from aiohttp import web

        # Made at its import, and bound to the first event loop that waits for it: an earlier run's.
        renderers.client._max_prompt_len_lock = asyncio.Lock()
        app = web.Application(client_max_size=MAX_REQUEST)
        app.router.add_post(ROUTE, self._generate)
        # A harness that is killed with its episode leaves no request behind in the engine.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        try:
            with tempfile.TemporaryDirectory(prefix="megascend-tokenizer-") as tokenizer:
                policy.save_tokenizer(tokenizer)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                async with self._env.serving():
                    ready.set_result(self._client(f"http://127.0.0.1:{runner.addresses[0][1]}", tokenizer))
                    await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            self._ready = None
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._sessions.get(request.headers.get("X-Session-ID", ""))
        if session is None:
            return web.json_response({"error": {"message": "unknown session"}}, status=404)
        body = await request.json()
        try:
            completion = await self._sample(session, body)
        except FullContextError as error:
            # vLLM's words, by which harnesses know that they must end or shorten a conversation.
            return _refusal(f"maximum context length: {error}", "context_length_exceeded")
        # Not a 5xx, which clients repeat: an engine's failure repeats the episode, the others would fail again.
        except Exception as error:  # noqa: BLE001  the client's to report
            return _refusal(f"{type(error).__name__}: {error}", "invalid_request_error")
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
        ]
        choice = {
            "token_ids": completion.tokens,
            "logprobs": {"content": content},
            "finish_reason": completion.finish_reason,
        }
        return web.json_response({"request_id": request.headers["X-Session-ID"], "choices": [choice]})

    async def _sample(self, session: _Session, body: Mapping[str, Any]) -> Completion:
        policy, requested = session.policy, body["sampling_params"]
        if body["model"] != MODEL:
            raise DataError(
                f"an agent has the model {body['model']!r} and no client: set its client, or leave its model out for the policy"
            )
        if body.get("features") or body.get("content_parts"):
            raise DataError("images are not supported in rollouts")
        unknown = sorted(name for name in requested.keys() - REQUEST_SETTINGS if requested[name] is not None)
        if unknown:
            raise DataError(f"sampling settings of the agent that are not supported: {', '.join(unknown)}")
        # Gradients are those of the distribution at the run's temperature.
        if requested.get("temperature") not in (None, policy.sampling.temperature):
            raise DataError(
                f"the agent's sampling.temperature is {requested['temperature']}, and the run samples with "
                f"{policy.sampling.temperature}: leave it out"
            )
        stop = dict.fromkeys((*policy.sampling.stop_token_ids, *(requested.get("stop_token_ids") or ())))
        policy.sampling = replace(policy.sampling, stop_token_ids=tuple(stop))
        tokens = tuple(body["token_ids"])
        completion = await policy.generate(tokens, requested.get("max_tokens"))
        session.completions[tokens, completion.tokens] = completion
        return completion


def _trajectories(trace: Any, session: _Session) -> list[Trajectory]:
    """Return a trajectory for each branch of a trace that has responses of its own."""
    rewards = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    rewards |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    trajectories: list[Trajectory] = []
    learned: set[int] = set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        sequence = EpisodeTokens(session.policy)
        for node in branch.nodes:
            context = len(node.token_ids) - sum(node.mask)
            sequence.add_context(node.token_ids[:context])
            response = tuple(node.token_ids[context:])
            if not response:
                continue
            completion = session.completions.get((tuple(sequence.tokens), response))
            if completion is None or not all(node.mask[context:]):
                raise DataError(
                    f"verifiers recorded a response of {len(response)} tokens after {len(sequence.tokens)} others, which the "
                    "engine did not sample"
                )
            # Branches that begin alike share nodes, whose tokens are learned once.
            if id(node) in learned:
                sequence.add_context(response)
            else:
                learned.add(id(node))
                sequence.add_response(completion)
        if sequence.responses:
            trajectories.append(sequence.trajectory(trace.reward, rewards))
    return trajectories


def _failure(episode: Any) -> str:
    """Describe why an episode failed, with the line of the environment that raised."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "the episode is not complete, and verifiers recorded no error"
    error = errors[-1]
    frames = re.findall(r'File "([^"]+)", line (\d+)', error.traceback or "")
    places = [f" ({file}:{line})" for file, line in frames if not LIBRARIES.search(file)]
    return f"{error.type}: {error.message}{places[-1] if places else ''}"


def _refusal(message: str, code: str) -> web.Response:
    from aiohttp import web

    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=400)


def load(package: str, options: Mapping[str, Any]) -> VerifiersEnvironment:
    """Load the environment of an installed package.

    Args:
        options: keyword arguments of :class:`VerifiersEnvironment`.
    """
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise ConfigError(
            f"rollout.environment: {PREFIX}{package} needs verifiers{SUPPORTED}: pip install 'megascend[verifiers]'"
        ) from None
    if installed not in SUPPORTED:
        raise ConfigError(
            f"rollout.environment: verifiers {installed} is not supported, install verifiers{SUPPORTED}"
            f"{EARLIER if installed in SpecifierSet('<0.4', prereleases=True) else ''}"
        )
    try:
        return VerifiersEnvironment(package, **options)
    except ConfigError:
        raise
    except Exception as error:
        # The root package had classes until 0.3 (vf.SingleTurnEnv, vf.ToolEnv), which most of its environments extend.
        earlier = "module 'verifiers'" in str(error) or "from 'verifiers'" in str(error) or "`__all__`" in str(error)
        raise ConfigError(
            f"rollout.environment: verifiers {installed} cannot load {package}: {type(error).__name__}: {error}"
            f"{EARLIER if earlier else ''}"
        ) from error
