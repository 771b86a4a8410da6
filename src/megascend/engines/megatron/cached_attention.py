"""KV cache in Megatron's attention.

A micro batch of new tokens runs as one sequence [n, 1], with rotary angles of each token's own position and attention within each
token's row. All other layers treat tokens independently, so that sequence parallelism, experts, pipeline stages and adapters of
several tenants work as in training. Megatron's static inference context has one position for all rows of a batch, which must then
be of one length, and its dynamic one needs flash attention's paged kernels.

Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches a token's normalised latent and the rotated part that its
heads' keys share: kv_lora_rank + qk_rope_head_dim numbers a layer and token, on every tensor parallel rank. In decoding the
projection from the latent to keys is applied to the query, and that to values to the mean of the latents, so that the latents of
earlier tokens are never expanded: softmax(q W_k c) (W_v c) = W_v softmax((q W_k) c) c.

Linear attention (mcore-bridge's GatedDeltaNet) caches the states of
:class:`megascend.engines.common.linear_attention.LayerState`, those of a rank's heads. Its two functions of ``fla`` are replaced
where its module looks them up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megascend.changes import patched
from megascend.engines.common import linear_attention
from megascend.engines.common.key_values import DecodeStep, Prefill
from megascend.engines.rules import ROPE_OF_LENGTH
from megascend.runtime.topology.topology import Topology
from megascend.training.batch.micro_batch import MicroBatch

AttentionSettings = tuple[float | None, int | None, Tensor | None]
"""Scale of products, window in tokens, sinks [heads]; None: the default scale, no window, no sinks."""
CONVOLUTION, DELTA_RULE = "causal_conv1d", "chunk_gated_delta_rule"
"""Names of fla's functions in mcore-bridge's module."""

if TYPE_CHECKING:
    from megascend.training.lora.adapter_layers import AdapterLayers


def unsupported_reason(chunks: Sequence[Any], config: Any, topology: Topology, platform: str) -> str | None:
    """Return the reason why this model cannot have a KV cache, or None."""
    rope = config.rope_scaling or {}
    if topology.context > 1:
        return f"parallel.context={topology.context}"
    if platform == "npu":
        return "attention on NPUs is that of the provider's packages"
    if config.position_embedding_type not in ("rope", "mrope", "none", "learned_absolute"):
        return f"position embedding {config.position_embedding_type}"
    if rope.get("rope_type", rope.get("type")) in ROPE_OF_LENGTH:
        return "rotary embeddings that depend on the length"
    if getattr(config, "softmax_type", "vanilla") not in ("vanilla", "learnable"):
        return f"attention with softmax_type={config.softmax_type}"
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if is_delta_rule(getattr(layer, "self_attention", None)):
                # With it mcore-bridge calls torch's convolution and Megatron's delta rule, neither of which is replaced here.
                if config.deterministic_mode:
                    return "linear attention with deterministic_mode"
                continue
            core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            if not isinstance(core, te.TEDotProductAttention):
                return f"a layer whose attention is {type(core or layer).__name__}"
            if config.multi_latent_attention and not hasattr(layer.self_attention, "linear_kv_up_proj"):
                return f"latent attention without linear_kv_up_proj ({type(layer.self_attention).__name__})"
            if getattr(config, "window_size", None) is not None and not hasattr(core, "window_size"):
                return f"attention in a window that {type(core).__name__} does not tell"
    return None


def is_delta_rule(module: Any) -> bool:
    """Check whether a layer's attention is a gated delta rule that calls the two functions of ``fla`` by their names."""
    code = None if module is None else linear_attention.forward_code(module)
    return code is not None and {CONVOLUTION, DELTA_RULE} <= set(code.co_names)


def attention_settings(layer: Any, config: Any) -> AttentionSettings:
    """Return the settings of a layer's attention."""
    core = layer.self_attention.core_attention
    # Transformer Engine's window does not count the token itself; -1: no window.
    left, _ = getattr(core, "window_size", None) or (-1, 0)
    # Latent attention's scale includes YaRN's, which the configuration does not.
    scale = getattr(layer.self_attention, "softmax_scale", getattr(config, "softmax_scale", None))
    return scale, None if left < 0 else left + 1, getattr(core, "softmax_offset", None)


@dataclass(frozen=True)
class _Attention:
    """A layer's attention: its number, scale of products, window in tokens, sinks [heads], and its own forward.

    Attributes:
        from_latent: layer of latent attention that computes keys and values from latents; None for other attention.
    """

    layer: int
    scale: float | None
    window: int | None
    sink: Tensor | None
    forward: Callable[..., Tensor]
    from_latent: Any = None


class CachedAttention:
    """Patches of a rank's attention layers that read and write the KV cache.

    Args:
        adapters: those in the model's layers, or None.

    Attributes:
        batch: the current micro batch; its ``cached`` is its use of the cache.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, adapters: AdapterLayers | None) -> None:
        self._chunks, self._config, self._adapters = chunks, config, adapters
        self._latents: Tensor | None = None  # of the layer that runs, from its projection to its attention
        self.batch: MicroBatch | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch the attention layers within the context; micro batches without ``cached`` run as before."""
        reason = "sampling: keys and values of earlier tokens are kept"
        delta_rules: dict[Any, int] = {}
        with contextlib.ExitStack() as stack:
            for chunk in self._chunks:
                # Gemma 4's layers with full attention have another.
                embeddings = [getattr(chunk, name, None) for name in ("rotary_pos_emb", "full_rotary_pos_emb")]
                # Angles by time, height and width are computed from the positions of the micro batch, also in decoding.
                if self._config.position_embedding_type == "mrope":
                    embeddings = []
                for rotary in filter(None, embeddings):
                    stack.enter_context(patched(rotary, "forward", partial(self._angles, rotary.forward), reason))
                for layer in chunk.decoder.layers:
                    if is_delta_rule(layer.self_attention):
                        # It has no core attention: its functions are replaced for all such layers together.
                        delta_rules[layer.self_attention] = layer.layer_number
                        continue
                    core = layer.self_attention.core_attention
                    up = layer.self_attention.linear_kv_up_proj if self._config.multi_latent_attention else None
                    if up is not None:
                        self._watch(up, stack, reason)
                    attention = _Attention(
                        layer.layer_number, *attention_settings(layer, self._config), core.forward, up
                    )
                    forward = partial(self._attend, attention)
                    stack.enter_context(patched(core, "forward", forward, reason))
            self._keep_states(delta_rules, stack)
            try:
                yield
            finally:
                self.batch = self._latents = None

    def _keep_states(self, delta_rules: dict[Any, int], stack: contextlib.ExitStack) -> None:
        """Keep the states of linear attention, given as modules with their layers' numbers, until ``stack`` is closed."""
        current = linear_attention.CurrentLayer(lambda: self._cached)
        stack.enter_context(current.watching(list(delta_rules), delta_rules.__getitem__))

        def convolution(before: Callable[..., Any]) -> Callable[..., Any]:
            def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **kwargs: Any) -> Any:
                def compute(x: Tensor) -> Tensor:
                    return before(x=x, weight=weight, bias=bias, activation=activation, **kwargs)[0]

                if current.state is None:
                    return before(x=x, weight=weight, bias=bias, activation=activation, **kwargs)
                return current.state.convolve(x, weight, bias, activation, compute), None

            return causal_conv1d

        # Functions of the process: other models' layers find no current layer.
        for owner in dict.fromkeys(map(linear_attention.forward_owner, delta_rules)):
            for function, wrap in (
                (CONVOLUTION, convolution),
                (DELTA_RULE, partial(linear_attention.delta_rule, current)),
            ):
                stack.enter_context(
                    patched(owner, function, wrap(getattr(owner, function)), linear_attention.STATES_ARE_KEPT)
                )

    def _watch(self, up: Any, stack: contextlib.ExitStack, reason: str) -> None:
        """Take the latents that ``up`` multiplies in each call, normalised, of all tokens, until ``stack`` is closed."""
        from megascend.training.lora.megatron_layers import split_output

        # A norm that is fused into the layer shows its output on demand; adapters have asked for it already.
        hidden = getattr(up, "return_layernorm_output", True) is False
        if hidden:
            stack.enter_context(patched(up, "return_layernorm_output", True, reason))

        def take(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            out, bias, latents = split_output(module, inputs, output)
            if self._cached is not None:
                # The projection gathers its input inside, and shows this rank's tokens only; attention computes all ranks'.
                if self._config.sequence_parallel and self._config.tensor_model_parallel_size > 1:
                    latents = gather_from_sequence_parallel_region(latents)
                self._latents = latents
            # The layer's caller expects two values, as without the patch.
            return (out, bias) if hidden else None

        # Before adapters' hooks, which take the norm's output away.
        stack.callback(up.register_forward_hook(take, prepend=True).remove)

    @property
    def _cached(self) -> Prefill | DecodeStep | None:
        return None if self.batch is None else self.batch.cached

    def _angles(self, forward: Any, length: int, *args: Any, **kwargs: Any) -> Tensor:
        """Compute rotary angles [tokens, 1, 1, head dim]; in decoding, those of each token's own position."""
        if self.batch is None or not isinstance(self.batch.cached, DecodeStep):
            return forward(length, *args, **kwargs)
        # Megatron computes the angles of a length: take the table up to the longest row, and select each token's position.
        positions = self.batch.position_ids[0]
        return forward(max(self.batch.cached.cache.lengths) + 1, *args, **kwargs)[positions]

    def _attend(
        self,
        attention: _Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        cached = self._cached
        if cached is None:
            return attention.forward(query, key, value, *args, **kwargs)
        latents = None
        if attention.from_latent is not None:
            # In place of keys and values: latents and the rotated part of keys, [..., 1, latent + rotated width].
            assert self._latents is not None
            # The same for all heads, so the first one's is used.
            rotated = key[..., :1, self._config.qk_head_dim :]
            latents = torch.cat([self._latents.unsqueeze(-2), rotated], -1)
        if isinstance(cached, DecodeStep):  # [tokens, 1, heads, head dim]
            if latents is not None:
                mixed = self._attend_to_latents(attention, cached, query[:, 0], latents[:, 0])
            else:
                mixed = cached.attend(
                    attention.layer,
                    query[:, 0],
                    key[:, 0],
                    value[:, 0],
                    attention.scale,
                    attention.window,
                    attention.sink,
                )
            # Megatron's core attention returns [tokens, batch, heads * head dim].
            return mixed.flatten(1)[:, None]
        # Prompts are computed as in training, by the layer's own attention; the cache takes samples before tokens, where a padded
        # batch of Megatron's is [sequence, batch, heads, head dim].
        states = (key, value) if latents is None else (latents,)
        cached.keep(attention.layer, *(tokens if tokens.dim() == 3 else tokens.transpose(0, 1) for tokens in states))
        return attention.forward(query, key, value, *args, **kwargs)

    def _attend_to_latents(self, attention: _Attention, cached: DecodeStep, query: Tensor, latents: Tensor) -> Tensor:
        """Compute new tokens' attention over the cached latents of their rows.

        Args:
            query: [tokens, heads, unrotated + rotated width], of this rank's heads.
            latents: [tokens, 1, latent + rotated width], of the new tokens.

        Returns:
            [tokens, heads, width of a value].
        """
        up, unrotated = attention.from_latent, self._config.qk_head_dim
        width = latents.shape[-1] - self._config.qk_pos_emb_head_dim
        heads = query.shape[1]
        plain, rotated = query.split([unrotated, self._config.qk_pos_emb_head_dim], dim=-1)
        # The projection [heads, unrotated + value width, latent width], then what adapters add to it for some tokens.
        parts = [(slice(None), up.weight.view(heads, -1, width))]
        if self._adapters is not None:
            parts += [(tokens, delta.view(heads, -1, width)) for tokens, delta in self._adapters.deltas(up)]
        absorbed = plain.new_zeros(len(query), heads, width)
        for tokens, weight in parts:
            absorbed[tokens] += torch.einsum("thk,hkl->thl", plain[tokens], weight[:, :unrotated])
        absorbed = torch.cat([absorbed, rotated], -1)
        mean = cached.attend(
            attention.layer, absorbed, latents, width, attention.scale, attention.window, attention.sink
        )
        mixed = mean.new_zeros(len(query), heads, parts[0][1].shape[1] - unrotated)
        for tokens, weight in parts:
            mixed[tokens] += torch.einsum("thl,hvl->thv", mean[tokens], weight[:, unrotated:])
        return mixed
