"""Updates that merging adds to the weights of a Hugging Face checkpoint."""

import pytest
import torch

from megascend.config import Lora
from megascend.training.lora.factors import Factors, UnshardedAdapter, delta_for, merged

LORA = Lora(rank=2, alpha=6.0)


def dense(out, columns):
    return Factors(torch.randn(2, columns), torch.randn(out, 2))


FACTORS = {
    "model.layers.1.self_attn.q_proj": dense(4, 3),
    "model.embed_tokens": dense(3, 5),
    "model.layers.1.mlp.experts.gate_up_proj": Factors(torch.randn(12, 2, 3), torch.randn(12, 8, 2)),
    "model.layers.1.mlp.experts.down_proj": Factors(torch.randn(12, 2, 4), torch.randn(12, 3, 2)),
}


def by_hand(name, expert=None):
    factors = FACTORS[name]
    a, b = (factors.a, factors.b) if expert is None else (factors.a[expert], factors.b[expert])
    return 3.0 * torch.einsum("...or,...ri->...oi", b, a)


def test_deltas_find_their_weights():
    experts = "model.layers.1.mlp.experts"
    fused, eleventh = by_hand(f"{experts}.gate_up_proj"), by_hand(f"{experts}.gate_up_proj", 11)
    expected = {
        "model.layers.1.self_attn.q_proj.weight": by_hand("model.layers.1.self_attn.q_proj"),
        "model.embed_tokens.weight": by_hand("model.embed_tokens").T,
        f"{experts}.gate_up_proj": fused,
        f"{experts}.11.gate_proj.weight": eleventh[:4],
        f"{experts}.11.up_proj.weight": eleventh[4:],
        f"{experts}.11.gate_up_proj.weight": eleventh,
        f"{experts}.down_proj": by_hand(f"{experts}.down_proj"),
        f"{experts}.1.down_proj.weight": by_hand(f"{experts}.down_proj", 1),
    }
    for name, delta in expected.items():
        torch.testing.assert_close(delta_for(name, LORA, FACTORS), delta)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.11.self_attn.q_proj.weight",
        "layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_expert.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_other_weights_stay_the_very_same_tensor(name):
    weight = torch.randn(4, 3)
    assert merged(UnshardedAdapter(LORA, FACTORS))(name, weight) is weight


def test_sums_are_formed_in_float32():
    weight = torch.randn(4, 3).bfloat16()
    result = merged(UnshardedAdapter(LORA, FACTORS))("model.layers.1.self_attn.q_proj.weight", weight)
    assert result.dtype == torch.bfloat16
    exact = weight.float() + by_hand("model.layers.1.self_attn.q_proj")
    assert bool(((result.float() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()), "rounded once"
    assert merged(None) is None


def test_experts_that_are_stored_the_other_way_round_get_the_transposed_product():
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = torch.randn(12, 3, 8)
    torch.testing.assert_close(merged(UnshardedAdapter(LORA, FACTORS), {name})(name, weight), weight + by_hand(name).mT)
