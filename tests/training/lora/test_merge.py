"""Updates that merging adds to the weights of a Hugging Face checkpoint."""

import torch

from megascend.config import Lora
from megascend.training.lora.factors import Factors, UnshardedAdapter, merged

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
