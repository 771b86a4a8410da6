"""Upstream faults on every platform: megascend's workaround is correct, and still needed.

Each test compares with the independent Hugging Face reference (or with a correct layout), then disables the workaround and
expects the fault to return: once upstream fixes a fault, the second half fails. Tests with such a half are nightly; the parity
matrix covers the first halves on every change.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from megascend import Adam, Batching, Parallel, Recompute, Sample
from megascend.errors import ConfigError, DistributedTestError, TopologyError
from megascend.models.checkpoint_files.info import shape_of
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed, tiny_config
from megascend.testing.parity import (
    Case,
    Differences,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support import gradients
from support.stacks import MEGATRON_CORE, first_stack_required

pytestmark = pytest.mark.usefixtures("megatron_imported")
STACK_0_18, STACK_0_19 = (Version(minor) <= MEGATRON_CORE for minor in ("0.18", "0.19"))
WHOLE_BATCH = 4096  # tokens: one micro batch
MOE_SHAPE = shape_of(tiny_config("qwen3_moe"))


def compare(case: Case, parity_folder: Path, steps: int = 10, lengths: tuple[int, ...] | None = None) -> Differences:
    """Compare ``case`` with the reference over ``steps`` steps."""
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    tokens = token_lists(lengths=lengths) if lengths else token_lists()
    reference = hf_reference(
        parity_folder, checkpoint, tokens, steps=steps, aux_loss=case.aux_loss, aux_formula=case.aux_formula
    )
    return differences(train_case(case, checkpoint, tokens, steps=steps), reference)


def assert_equal(actual: Differences, case: Case) -> None:
    assert actual.loss <= case.loss_bound, actual
    assert actual.grad_norm <= case.norm_bound, actual


def build(checkpoint, parallel: Parallel | None = None, **options):
    from megascend.backends import MegatronBackend

    settings = {"precision": "fp32", "batching": Batching(micro_batch_tokens=64), "timeout_s": 60} | options
    return MegatronBackend(model=checkpoint, parallel=parallel, **settings)


# --- 1: the gradient norm under tensor parallelism ---


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_1_norm_includes_every_shard_of_embedding_and_output(parity_folder, monkeypatch, tied):
    case = Case("TP2", 2, Parallel(tensor=2), overrides={"tie_word_embeddings": tied})
    assert_equal(compare(case, parity_folder, steps=3), case)
    monkeypatch.setattr("megascend.engines.megatron.build.mark_tensor_parallel", lambda chunk: None)
    actual = compare(case, parity_folder, steps=3)
    if STACK_0_19:
        assert_equal(actual, case)
    else:
        assert actual.loss < 1e-2  # the loss hides it: only clipping tells
        assert actual.grad_norm > 1e-1


DIVIDED_EXPERTS = {"world_size": 2, "parallel": Parallel(tensor=2, expert=2, expert_tensor=1)}


@pytest.mark.nightly
def test_1_norm_includes_every_shard_of_attention_sinks(parity_folder, monkeypatch):
    """Show that megatron-core (issue 7452, finding 8) leaves the sinks of all ranks but the first out of the norm."""
    from megascend.engines.megatron import build as module

    case, marked = Case("sinks", arch="gpt_oss", **DIVIDED_EXPERTS), module.mark_tensor_parallel
    assert gradients.compare(case, parity_folder) == {}

    def without_sinks(chunk):
        marked(chunk)
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.tensor_model_parallel = False

    monkeypatch.setattr(module, "mark_tensor_parallel", without_sinks)
    wrong = gradients.compare(case, parity_folder)
    assert {name.partition(": ")[2] for name in wrong} == {"norm"}  # every gradient is correct


def test_1_norm_counts_replicas_of_duplicated_layers_once(parity_folder, monkeypatch):
    """Show that Transformer Engine marks replicas of latent attention's down projections as shards: each counts twice.

    Megatron-Core marks them as replicas again from 0.18 on.
    """
    from megascend.engines.megatron import build as module

    case, marked = Case("replicas", arch="deepseek_v3", **DIVIDED_EXPERTS), module.mark_tensor_parallel
    assert gradients.compare(case, parity_folder) == {}

    def as_transformer_engine(chunk):
        replicas = [p for name, p in chunk.named_parameters() if "_down_proj." in name]
        assert replicas
        assert {parameter.tensor_model_parallel for parameter in replicas} == {not STACK_0_18}
        marked(chunk)
        for parameter in replicas:
            parameter.tensor_model_parallel = True

    monkeypatch.setattr(module, "mark_tensor_parallel", as_transformer_engine)
    wrong = gradients.compare(case, parity_folder)
    assert {name.partition(": ")[2] for name in wrong} == {"norm"}  # every gradient is correct


@first_stack_required
@pytest.mark.parametrize(
    ("sequence", "weight"),
    [(False, "linear_attn.norm.weight"), (True, "input_layernorm.weight")],
    ids=["TP2", "TP2 + SP"],
)
@pytest.mark.nightly_cases("TP2")  # covered: TP2 + SP; models/test_qwen_hybrid.py
def test_1_gradients_of_linear_attention_norms_are_summed_once(parity_folder, monkeypatch, sequence, weight):
    """Show that mcore-bridge's layer never sums its output norm's gradient without SP, and doubles its input norm's with SP."""
    from mcore_bridge.model.gpts.qwen3_next_gdn import Qwen3NextLoader
    from mcore_bridge.model.modules import GatedDeltaNet

    from megascend.models.families import qwen_hybrid_megatron

    case = Case("linear attention", 2, Parallel(tensor=2, sequence=sequence), arch="qwen3_5_text")
    assert Qwen3NextLoader.gated_delta_net is qwen_hybrid_megatron.TensorParallelGatedDeltaNet
    assert gradients.compare(case, parity_folder) == {}
    monkeypatch.setattr(Qwen3NextLoader, "gated_delta_net", GatedDeltaNet)
    wrong = {name.partition(": ")[2] for name in gradients.compare(case, parity_folder)}
    linear_layers = {f"model.layers.{layer}.{weight}" for layer in range(3)}
    assert linear_layers <= wrong <= {*linear_layers, "norm"}


@first_stack_required
def test_1_decays_of_linear_attention_are_exponentials_of_fp32(parity_folder, monkeypatch):
    """Show that mcore-bridge's layer computes the exponentials of ``A_log`` in 16 bits."""
    from mcore_bridge.model.gpts.qwen3_next_gdn import Qwen3NextLoader
    from mcore_bridge.model.modules import GatedDeltaNet

    from megascend.models.families import qwen_hybrid_megatron

    # Imported before ranks are forked: it would replace the layer there.
    assert Qwen3NextLoader.gated_delta_net is qwen_hybrid_megatron.TensorParallelGatedDeltaNet
    assert decay_error(parity_folder) <= 1e-6
    monkeypatch.setattr(Qwen3NextLoader, "gated_delta_net", GatedDeltaNet)
    assert decay_error(parity_folder) > 1e-3


def decay_error(parity_folder: Path) -> float:
    """Return the largest relative error of decays in the first layer of a tiny model in bf16."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_5_text")

    def decays() -> tuple[torch.Tensor, torch.Tensor]:
        from mcore_bridge.model.modules import gated_delta_net

        compute, logarithms = gated_delta_net.chunk_gated_delta_rule, []

        def watched(*args, g, **options):
            logarithms.append(g.detach())
            return compute(*args, g=g, **options)

        gated_delta_net.chunk_gated_delta_rule = watched
        with build(checkpoint, precision="bf16") as backend:
            layer = backend.engine.bare_chunks[0].decoder.layers[0].self_attention
            with torch.no_grad():
                # The last rows of a key head are the decays' of its two value heads: softplus(0) is all that is left of them.
                layer.in_proj.weight.unflatten(0, (2, -1))[:, -2:].zero_()
                layer.dt_bias.zero_()
            assert layer.A_log.dtype == torch.bfloat16
            backend.forward_backward([Sample.causal([5, 6, 7, 8])])
            assert layer.A_log.main_grad.any()
            return logarithms[0].double(), layer.A_log.detach().double()

    ((actual, a_log),) = run_distributed(decays, 1, init=False)
    expected = -a_log.exp() * torch.tensor(2.0, dtype=torch.float64).log()
    return float((actual / expected - 1).abs().max())


# --- 2: experts under TP without EP and ETP ---


@pytest.mark.nightly
def test_2_replicated_experts_under_tp_raise_topology_error(parity_folder, monkeypatch):
    parallel = Parallel(tensor=2, expert=1, expert_tensor=1)
    case = Case("MoE TP2 EP1 ETP1", 2, parallel, arch="qwen3_moe")
    with pytest.raises(
        TopologyError, match=r"expert_tensor=1 differs from parallel\.tensor=2 while parallel\.expert=1"
    ):
        plan(parallel, 2, MOE_SHAPE)
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")

    def on_rank():
        with pytest.raises(TopologyError, match="set expert_tensor to 2"):
            build(checkpoint, parallel)

    run_distributed(on_rank, 2, init=False)
    monkeypatch.setattr("megascend.runtime.topology.topology.check_grid", lambda *args: None)
    actual = compare(case, parity_folder)
    if STACK_0_19:
        assert_equal(actual, case)
    else:
        assert actual.loss > 1e-2
        assert actual.grad_norm > 1e-2


# --- 3: interleaved pipeline without overlapped point-to-point communication ---


@pytest.mark.nightly
def test_3_interleaved_pipelines_overlap_their_messages(parity_folder, monkeypatch):
    from megascend.engines.megatron import build as module

    case = Case("PP2 x VPP2", 2, Parallel(pipeline=2, virtual_pipeline=2), loss_bound=3e-5)
    lengths = (33,) * 8  # micro batches of one length: with several, messages of the wrong length would give it away
    assert_equal(compare(case, parity_folder, steps=3, lengths=lengths), case)
    upstream = module.parallel_arguments
    monkeypatch.setattr(module, "parallel_arguments", lambda topology: upstream(topology) | {"overlap_p2p_comm": False})
    actual = compare(case, parity_folder, steps=3, lengths=lengths)
    assert actual.grad_norm > 1e-2, actual


# --- 4: the auxiliary loss of the router ---


# --- 5: sequence parallelism, recomputation and both dropouts ---


def with_dropout(monkeypatch, hidden: float, attention: float, check: bool = True) -> None:
    """Let mcore-bridge read these probabilities from any checkpoint."""
    from megascend.engines.megatron import build as module
    from megascend.engines.megatron import configuration

    upstream = module.hf_to_mcore_config
    changed = {"hidden_dropout": hidden, "attention_dropout": attention}
    monkeypatch.setattr(module, "hf_to_mcore_config", lambda config: upstream(config) | changed)
    if not check:
        monkeypatch.setattr(configuration, "MEGATRON_MODEL", ())


def dropout_norm(checkpoint, parallel: Parallel, recompute: Recompute) -> float:
    """Return the gradient norm of one step; a seed fixes the masks of the forward pass under any recomputation."""

    def on_rank():
        backend = build(checkpoint, parallel, recompute=recompute)
        backend.forward_backward(causal_samples(token_lists()))
        return backend.optimizer_step().grad_norm

    return run_distributed(on_rank, parallel.tensor, init=False)[0]


SP2, FULL, NONE = Parallel(tensor=2, sequence=True), Recompute(granularity="full"), Recompute()


def test_5_dropouts_with_recompute_and_sequence_parallelism_raise(parity_folder, monkeypatch):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with_dropout(monkeypatch, 0.1, 0.1)

    def on_rank():
        for recompute in (FULL, Recompute(granularity="selective")):
            with pytest.raises(ConfigError, match=r"recompute\.granularity: .+ with sequence parallelism and dropout"):
                build(checkpoint, SP2, recompute=recompute)

    run_distributed(on_rank, 2, init=False)


@pytest.mark.parametrize(
    ("parallel", "hidden", "attention", "recompute"),
    [
        (SP2, 0.1, 0.1, NONE),
        (SP2, 0.1, 0.0, FULL),
        (SP2, 0.0, 0.1, FULL),
        (Parallel(tensor=2), 0.1, 0.1, FULL),
        (Parallel(), 0.1, 0.1, FULL),
    ],
)
def test_5_suggested_settings_recompute_the_same_masks(
    parity_folder, monkeypatch, parallel, hidden, attention, recompute
):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with_dropout(monkeypatch, hidden, attention)
    expected = dropout_norm(checkpoint, parallel, NONE)
    assert dropout_norm(checkpoint, parallel, recompute) == pytest.approx(expected, rel=1e-5)


# --- 6: transformers' table of RoPE initialisers ---


def hugging_face_after_ours(checkpoint: Path, tokens: list[list[int]]) -> tuple[set[str], float]:
    """Return the changed entries of transformers' table, and the logits' difference of a Hugging Face model created later."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    before = dict(ROPE_INIT_FUNCTIONS)
    backend = build(checkpoint)
    changed = {n for n in before.keys() | ROPE_INIT_FUNCTIONS.keys() if before.get(n) is not ROPE_INIT_FUNCTIONS.get(n)}
    logits = backend.forward(causal_samples(tokens), logits=True).logits
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids[:-1]])).logits[0] for ids in tokens]
    return changed, max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_6_hugging_face_models_created_later_are_correct(parity_folder, arch):
    [(changed, difference)] = run_distributed(
        hugging_face_after_ours, 1, case_checkpoint(parity_folder, arch), token_lists()[:3], init=False
    )
    assert changed == set()
    assert difference <= 1e-5


# --- 7: the allgather token dispatcher ---
def test_7_experts_use_the_variable_length_dispatcher(parity_folder, monkeypatch):
    from megascend.engines.megatron import build as module

    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")

    def on_rank():
        config = build(checkpoint, Parallel(expert=2)).engine.config
        return config.moe_token_dispatcher_type, config.variable_seq_lengths

    assert run_distributed(on_rank, 2, init=False) == [("alltoall", True)] * 2
    upstream = module.parallel_arguments
    changed = {"moe_token_dispatcher_type": "allgather"}
    monkeypatch.setattr(module, "parallel_arguments", lambda topology: upstream(topology) | changed)
    with pytest.raises(DistributedTestError, match="dispatcher"):
        run_distributed(on_rank, 2, init=False)


# --- 8 (dist_checkpointing's multiprocessing manager) belongs to the tests of sharded checkpoints ---


# --- 9: packed sequences and context parallelism on mcore-bridge 1.4.3 ---


# --- 10: what peers got wrong ---


def test_10_defaults_train_on_one_process_without_a_launcher(parity_folder, monkeypatch):
    """Train all parameters with the distributed optimizer in bf16 without launcher variables, on which other libraries crash."""
    from megascend.testing._rank import STORE_VARIABLE

    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank():
        import os

        from megascend.backends import MegatronBackend

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", STORE_VARIABLE):
            os.environ.pop(name, None)
        backend = MegatronBackend(checkpoint, optimizer=Adam(lr=5e-3))
        assert backend.engine.adam.distributed
        losses = []
        for _ in range(3):
            losses.append(backend.forward_backward([Sample.causal(ids) for ids in token_lists()]).loss)
            assert not backend.optimizer_step().skipped
        return losses

    [losses] = run_distributed(on_rank, 1, init=False)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.difference  # differs: _reduce, which 0.19 has mended
@pytest.mark.nightly
def test_gradients_of_several_samples_in_a_batch_are_reduced_over_tensor_parallel_ranks(parity_folder, monkeypatch):
    """Show that ``_reduce`` before 0.19 skips non-contiguous tensors: the loss is correct, the gradients are wrong."""
    from megascend.runtime.bootstrap import patches

    case = Case("TP2, padded", 2, Parallel(tensor=2), packing=False, micro_batch_tokens=WHOLE_BATCH)
    assert_equal(compare(case, parity_folder, steps=3), case)

    def upstreams(input_, group):
        if group.size() > 1:
            torch.distributed.all_reduce(input_.contiguous(), group=group)
        return input_

    source = inspect.getsource(upstreams_module := importlib.import_module(patches.MAPPINGS))
    wrong = "all_reduce(input_.contiguous(), group=group)\n\n    return input_" in source
    assert wrong != STACK_0_19
    if not wrong:
        return
    monkeypatch.setattr(upstreams_module, "_reduce", upstreams)
    actual = compare(case, parity_folder, steps=1)
    assert actual.loss <= case.loss_bound
    assert actual.grad_norm > 1.0, "upstream has fixed _reduce: drop megascend.runtime.bootstrap.patches.reduce"


@pytest.mark.difference_cases("glm4")  # differs: mended in 0.18
@pytest.mark.parametrize("arch", ["glm4", pytest.param("ernie4_5", marks=pytest.mark.nightly)])
def test_packed_samples_with_interleaved_rotary_embeddings_are_not_rotated_by_the_fused_kernel(
    parity_folder, monkeypatch, arch
):
    """Show that Megatron-Core's fused rotary embedding of packed samples ignores ``rotary_interleaved`` before 0.18."""
    from megascend.engines.megatron import build as module

    case = Case("packed", arch=arch)
    assert_equal(compare(case, parity_folder, steps=1), case)
    interleaved, settings = {"rotary_interleaved": True}, module.precision_arguments
    assert module.fuses_rotary({})
    assert not module.fuses_rotary(interleaved)
    monkeypatch.setattr(module, "precision_arguments", lambda p: settings(p) | {"apply_rope_fusion": True})
    padded = Case("padded", arch=arch, packing=False, micro_batch_tokens=200)
    assert_equal(compare(padded, parity_folder, steps=1), padded)
    fused = compare(case, parity_folder, steps=1)
    if STACK_0_18:
        assert_equal(fused, case)
    else:
        assert fused.logits is not None
        assert fused.logits > 1.0


@pytest.mark.difference  # differs: norm of uncompressed queries, added in 0.19
@pytest.mark.nightly
def test_queries_that_are_not_compressed_have_no_norm(parity_folder, monkeypatch):
    """Show that megatron-core 0.19 adds a norm to them, for which no checkpoint has a weight."""
    case = Case("queries", arch="deepseek_v3", overrides={"q_lora_rank": None})
    assert_equal(compare(case, parity_folder, steps=1), case)
    if not STACK_0_19:
        return
    resolver = importlib.import_module("megatron.core.transformer.mla_qk_norm_config").QKNormConfigResolver
    monkeypatch.setattr(resolver, "_resolve_mla_qk_layernorm", resolver._resolve_mla_qk_layernorm.__wrapped__)
    with pytest.raises(DistributedTestError, match=r"no tensor for .*\.linear_q_proj\.layer_norm_weight"):
        compare(case, parity_folder, steps=1)
