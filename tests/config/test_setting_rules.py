"""Every rule of settings refuses a run file and accepts the one beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascend.config import RunConfig, load_config, read_settings
from megascend.config.rl import RlConfig, load_rl_config
from megascend.config.rules import Rule
from megascend.config.section import Section, all_rules
from megascend.config.serve import ServeConfig, load_serve_config
from megascend.engines.context import EngineSpec
from megascend.errors import ConfigError

Case = tuple[str, str, str]
"""Begin of the message, overrides that are refused, and overrides that are accepted. Overrides are separated by semicolons."""
TRAIN: list[Case] = [
    # optimizer
    ("optimizer.overlap_param_gather: true",
     "optimizer.overlap_param_gather=true", "optimizer.overlap_param_gather=true; optimizer.overlap_grad_reduce=true"),
    ("optimizer.groups", "optimizer.groups=[{match: a},{match: a}]", "optimizer.groups=[{match: a},{match: b}]"),
    ("optimizer.muon with kind=adamw", "optimizer.muon.steps=3", "optimizer.muon.steps=3; optimizer.kind=muon"),
    ("optimizer.moments: 8bit with kind=muon", "optimizer.moments=8bit; optimizer.kind=muon", "optimizer.moments=8bit"),
    ("optimizer.offload: true with kind=muon", "optimizer.offload=true; optimizer.kind=muon", "optimizer.offload=true"),
    ("optimizer.offload: 0.5 with", "optimizer.offload=0.5; optimizer.moments=8bit", "optimizer.offload=0.5"),
    *(
        (f"{key}: adapters are trained by AdamW", f"{section}.{setting}; lora.rank=4", accepted)
        for key, section, accepted in (
            ("optimizer with lora", "optimizer", "lora.rank=4; optimizer.lr=1"),
            ("lora.optimizer", "lora.optimizer", "lora.rank=4; lora.optimizer.lr=1"),
        )
        for setting in ("kind=muon", "groups=[{match: a}]", "moments=8bit", "offload=0.5")
    ),
    # schedule
    ("schedule.warmup_ratio: 0.1 with warmup_steps=3",
     "schedule.warmup_ratio=0.1; schedule.warmup_steps=3", "schedule.warmup_ratio=0.1"),
    ("schedule.power: 2 with kind=linear", "schedule.power=2; schedule.kind=linear", "schedule.kind=linear"),
    ("schedule.power: 2 with kind=wsd", "schedule.power=2; schedule.kind=wsd", "schedule.power=2; schedule.kind=polynomial"),
    ("schedule.decay_ratio: 0.3 with kind=constant", "schedule.decay_ratio=0.3", "schedule.decay_ratio=0.3; schedule.kind=wsd"),
    ("schedule.decay_shape: cosine with kind=cosine",
     "schedule.decay_shape=cosine; schedule.kind=cosine", "schedule.decay_shape=cosine; schedule.kind=wsd"),
    (
        "schedule.total_steps: 9 with a warm-up of 9 steps: it leaves none",
        "schedule.total_steps=9; schedule.warmup_steps=9; schedule.kind=cosine",
        "schedule.total_steps=9; schedule.warmup_steps=8; schedule.kind=cosine",
    ),
    (
        "schedule.total_steps: 10 with a warm-up of 5 steps and a decay of 6",
        "schedule={kind: wsd,warmup_ratio: 0.5,decay_ratio: 0.6,total_steps: 10}",
        "schedule={kind: wsd,warmup_ratio: 0.4,decay_ratio: 0.6,total_steps: 10}",
    ),
    ("schedule.min_lr: 2 with optimizer.lr=1",
     "schedule.min_lr=2; schedule.kind=cosine; optimizer.lr=1", "schedule.min_lr=1; schedule.kind=cosine; optimizer.lr=1"),
    *(
        (
            "lora with a schedule.min_lr above optimizer.lr",
            f"optimizer.lr=1; {lora}",
            "optimizer.lr=1; lora.optimizer.lr=2",
        )
        for lora in (
            "lora.schedule={kind: cosine,min_lr: 2}",
            "lora={optimizer: {lr: 1},schedule: {kind: cosine,min_lr: 2}}",
            "lora.optimizer.lr=0.1; schedule={kind: cosine,min_lr: 0.5}",
        )
    ),
    # experts, adapters
    ("moe.aux_loss_coefficient: 0.1 with aux_loss=none",
     "moe.aux_loss_coefficient=0.1", "moe.aux_loss_coefficient=0.1; moe.aux_loss=megatron"),
    ("moe.aux_loss: megatron with aux_loss_coefficient=0", "moe.aux_loss=megatron", "moe.aux_loss=none"),
    ("lora.targets: []", "lora.targets=[]", "lora.targets=[q_proj]"),
    ("lora.targets: q_proj, :", "lora.targets=[q_proj,'']", "lora.targets=all-linear"),
    ("base_weights: nf4 with no lora", "base_weights=nf4", "base_weights=nf4; lora.rank=4"),
    # run
    ("generation.prompts: one, one", "generation.prompts=[one,one]", "generation.prompts=[one,two]"),
    (
        "generation.chat: false with a prompt that is a conversation",
        "generation.prompts=[[{role: user,content: one}]]; generation.chat=false",
        "generation.prompts=[[{role: user,content: one}],two]",
    ),
    ("trackers: wandb, wandb", "trackers=[wandb,wandb]", "trackers=[wandb,tensorboard]"),
    ("trackers: wandb, {'wandb': {}}", "trackers=[wandb,{wandb: {}}]", "trackers=[{wandb: {}}]"),
    ("push with export=false", "push.repository=me/model; export=false", "push.repository=me/model"),
    ("steps: 5 with epochs=2.0", "steps=5; epochs=2", "epochs=2"),
    ("steps: 0 with epochs=None", "steps=0", "steps=5"),
    # losses
    ("loss: null with ['dpo', 'kto']", "dpo.beta=1; kto.beta=1", "dpo.beta=1"),
    ("loss: cross_entropy with ['dpo']", "loss=cross_entropy; dpo.beta=1", "loss=cross_entropy"),
    ("loss_settings with a loss that has a section", "loss_settings.a=1", "loss_settings.a=1; loss=json:loads"),
    ("loss_settings with a loss that has a section", "loss_settings.a=1; dpo.beta=1", "dpo.beta=1"),
    ("generation with bradley_terry or classification", "generation.prompts=[one]; classification={}", "classification={}"),
    ("generation with bradley_terry", "generation.prompts=[one]; bradley_terry={}", "generation.prompts=[one]; dpo={}"),
    ("validation.tasks with bradley_terry", "validation.tasks.names=[t]; bradley_terry={}", "validation.tasks.names=[t]"),
    ("data.train_on_prompt: true with classification",
     "data.train_on_prompt=true; classification={}", "data.train_on_prompt=true"),
    ("classification.num_labels: 3 with labels",
     "classification={labels: [a,b],num_labels: 3}", "classification={labels: [a,b],num_labels: 2}"),
    ("classification.labels: a, b, a", "classification.labels=[a,b,a]", "classification.labels=[a,b]"),
    ("classification.problem_type: single_label_classification with one label",
     "classification.num_labels=1", "classification={num_labels: 1,problem_type: regression}"),
    # data
    ("data.columns: {'txt': 'body'} names a column", "data.columns={txt: body}", "data.columns={text: body}"),
    ("data.sources.0.columns: {'txt': 'body'} names a column",
     "data={sources: [{path: a.jsonl,columns: {txt: body}}]}", "data={sources: [{path: a.jsonl,columns: {text: body}}]}"),
    ("data.columns: one column of the data has two names",
     "data.columns={prompt: x,completion: x}", "data.columns={prompt: x,completion: y}"),
    ("data.split: '': it names none", "data.split=''", "data.split=test"),
    ("data.path: null: the data", "data.path=null", "data={sources: [{path: a.jsonl}]}"),
    ("data.path: d.jsonl: the data", "data.sources=[{path: a.jsonl}]", "data.split=all"),
    (
        "data.sources: some have a weight",
        "data={sources: [{path: a.jsonl,weight: 2},{path: b.jsonl}]}",
        "data={sources: [{path: a.jsonl,weight: 2},{path: b.jsonl,weight: 1}]}",
    ),
    ("data.shuffle_buffer: 5 with streaming=false", "data.shuffle_buffer=5", "data.shuffle_buffer=1000"),
    ("data.max_bad_records: 5 with streaming=false",
     "data.max_bad_records=5", "data={path: d,streaming: true,on_too_long: skip,max_bad_records: 5}"),
    ("data.streaming: true with prepared",
     "data={path: d,streaming: true,on_too_long: skip,prepared: p}", "data={path: d,streaming: true,on_too_long: skip}"),
    (
        "data.streaming: true with sources with no weights",
        "data={streaming: true,on_too_long: skip,sources: [{path: a},{path: b}]}",
        "data={streaming: true,on_too_long: skip,sources: [{path: a,weight: 1},{path: b,weight: 1}]}",
    ),
    ("data.on_too_long: error with streaming", "data.streaming=true", "data.streaming=true; data.on_too_long=truncate"),
    *(
        (message, f"data.streaming=true; data.on_too_long=skip; {overrides}", overrides)
        for message, overrides in (
            ("epochs: 2 with data.streaming", "epochs=2"),
            ("validation.fraction: 0.1 with data.streaming", "validation.fraction=0.1"),
            ("batching.micro_batch_tokens: auto with data.streaming", "batching.micro_batch_tokens=auto"),
            ("data.streaming: true with dpo or kto", "dpo={}"),
            ("data.streaming: true with dpo or kto", "kto={}"),
        )
    ),
    # validation
    ("validation.min_delta: 0.1 with no patience",
     "validation={path: v,min_delta: 0.1}", "validation={path: v,min_delta: 0.1,patience: 2}"),
    ("validation.split: '': it names none", "validation.split=''", "validation.split=test"),
    ("validation.fraction: 0.1 with path or split", "validation={path: v,fraction: 0.1}", "validation={fraction: 0.1}"),
    ("validation.fraction: 0.1 with path or split", "validation={split: v,fraction: 0.1}", "validation={split: v,path: p}"),
    ("validation.path: null with no split", "validation={every: 5}", "validation={tasks: {names: [t]}}"),
    ("validation.metric: loss with no held-out samples",
     "validation={tasks: {names: [t]},keep_best: true}", "validation={tasks: {names: [t]},keep_best: true,metric: t/acc}"),
    (
        "validation.metric: accuracy with no held-out samples",
        "validation={tasks: {names: [t]},metric: accuracy}; classification={}",
        "validation={path: v,metric: accuracy}; classification={}",
    ),
    ("validation.metric: t/acc with no tasks",
     "validation={path: v,metric: t/acc}", "validation={path: v,metric: t/acc,tasks: {names: [t]}}"),
    ("validation.metric: acc: it names no task",
     "validation={tasks: {names: [t]},metric: acc}", "validation={tasks: {names: [t]},metric: t/acc}"),
    ("validation.metric: accuracy with no classification",
     "validation={path: v,metric: accuracy}", "validation={path: v,metric: loss}"),
    (
        "validation.metric: exact_match with single_label",
        "validation={path: v,metric: exact_match}; classification={}",
        "validation={path: v,metric: exact_match}; classification.problem_type=multi_label_classification",
    ),
]  # fmt: skip
GRADED_BY_TEACHER = "teacher={model: t}"
RL: list[Case] = [
    ("rollout.top_p: 0.5 with top_k=0", "rollout.top_p=0.5", "rollout.top_p=0.5; rollout.top_k=9"),
    ("rollout.reward: m:f: rewards come from", "rollout.environment.name=m:E", "rollout.temperature=2"),
    ("rollout.reward: null: rewards come from", "rollout={prompts: p}", f"rollout={{prompts: p}}; {GRADED_BY_TEACHER}"),
    ("rollout.prompts: null", "rollout={reward: m:f}", "rollout={environment: {name: m:E}}"),
    ("evaluation with nothing that gives rewards",
     f"rollout={{prompts: p}}; {GRADED_BY_TEACHER}; evaluation.prompts=e", "evaluation.prompts=e"),
    ("rollout.router_replay: true with engines=local",
     "rollout.router_replay=true", "rollout.router_replay=true; engines=[http://host:8000]"),
    ("objective.correction: truncated with clip_low",
     "objective.clip_high=0.28", "objective.clip_high=0.28; objective.correction=none"),
    (
        "objective.correction: truncated with clip_low",
        "objective.preset=rloo; objective.dual_clip=3",
        "objective.preset=dapo; objective.correction=truncated",  # a preset's ranges are those of its loss
    ),
    ("objective.correction: truncated with loss_settings",
     "objective={loss: dro,loss_settings: {beta: 0.1}}", "objective={loss: dro,loss_settings: {beta: 0.1},correction: none}"),
    (
        "objective.overlong_share: 0.2 with rollout.environment",
        "objective.preset=dapo; rollout={prompts: p,environment: {name: m:E}}",
        "objective={preset: dapo,overlong_share: 0}; rollout={prompts: p,environment: {name: m:E}}",
    ),
    ("reference.estimator: k1 with penalty=loss", "reference.estimator=k1", "reference={estimator: k1,penalty: reward}"),
    *(
        (
            "reference.penalty: reward with a teacher in place of rewards",
            f"teacher={{model: t,loss: {loss}}}; reference={{penalty: reward,coefficient: 0.1}}",
            f"teacher={{model: t,{accepted}}}",
        )
        for loss, accepted in (
            ("policy", "rewards: true}; reference={penalty: reward"),
            ("forward_kl", "loss: forward_kl}; reference={penalty: loss"),
            ("policy", "loss: policy}; reference={penalty: reward,coefficient: 0"),
        )
    ),
    ("reference.model: other with lora", "reference.model=other; lora.rank=4", "reference.model=base; lora.rank=4"),
    ("sync.sharded: true with lora", "sync.sharded=true; lora.rank=4", "sync.sharded=false; lora.rank=4"),
    ("sync.mode: delta with lora", "sync.mode=delta; lora.rank=4", "sync.mode=auto; lora.rank=4"),
    ("sync.every: 3 with rollout.max_lag=1", "sync.every=3", "sync.every=3; rollout.max_lag=2"),
    ("base_weights: fp8 with megascend rl", "base_weights=fp8; lora.rank=4", "lora.rank=4"),
    ("batching.micro_batch_tokens: auto: only run files of `megascend train`",
     "batching.micro_batch_tokens=auto", "batching.micro_batch_tokens=512"),
    ("teacher.model: null with engine=local", "teacher.coefficient=1", GRADED_BY_TEACHER),
    ("teacher.model: t with engine=http://h:1", "teacher={engine: 'http://h:1',model: t}", "teacher={engine: 'http://h:1'}"),
    ("teacher.engine: ftp://h: it is neither", "teacher.engine=ftp://h", "teacher.engine=sglang:http://h:1"),
    ("teacher.top: 5 with engine=trainer", "teacher={engine: trainer,model: t,top: 5}", "teacher={model: t,top: 5}"),
    ("teacher.rewards: true with loss=jsd", "teacher={model: t,rewards: true,loss: jsd}", "teacher={model: t,rewards: true}"),
    *(
        (
            f"teacher.loss: {loss} with rollout.temperature={temperature} and top_k={top_k}",
            f"teacher={{model: t,engine: {engine},loss: {loss}}}; rollout.temperature={temperature}; rollout.top_k={top_k}",
            f"teacher={{model: t,engine: trainer}}; rollout.temperature={temperature}; rollout.top_k={top_k}",
        )
        for loss, engine, temperature, top_k in (
            ("policy", "local", "0.7", 0),
            ("policy", "local", "1", 9),
            ("jsd", "trainer", "0.7", 0),
        )
    ),
    ("engines: http://a:1 with rollout.controller", "rollout.controller=h:1; engines=[http://a:1]", "rollout.controller=h:1"),
    ("engines: http://a:1, http://a:1", "engines=[http://a:1,http://a:1]", "engines=[vllm,vllm,local,local]"),
    ("placement with no vllm among engines", "placement.memory=0.5", "placement.memory=0.5; engines=[vllm]"),
    ("placement.engines: (1,) with another number",
     "placement.engines=[[1]]; engines=[vllm,vllm]", "placement.engines=[[1],[2,3]]; engines=[vllm,http://a:1,vllm]"),
]  # fmt: skip
SERVE: list[Case] = [
    ("tls_key: k.pem with no tls_certificate", "tls_key=k.pem", "tls_key=k.pem; tls_certificate=c.pem"),
    ("limits.body_bytes: 134217729 with durable",
     "limits.body_bytes=134217729; durable=true", "limits.body_bytes=134217728; durable=true"),
]  # fmt: skip
ENGINE: list[Case] = [
    ("optimizer with adapters", "adapters.max_rank=4; optimizer.kind=muon", "adapters.max_rank=4"),
    ("batching.micro_batch_tokens: auto", "batching.micro_batch_tokens=auto", "batching.micro_batch_tokens=512"),
]  # fmt: skip


def engine_spec(path: Path, overrides: list[str]) -> EngineSpec:
    return EngineSpec(**read_settings(path, overrides, EngineSpec))


Load = Callable[[Path, list[str]], Section]
TABLES: dict[type[Section], tuple[Load, str, list[Case]]] = {
    RunConfig: (load_config, "model: m\noutput: o\ndata: {path: d.jsonl}\n", TRAIN),
    RlConfig: (load_rl_config, "model: m\noutput: o\nsteps: 1\nrollout: {prompts: p, reward: 'm:f'}\n", RL),
    ServeConfig: (lambda path, overrides: load_serve_config(path, {}, overrides), "model: m\n", SERVE),
    EngineSpec: (engine_spec, "model: m\n", ENGINE),
}


def loaded(kind: type[Section], overrides: str, tmp_path: Path) -> Section:
    load, text, _ = TABLES[kind]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides.split("; "))


@pytest.mark.parametrize(
    ("kind", "message", "refused", "accepted"),
    [
        pytest.param(kind, *case, id=f"{kind.__name__}: {case[0]}")
        for kind, (*_, cases) in TABLES.items()
        for case in cases
    ],
)
def test_rule_refuses_settings_and_accepts_those_beside_them(
    kind: type[Section], message: str, refused: str, accepted: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(kind, refused, tmp_path)
    text = str(raised.value).removeprefix(f"{tmp_path / 'run.yaml'}: ").removeprefix("EngineSpec: ")
    assert text.startswith(message)
    assert len(text) <= 160
    loaded(kind, accepted, tmp_path)


def test_every_rule_has_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Rule[Any]] = []
    message = Rule.message
    monkeypatch.setattr(Rule, "message", lambda rule, subject: refusals.append(rule) or message(rule, subject))
    for kind, (*_, cases) in TABLES.items():
        for _, refused, _ in cases:
            with pytest.raises(ConfigError):
                loaded(kind, refused, tmp_path)
    rules = [(prefix + rule.text, rule) for kind in TABLES for prefix, rule in all_rules(kind)]
    assert [setting for setting, rule in rules if rule not in refusals] == []
