"""Settings of ``megascend rl``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megascend.config import Count, Section, Size, TrainerConfig, parsed, read_settings
from megascend.config.data import PREFERENCE_LOSSES
from megascend.config.registry import BUILT_IN_LOSSES, INFERENCE_ENGINES, inference_engine, losses_of_responses
from megascend.config.rl_presets import CLIP_OPTIONS, PRESETS
from megascend.config.rules import Rule
from megascend.config.section import Also, has_duplicates
from megascend.config.training import MEASURED_BUDGET

VLLM = "vllm"
"""Entry of ``engines`` for a vLLM server that the run starts."""
SGLANG = "sglang:"
"""Begins the address of an SGLang server as a teacher."""
LOCAL, TRAINER = "local", "trainer"
"""Engines of a teacher: transformers in a process beside rank 0, and the trainer's own ranks."""
BASE = "base"
"""Reference that is the model which the run starts from."""
COUNTERPARTS = {
    "data": "prompts are those of rollout.prompts, and their number in a step is rollout.prompts_per_step",
    "validation": "set evaluation: rewards on the prompts of another file at intervals",
    "generation": "set evaluation, and read the responses with megascend rollouts RUN --outcome evaluated",
    "distillation": "set teacher: its distributions over what the model samples are learned",
    "epochs": "set steps: how many prompts they take depends on the groups that are dropped",
    **dict.fromkeys(PREFERENCE_LOSSES, "objective says what is learned from rewards"),
    "classification": "rewards may be those of a classifier that it has trained",
    "loss": "set objective.loss, or objective.preset",
    "loss_settings": "set objective.loss_settings",
}
"""Sections of ``megascend train`` that ``megascend rl`` lacks, and what to set in their place."""


class EnvironmentSettings(Section):
    """Episodes of several turns, in place of one response and a reward function."""

    name: str = Field(
        description="class, function that makes one, or object with async run(policy, example), as package.module:name or "
        "path/to/file.py:name; or verifiers:PACKAGE, an environment of the verifiers format"
    )
    options: dict[str, Any] = Field(
        {}, description="keyword arguments of the class or function; settings of a verifiers environment"
    )
    timeout_s: Size = Field(600, description="seconds after which an episode is cancelled and counted as timed out")
    concurrency: Size = Field(256, description="episodes at a time, over all engines")
    max_failed: float = Field(
        0.2,
        ge=0,
        le=1,
        description="end the run when a larger share of the last 100 episodes timed out or raised an exception",
    )


class RolloutRecords(Section):
    """Records of rollouts, for people: rollouts.jsonl in the run directory (``megascend rollouts``)."""

    every: Count = Field(1, description="interval in steps of the trajectories in rollouts.jsonl; 0: none")
    tokens: bool = Field(
        False, description="with token ids, the mask of sampled ones, and the engine's log-probabilities"
    )
    max_bytes: Size = Field(
        256 * 2**20, description="size at which rollouts.jsonl becomes rollouts.1.jsonl, which replaces an earlier one"
    )
    show_every: Count = Field(
        50, description="interval in steps at which the best and the worst rollout of a prompt are shown; 0: never"
    )


class Rollout(Section):
    """Sampling by the rollout engines, and their allowed lag."""

    prompts: Annotated[Path | None, Also("dataset", "dataset_name", "train_file", "train_files")] = Field(
        None,
        description="JSONL file with prompt or messages, and fields for the reward function; default: the examples that the "
        "environment brings",
    )
    reward: Annotated[str | None, Also("reward_funcs", "reward_function")] = Field(
        None,
        description="function (response, example) -> float or {reward: float, PART: float}, as package.module:function or "
        "path/to/file.py:function",
    )
    environment: EnvironmentSettings | None = Field(
        None, description="episodes of several turns with tools, in place of a reward function"
    )
    prompts_per_step: Annotated[
        Size, Also("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
    ] = Field(16, description="prompts (groups) per optimizer step")
    group_size: Annotated[int, Also("num_generations")] = Field(8, ge=2, description="responses per prompt")
    max_tokens: Annotated[Size, Also("max_completion_length", "max_new_tokens", "response_length")] = Field(
        256, description="longest response in tokens; of an environment, of one turn"
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="sampling temperature of training responses, and of the policy that is trained"
    )
    top_k: int = Field(
        0,
        ge=0,
        le=224,
        description="sample training responses from this many likeliest tokens; 0: all. The policy that is trained is the "
        "distribution over the tokens that each was drawn from",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample training responses from the fewest of the top_k tokens that have this probability",
    )
    max_lag: Count = Field(
        1,
        description="largest number of steps between the weights that sampled a response and those that learn from it; 0: "
        "engines and trainer take turns",
    )
    drop_equal: bool | None = Field(
        None,
        description="dynamic sampling: drop groups whose rewards are all equal, and sample other prompts; default: true, but "
        "false with objective.advantages: reinforce++, and with teacher.rewards",
    )
    max_groups_without_signal: Count | None = Field(
        None,
        description="end the run after this many consecutive groups with equal rewards, and warn after half as many; "
        "default: ten batches of them, at least 100; 0: never",
    )
    in_order: bool = Field(
        False, description="learn from prompts in their order: reproducible, but a slow response delays the trainer"
    )
    shuffle: bool = Field(True, description="draw a new random order of the prompts for each epoch")
    stop: tuple[str, ...] = Field(
        (), description="tokens that end a response, in addition to the end-of-sequence token"
    )
    router_replay: bool = Field(
        False,
        description="mixtures of experts: train each token on the experts that the engine chose for it; needs vLLM servers "
        "started with --enable-return-routed-experts",
    )
    timeout_s: Size = Field(600, description="seconds after which a request to an engine fails")
    engines_lost_s: Size = Field(
        600,
        description="seconds without an engine, at the start and after the last one was lost, after which the run ends",
    )
    records: RolloutRecords = RolloutRecords()
    controller: str | None = Field(
        None,
        description="rollout controller whose engines are used in place of engines: HOST:PORT, or the file in which it "
        "publishes its address",
    )

    rules = (
        Rule(
            "top_p with top_k=0: engines return the tokens that were allowed, which top_k bounds; set top_k",
            lambda s: s.top_p < 1 and not s.top_k,
        ),
    )

    @property
    def max_equal_groups(self) -> int:
        """Consecutive groups with equal rewards that end the run; 0: never."""
        if self.max_groups_without_signal is None:
            # Ten batches, as in verl's max_num_gen_batches; fewer than 100 groups may be equal by chance.
            return max(10 * self.prompts_per_step, 100)
        return self.max_groups_without_signal


class Objective(Section):
    """Objective that a step minimises."""

    preset: Annotated[
        Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce++", "rloo"] | None, Also("loss_type")
    ] = Field(None, description="published objective, whose settings are those that are not set here")
    loss: str = Field("ppo", description=f"loss function: {', '.join(losses_of_responses())}, or a registered one")
    loss_settings: dict[str, float] = Field({}, description="keyword arguments of the loss function, such as max_ratio")
    clip_low: Annotated[float | None, Also("epsilon", "clip_ratio")] = Field(
        None, ge=0, description="the ratio is clipped to at least 1 - clip_low; default: that of the loss"
    )
    clip_high: Annotated[float | None, Also("epsilon_high")] = Field(
        None, ge=0, description="the ratio is clipped to at most 1 + clip_high; default: that of the loss"
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="upper bound of the ratio of tokens with a negative advantage (Ye et al. 2020, arXiv:1912.09729); default: "
        "none",
    )
    advantages: Annotated[
        Literal["grpo", "rloo", "centered", "reinforce++", "reinforce++_baseline"], Also("adv_estimator")
    ] = Field(
        "grpo",
        description="advantage estimator; centered is that of Dr. GRPO, reinforce++ compares all responses of a step",
    )
    divide_by_std: Annotated[bool | None, Also("scale_rewards")] = Field(
        None,
        description="divide advantages by the standard deviation of the group, with reinforce++ and reinforce++_baseline of the "
        "step; default: true, with rloo and centered false",
    )
    correction: Literal["truncated", "none"] = Field(
        "truncated",
        description="truncated: old log-probabilities are the trainer's, and advantages are multiplied by "
        "min(p_trainer / p_engine, cap); none: old log-probabilities are the engine's",
    )
    cap: float = Field(2.0, gt=0, description="upper bound of the importance weights of correction")
    measure_every: Count = Field(
        10, description="with correction none: interval of mismatch measurements in steps; 0: never"
    )
    average: Literal["tokens", "responses", "fixed", "sums"] = Field(
        "tokens",
        description="tokens: mean over all tokens of the step; responses: mean over responses of each one's mean; fixed: of each "
        "one's sum, divided by length; sums: of each one's sum",
    )
    length: Size | None = Field(
        None,
        description="longest response in tokens, for average: fixed and overlong_share; default: rollout.max_tokens",
    )
    overlong_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="last share of length within which a response's reward falls, by up to 1 (DAPO's soft overlong punishment); "
        "0: none",
    )
    drop_truncated: bool = Field(
        False,
        description="leave responses that were cut off out of the loss and its average; their rewards still count for the "
        "advantages of others",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        if values["preset"] not in PRESETS:
            return values  # refused as any other choice
        settings = dict(PRESETS[values["preset"]].settings)
        # Clip ranges are those of the preset's own loss, and clip nothing at a ratio of 1.
        if values.get("loss", settings["loss"]) != settings["loss"] or values.get("correction") == "truncated":
            settings = {name: value for name, value in settings.items() if name not in CLIP_OPTIONS}
        return settings | values

    rules = (
        Rule(
            "correction with clip_low, clip_high or dual_clip: the ratio to the old policy is 1, and nothing is "
            "clipped; set none",
            lambda s: s.correction == "truncated" and any(name in s.loss_options for name in CLIP_OPTIONS),
        ),
        Rule(
            "correction with loss_settings of a built-in loss: the ratio to the old policy is 1, and they change nothing; "
            "set none",
            lambda s: s.correction == "truncated" and s.loss_settings and s.loss in BUILT_IN_LOSSES,
        ),
    )

    @property
    def loss_options(self) -> dict[str, float]:
        """Return the arguments of the loss function that are set."""
        options = {name: value for name in CLIP_OPTIONS if (value := getattr(self, name)) is not None}
        return options | self.loss_settings

    @property
    def compares_groups(self) -> bool:
        """Return whether a group whose rewards are all equal has advantages: those of responses to other prompts differ."""
        return self.advantages == "reinforce++"


class ReferenceSettings(Section):
    """Reference model that the policy is compared with, and the penalty on its distance (KL divergence)."""

    model: Literal["base"] | Path = Field(
        BASE,
        description="base: the model that the run starts from, with lora the model without its adapter; or the directory of a "
        "Hugging Face checkpoint of the same architecture (without lora), or its name on the Hub",
    )
    penalty: Literal["reward", "loss"] = Field(
        "loss",
        description="loss: a term of every sampled token; reward: the sum over a trajectory's sampled tokens is taken from its "
        "reward before advantages are computed",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="estimator of KL(policy || reference) per token; default: k1 in the reward, k2 in the loss, where k1 is "
        "refused: its expected gradient is 0",
    )
    coefficient: Annotated[float, Also("beta", "kl_coef")] = Field(
        0.001, ge=0, description="factor of the penalty; 0: only measure the divergence and give losses ref_logprobs"
    )

    @property
    def kl_estimator(self) -> str:
        """Estimator of the penalty."""
        return self.estimator or ("k1" if self.penalty == "reward" else "k2")

    rules = (
        Rule(
            "estimator with penalty=loss: its expected gradient is 0; set k2, or penalty: reward, where k1 has "
            "the gradient of the KL divergence",
            lambda s: s.penalty == "loss" and s.estimator == "k1",
        ),
    )


class TeacherSettings(Section):
    """Another model whose distributions the model learns on its own responses (on-policy distillation)."""

    engine: str = Field(
        "local",
        description="address of a vLLM server with the teacher (http://HOST:PORT), or of an SGLang server "
        "(sglang:http://HOST:PORT), whose tokenizer must be the model's; local: "
        "transformers in a process beside rank 0; trainer: the trainer's ranks, beside the model, for its whole distributions",
    )
    model: Path | None = Field(
        None,
        description="checkpoint directory of the teacher, or its name on the Hub, for the engines local and trainer",
    )
    loss: Literal["policy", "forward_kl", "reverse_kl", "jsd"] = Field(
        "policy",
        description="policy: objective.loss with -coefficient (log p_model - log p_teacher) of each sampled token as its "
        "advantage; others: the divergence over the teacher's likeliest tokens at each position, with engine trainer over all "
        "tokens",
    )
    top: int = Field(
        64,
        ge=1,
        le=256,
        description="likeliest tokens of a position, for losses other than policy; not with engine trainer",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="weight of the teacher in the mixture of jsd")
    coefficient: float = Field(1.0, gt=0, description="factor of the teacher's advantages, with loss policy")
    rewards: bool = Field(
        False, description="with loss policy, add the teacher's advantages to those of the rewards, in place of them"
    )

    rules = (
        Rule(
            "model with engine={engine}: local and trainer load a directory, and a server has its model loaded; "
            "set it for local and trainer only",
            lambda s: (s.engine in (LOCAL, TRAINER)) != (s.model is not None),
        ),
        Rule(
            "engine: it is neither local, trainer, nor the address of a server; set http://HOST:PORT of a vLLM, "
            "or sglang:http://HOST:PORT",
            lambda s: s.engine not in (LOCAL, TRAINER) and not _is_address(s.engine.removeprefix(SGLANG)),
        ),
        Rule(
            "top with engine=trainer: it compares distributions over the whole vocabulary; leave it out",
            lambda s: s.engine == TRAINER and "top" in s.model_fields_set,
        ),
        Rule(
            "rewards with loss={loss}: only loss policy has advantages, which are added to those of the rewards; "
            "set loss: policy",
            lambda s: s.rewards and s.loss != "policy",
        ),
    )


def _is_address(text: str) -> bool:
    return text.startswith("http://") and bool(text.removeprefix("http://").strip("/"))


class Sync(Section):
    """Transfer of weights to the engines."""

    every: Size = Field(1, description="interval of weight updates in steps")
    transport: str = Field(
        "auto",
        description="registered name of the weight transport; auto: nccl between GPUs, cuda_ipc on one GPU, hccl "
        "between NPUs, gloo to engines on the CPU",
    )
    bucket_bytes: Size | None = Field(
        None,
        description="bytes per transfer, of which each rank that sends holds two; default: 512 MiB, on a CPU 256 MiB",
    )
    timeout_s: Size | None = Field(
        None, description="seconds of each wait in an update; default: 120, or less if the run's timeout_s is short"
    )
    host: str = Field("127.0.0.1", description="address at which engines, and the other ranks, reach rank 0")
    sharded: bool | None = Field(
        None,
        description="every rank sends the slices that it holds and every worker of an engine receives those that it loads; "
        "default: on CPUs, and over CUDA IPC to one engine, where both can describe them and several ranks or workers share the "
        "transfer. true refuses updates otherwise",
    )
    mode: Literal["full", "delta", "auto"] = Field(
        "full",
        description="full: complete weights; delta: what has changed since the last update, exactly; auto: changes "
        "while they are worth it, which they are not over CUDA IPC. Ranks and engines keep a copy of the last update that can be "
        "the base of changes",
    )
    full_every: Size = Field(50, description="with mode delta or auto, send complete weights after so many updates")


class Vllm(Section):
    """vLLM servers that the run starts: the entries ``vllm`` of engines."""

    python: Path | None = Field(
        None,
        description="interpreter of vLLM's environment; default: MEGASCEND_VLLM_PYTHON, else .venv-vllm/bin/python",
    )
    options: tuple[str, ...] = Field(
        (), description="options of vLLM (--max-num-seqs=64), after the run's own; the last one of a name counts"
    )


class PlacementSettings(Section):
    """GPUs of the trainer and of the engines that the run starts, as positions among the host's visible GPUs."""

    trainer: tuple[Count, ...] | None = Field(
        None, description="GPUs of the trainer's processes on this host, by local rank; default: the first ones"
    )
    engines: tuple[tuple[Count, ...], ...] | None = Field(
        None,
        description="GPUs of each engine that the run starts, several for tensor parallelism: [[2, 3], [4, 5]]; default: one "
        "that the trainer does not use for each, or that of rank 0",
    )
    memory: Annotated[float | None, Also("vllm_gpu_memory_utilization")] = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's memory for an engine (gpu_memory_utilization of vLLM); default: 0.7, on the trainer's "
        "GPU 0.35, divided by the engines on the GPU",
    )
    sleep: bool = Field(
        False,
        description="engines on a GPU of the trainer free their memory during each step, and sample between steps only",
    )


class Evaluation(Section):
    """Rewards on other prompts, before the first step, at intervals, and after the last one."""

    prompts: Annotated[Path, Also("eval_file", "eval_dataset")] = Field(
        description="JSONL file of prompts, in the format of rollout.prompts"
    )
    every: Annotated[Size, Also("eval_steps", "eval_strategy", "test_freq")] = Field(
        50, description="interval of evaluations in steps"
    )
    samples: Size = Field(1, description="responses per prompt")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: always the most likely token")


class RlConfig(TrainerConfig):
    """Settings of ``megascend rl``, from its YAML file."""

    rollout: Rollout = Field(description="sampling of responses")
    engines: tuple[str, ...] = Field(
        ("local",),
        min_length=1,
        description="; ".join(f"{form}: {entry.content}" for form, entry in INFERENCE_ENGINES.items()),
    )
    placement: PlacementSettings = PlacementSettings()
    vllm: Vllm = Vllm()
    objective: Objective = Field(Objective(), validate_default=True)  # for its length
    reference: ReferenceSettings | None = Field(
        None, description="reference model, and penalty on the KL divergence to it"
    )
    sync: Sync = Sync()
    teacher: TeacherSettings | None = Field(
        None, description="learn a teacher's distributions on the model's own responses, in place of rewards"
    )
    evaluation: Evaluation | None = Field(None, description="measure rewards on other prompts at intervals")

    counterparts = TrainerConfig.counterparts | {
        name: f"for megascend train only; {remedy}" for name, remedy in COUNTERPARTS.items()
    }
    rules = (
        *TrainerConfig.rules,
        MEASURED_BUDGET,
        Rule(
            "rollout.reward: rewards come from this function or from rollout.environment; set one of the two",
            lambda s: s.graders == 2 or (s.graders == 0 and s.learns_from_rewards),
        ),
        Rule(
            "rollout.prompts: only an environment may bring its own; name a file",
            lambda s: s.rollout.prompts is None and s.rollout.environment is None,
        ),
        Rule(
            "evaluation with nothing that gives rewards: it measures rewards; set rollout.reward or "
            "rollout.environment, or leave it out",
            lambda s: s.evaluation is not None and s.graders == 0,
        ),
        Rule(
            "teacher.loss with rollout.temperature={rollout.temperature:g} and top_k={rollout.top_k}: probabilities of all "
            "tokens at temperature 1 are compared; set 1, and leave top_k and top_p out",
            lambda s: (
                s.teacher is not None
                and (s.teacher.loss != "policy" or s.teacher.engine != TRAINER)
                and (s.rollout.temperature != 1 or s.rollout.top_k > 0)
            ),
        ),
        Rule(
            "objective.overlong_share with rollout.environment: it is a penalty on single responses, of which an "
            "episode has several; set 0",
            lambda s: s.objective.overlong_share > 0 and s.rollout.environment is not None,
        ),
        # Otherwise a run would report the penalty of each rollout and learn nothing from it.
        Rule(
            "reference.penalty with a teacher in place of rewards: a penalty on rewards has no effect; set loss",
            lambda s: (
                s.reference is not None
                and s.reference.penalty == "reward"
                and s.reference.coefficient > 0
                and not s.learns_from_rewards
            ),
        ),
        Rule(
            f"reference.model with lora: the reference of an adapter is the model without it; set {BASE}",
            lambda s: s.reference is not None and s.lora is not None and s.reference.model != BASE,
        ),
        Rule(
            "sync.sharded with lora: rank 0 merges the adapter and sends complete weights; leave it out",
            lambda s: s.lora is not None and s.sync.sharded is True,
        ),
        Rule(
            "sync.mode with lora: rank 0 merges the adapter and sends complete weights; leave it out",
            lambda s: s.lora is not None and s.sync.mode == "delta",
        ),
        Rule(
            "base_weights with megascend rl: engines sample from unquantised weights, whose probabilities differ; leave it out",
            lambda s: s.base_weights != "unquantised",
        ),
        Rule(
            "sync.every with rollout.max_lag={rollout.max_lag}: no sample would be new enough for the last steps "
            "before an update; set max_lag to sync.every - 1 or more",
            lambda s: s.sync.every > s.rollout.max_lag + 1,
        ),
        Rule(
            "rollout.router_replay with engines=local: they do not return the experts of each token; name vLLM "
            "servers started with --enable-return-routed-experts",
            lambda s: (
                s.rollout.router_replay
                and s.rollout.controller is None
                and not all(inference_engine(name).returns_experts for name in s.engines)
            ),
        ),
        Rule(
            "engines with rollout.controller: the controller brings the engines; leave it out",
            lambda s: s.rollout.controller is not None and s.engines != type(s).model_fields["engines"].default,
        ),
        # Only an address is one engine: each "local" is an engine of its own.
        Rule(
            "engines: an address is listed twice; list it once",
            lambda s: has_duplicates([name for name in s.engines if inference_engine(name).is_server]),
        ),
        Rule(
            "placement with no vllm among engines: it is of engines that the run starts; leave it out",
            lambda s: s.placement != PlacementSettings() and not s.started_engines,
        ),
        Rule(
            "placement.engines with another number of entries vllm of engines: it has the GPUs of each engine "
            "that the run starts; list as many",
            lambda s: s.placement.engines is not None and len(s.placement.engines) != len(s.started_engines),
        ),
    )

    @field_validator("objective")
    @classmethod
    def _length_of_the_longest_response(cls, objective: Objective, info: ValidationInfo) -> Objective:
        """Fill in the default of ``length``, which another section has."""
        rollout = info.data.get("rollout")  # missing if it is wrong itself
        if objective.length is not None or rollout is None:
            return objective
        return objective.model_copy(update={"length": rollout.max_tokens})

    @property
    def graders(self) -> int:
        """Return the number of settings that give rewards."""
        return (self.rollout.reward is not None) + (self.rollout.environment is not None)

    @property
    def teacher_engine(self) -> str:
        """Engine of the teacher; ``local`` also where the run needs none."""
        return LOCAL if self.teacher is None or self.teacher.engine == TRAINER else self.teacher.engine

    @property
    def learns_from_rewards(self) -> bool:
        """Check whether rewards enter the loss; with a teacher they may only be reported."""
        return self.teacher is None or self.teacher.rewards

    @property
    def drops_equal_groups(self) -> bool:
        """Check whether groups with equal rewards are dropped; by default where nothing is learned from them."""
        if self.rollout.drop_equal is not None:
            return self.rollout.drop_equal
        return not (self.objective.compares_groups or (self.teacher is not None and self.teacher.rewards))

    @property
    def replaced_settings(self) -> dict[str, Any]:
        """Return the settings of ``objective`` without effect: those of what is learned from rewards that a teacher replaces."""
        if self.learns_from_rewards:
            return {}
        names = ("advantages", "divide_by_std", "overlong_share")
        values = {name: getattr(self.objective, name) for name in names}
        return {name: value for name, value in values.items() if value != Objective.model_fields[name].default}

    @property
    def started_engines(self) -> tuple[int, ...]:
        """Indices of the engines that the run starts."""
        return tuple(index for index, name in enumerate(self.engines) if name == VLLM)

    @property
    def engine_names(self) -> tuple[str, ...]:
        """Names of the engines, for messages."""
        controller = self.rollout.controller
        return self.engines if controller is None else (f"those of the controller {controller}",)

    def data_paths(self) -> dict[str, Path | None]:
        """Return the data files that the run reads, by their setting."""
        prompts = self.evaluation.prompts if self.evaluation is not None else None
        reference = self.reference.model if self.reference is not None and self.reference.model != BASE else None
        paths = {"rollout.prompts": self.rollout.prompts, "evaluation.prompts": prompts}
        paths["teacher.model"] = None if self.teacher is None else self.teacher.model
        return paths | {"reference.model": None if reference is None else Path(reference)}


def load_rl_config(path: str | Path, overrides: list[str] | None = None) -> RlConfig:
    """Read a YAML run file of ``megascend rl`` and apply ``a.b=value`` overrides (values are YAML too).

    Relative paths are taken from the directory the command runs in.
    """
    return parsed(RlConfig, read_settings(path, overrides, RlConfig), path)
