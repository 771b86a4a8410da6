"""Stream a model's parameters as Hugging Face names and unsharded tensors, in every layout.

mcore-bridge knows the names of parameters and how to split fused ones, but it gathers every tensor on all ranks. Its conversion
is used here with other communication: shards are sent to the pipeline stage of a receiver and assembled there, other ranks see
tensors on torch's ``meta`` device, and replicas that are not needed only join one barrier per layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.engines.common.weight_stream import ExportBarrier, stream_weights
from megascend.engines.megatron.mtp import with_copies
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import FusedPart, fused_part
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.reference.reductions import out_of_range
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Receivers, Route, participants, ranks_of, route

Merge = Callable[[str, Tensor], Tensor]

# Sent by index: all ranks need the same table.
_TORCH_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
# Headers have a fixed size: receivers do not know the number of dimensions.
_MOST_DIMENSIONS = 6


def named_weights(
    chunks: list[Any],
    bridge: Any,
    groups: ProcessGroups,
    headers: Mapping[str, TensorHeader],
    *,
    copies: Mapping[str, str] | None = None,
    merge: Merge | None = None,
    receivers: Receivers = "all",
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter under its Hugging Face name, one at a time, in the model's order, on the receiving ranks.

    Collective, as :func:`megascend.engines.common.weight_stream.stream_weights`; a rank that does not receive yields nothing, and
    its first ``next()`` lasts until the others are done. A tensor may share the model's memory and is valid until the next one.
    Beside the model, a receiver holds one layer (with all its experts) and one more tensor; others hold one shard.

    Args:
        chunks: the model chunks of this rank, without wrappers.
        headers: the checkpoint's tensors that are built; those that are fused there are joined.
        copies: names of ``headers`` that repeat another weight, by its name: it is yielded again, under that name.
        merge: ``(name, tensor) -> tensor``, applied to every tensor, on receivers.
        receivers: global ranks that get the tensors.
        device: device of the tensors; default: the model's. ``meta``: shapes and dtypes; no shards are sent.

    """
    receiving = ranks_of(receivers, groups.topology)
    config = chunks[0].config
    barrier = ExportBarrier(groups, config.num_layers)
    if groups.rank not in participants(groups.topology, receiving):
        barrier.join_all()
        return

    collector = _Collector(bridge, groups, receiving, device, barrier.before_layer, list(headers))
    weights = _join_fused(collector.weights(chunks), headers)
    weights = with_copies(weights, copies or {})
    yield from stream_weights(
        weights,
        barrier,
        groups,
        headers,
        config.params_dtype,
        receives=groups.rank in receiving,
        finish=partial(_finish, merge),
    )


def stored_weights(
    groups: ProcessGroups,
    headers: Mapping[str, TensorHeader],
    fresh: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    layers: int,
    merge: Merge | None,
    receivers: Receivers,
    device: torch.device | str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a frozen model as :func:`named_weights` does, from its checkpoint's files, which each receiver reads.

    Args:
        fresh: newly initialised weights of a scalar head, which no file has.
        layers: number of layers of the model.
        dtype: dtype of the model's parameters; routers' biases that are fp32 in the files stay so.
    """
    receiving, barrier = ranks_of(receivers, groups.topology), ExportBarrier(groups, layers)
    if groups.rank not in receiving:
        barrier.join_all()
        return
    headers_only = torch.device(device).type == "meta"

    def stored() -> Iterator[tuple[str, Tensor]]:
        for _ in range(layers):
            barrier.before_layer()
        files: dict[Path, Any] = {}
        for name, header in headers.items():
            stays_fp32 = header.dtype == "F32" and name.endswith("correction_bias")
            if headers_only:
                yield name, torch.empty(header.shape, dtype=torch.float32 if stays_fp32 else dtype, device="meta")
            else:
                value = fresh[name] if name in fresh else read_tensor(name, header, files)
                yield name, value.to(device, torch.float32 if stays_fp32 else dtype)

    yield from stream_weights(stored(), barrier, groups, headers, dtype, receives=True, finish=partial(_finish, merge))


def _finish(merge: Merge | None, name: str, tensor: Tensor) -> Tensor:
    """Merge an adapter into a tensor, which may then be out of the range of fp16."""
    tensor = tensor if merge is None else merge(name, tensor)
    if problem := out_of_range(name, tensor, tensor.dtype):
        raise CheckpointError(f"named_weights: {problem}")
    return tensor


def _join_fused(
    stream: Iterable[tuple[str, Tensor]], headers: Mapping[str, TensorHeader]
) -> Iterator[tuple[str, Tensor]]:
    """Join weights that the source stores fused (gate and up, experts), which mcore-bridge reads fused but exports separately.

    It needs memory for one layer's experts in addition to the model.
    """
    unfinished: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in stream:
        part = fused_part(name, headers)
        if part is None:
            yield name, tensor
            del tensor
            continue
        fused, missing = unfinished.pop(part.fused_name, (None, math.prod(headers[part.fused_name].shape)))
        if fused is None:
            fused = tensor.new_empty(headers[part.fused_name].shape)
        _view_of_part(part, fused).copy_(tensor)
        missing -= tensor.numel()
        del tensor  # no local variable may keep a tensor alive while the next one is gathered
        if missing > 0:
            unfinished[part.fused_name] = (fused, missing)
        else:
            yield part.fused_name, fused
        del fused
    if unfinished:
        raise CheckpointError(f"named_weights: parts of {', '.join(unfinished)} are missing")


def _view_of_part(part: FusedPart, fused: Tensor) -> Tensor:
    """Return the view of a fused tensor that ``part`` fills."""
    view = fused if part.expert is None else fused[part.expert]
    if part.half is None:
        return view
    rows = view.shape[0] // 2
    return view[:rows] if part.half == "gate" else view[rows:]


class _Collector:
    """mcore-bridge's export with other communication, on a copy of the bridge; the original is not changed.

    Args:
        names: names of the checkpoint's tensors, in an order that all ranks share.
    """

    def __init__(
        self,
        bridge: Any,
        groups: ProcessGroups,
        receiving: frozenset[int],
        device: torch.device | str | None,
        before_layer: Callable[[], None],
        names: Sequence[str],
    ) -> None:
        self._names = names
        self._groups, self._device, self._before_layer = groups, device, before_layer
        self._headers_only = device is not None and torch.device(device).type == "meta"
        self._receives = groups.rank in receiving
        self._routes = {
            expert: route(groups.topology, groups.rank, receiving, expert=expert) for expert in (False, True)
        }
        self._groups_across = {False: groups.device_group("pp"), True: bridge.ep_pp_group}
        self._shard_groups = {False: groups.device_group("tp"), True: groups.device_group("etp")}
        self._class = type(bridge)
        self._layer: dict[str, Any] = {}
        self._in_get_weight, self._split_dim = False, None
        self._view = view = copy.copy(bridge)
        view._get_weight = self._get_weight
        view._all_gather_tp = self._all_gather_tp
        view._broadcast_ep_pp = self._broadcast_ep_pp
        view._set_layer_state = self._set_layer_state
        view._convert_hf_state_dict = self._convert_hf_state_dict
        view._set_word_embeddings = self._set_word_embeddings
        view._set_module = self._set_module
        view._convert_mtp_embeds = lambda *args: None  # with_copies() repeats these weights

    def weights(self, chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield mcore-bridge's names and tensors; nothing on ranks that do not receive."""
        # In a list, since the bridge's local variable would keep the last tensor of a layer while the next one is gathered.
        options = {"converter": lambda name, tensor: (name, [tensor]), "disable_tqdm": True, "_is_saving": True}
        for name, box in self._view.export_weights(list(chunks), **options):
            if name in self._layer:
                self._layer[name] = None  # the bridge also refers to this dict
            if self._receives and box is not None:
                yield name, box.pop()

    # --- replacements of mcore-bridge's methods of these names ---

    def _set_layer_state(self, *args: Any, **options: Any) -> Any:
        self._before_layer()
        return self._class._set_layer_state(self._view, *args, **options)

    def _convert_hf_state_dict(self, *args: Any, **options: Any) -> Any:
        self._layer = self._class._convert_hf_state_dict(self._view, *args, **options)
        return self._layer

    def _set_word_embeddings(self, model: Any, *args: Any, **options: Any) -> Any:
        # The last pipeline stage has a copy, for a head for multi-token prediction; the first stage sends it.
        absent = SimpleNamespace(language_model=None) if self._view.is_multimodal else None
        return self._class._set_word_embeddings(self._view, model if model.pre_process else absent, *args, **options)

    def _set_module(self, module: Any, state: Any, prefix: str, to_mcore: bool) -> dict[str, Any]:
        """Collect a module of transformers, such as a vision tower, which is on the first pipeline stage and not divided."""
        tensors = {} if module is None else module.state_dict()
        names = [name.removeprefix(prefix) for name in self._names if name.startswith(prefix)]
        return {f"{prefix}{name}": self._view._get_weight(tensors.get(name), None)[0] for name in names}

    def _get_weight(self, *args: Any, **options: Any) -> tuple[Tensor | None, Tensor | None]:
        self._in_get_weight = True
        try:
            weight, scale = self._class._get_weight(self._view, *args, **options)
        finally:
            self._in_get_weight = False
        return (weight, scale) if self._receives else (None, None)

    def _all_gather_tp(self, tensor: Tensor | None, dim: int | None, is_expert: bool) -> Tensor | None:
        if not self._in_get_weight:  # called by an architecture's own code, which needs the result immediately
            return self._class._all_gather_tp(self._view, tensor, dim, is_expert)
        # Inside _get_weight, mcore-bridge calls _broadcast_ep_pp next: only the dimension is recorded here.
        self._split_dim = dim
        return None if tensor is None else tensor.to(self._groups.device)

    def _broadcast_ep_pp(self, tensor: Tensor | None, is_expert: bool) -> Tensor:
        if not self._in_get_weight:
            return self._class._broadcast_ep_pp(self._view, tensor, is_expert)
        path = self._routes[is_expert]
        split = self._split_dim if len(path.parts) > 1 else None
        source, shape, dtype = self._describe(tensor, path, self._groups_across[is_expert])
        full = None
        if not self._headers_only:
            need = path.need_whole if split is None else path.need_shard
            full = shard = self._spread(tensor, source, need, path, shape, dtype, self._groups_across[is_expert])
            if split is not None and shard is not None and self._groups.rank in path.need_shard:
                full = self._assemble(shard, split, path, self._shard_groups[is_expert])
        if split is not None:
            shape = [*shape[:split], shape[split] * len(path.parts), *shape[split + 1 :]]
        if full is None or not self._receives:
            return torch.empty(shape, dtype=dtype, device="meta")
        return full if self._device is None else full.to(self._device)

    # --- communication ---

    def _describe(self, tensor: Tensor | None, path: Route, group: Any) -> tuple[int, list[int], torch.dtype]:
        """Return (rank that has this shard, its shape, its dtype) on every rank of ``path.across``. Collective."""
        if len(path.across) == 1:
            assert tensor is not None
            return path.across[0], list(tensor.shape), tensor.dtype
        fields = [0] * (_MOST_DIMENSIONS + 4)
        if tensor is not None:
            fields[:4] = [1, self._groups.rank, _TORCH_DTYPES.index(tensor.dtype), tensor.ndim]
            fields[4 : 4 + tensor.ndim] = tensor.shape
        header = torch.tensor(fields, dtype=torch.int64, device=self._groups.device)
        # Only the rank that has the shard contributes; the sum is its header, and the count shows a second owner.
        dist.all_reduce(header, group=group)
        count, source, dtype, ndim, *shape = header.tolist()
        if count != 1:
            raise CheckpointError(
                f"named_weights: {count} of ranks {list(path.across)} have the same parameter, not one"
            )
        return source, shape[:ndim], _TORCH_DTYPES[dtype]

    def _spread(
        self,
        tensor: Tensor | None,
        source: int,
        need: tuple[int, ...],
        path: Route,
        shape: list[int],
        dtype: torch.dtype,
        group: Any,
    ) -> Tensor | None:
        """Send the shard from the rank that has it to those that need it, and return it; None elsewhere."""
        rank = self._groups.rank
        targets = [peer for peer in need if peer != source]
        if tensor is not None:
            # Sends and broadcasts read memory in order, and a shard may be a view.
            tensor = tensor.contiguous()
        elif rank in targets:
            tensor = torch.empty(shape, dtype=dtype, device=self._groups.device)
        # If all need it, one broadcast; else sends, so that ranks which do not need it allocate nothing.
        if len(targets) == len(path.across) - 1 > 0:
            assert tensor is not None
            dist.broadcast(tensor, src=source, group=group)
        elif rank == source:
            _exchange([dist.P2POp(dist.isend, tensor, peer, group) for peer in targets])  # type: ignore[reportArgumentType]
        elif rank in targets:
            _exchange([dist.P2POp(dist.irecv, tensor, source, group)])  # type: ignore[reportArgumentType]
        return tensor

    def _assemble(self, shard: Tensor, split: int, path: Route, group: Any) -> Tensor | None:
        """Assemble the unsharded tensor from the shards of ``path.parts`` on receivers; None elsewhere."""
        shard, parts, rank = shard.contiguous(), path.parts, self._groups.rank
        if path.receivers == parts:
            return _all_gather(shard, split, len(parts), group)
        full = None
        # Receiver by receiver, in the same order on all ranks, so that sends and receives match.
        for receiver in path.receivers:
            if rank != receiver:
                _exchange([dist.P2POp(dist.isend, shard, receiver, group)])
                continue
            size = shard.shape[split]
            full = shard.new_empty([*shard.shape[:split], size * len(parts), *shard.shape[split + 1 :]])
            # Along dimension 0 a part is contiguous, and can be received in place.
            buffer = shard.new_empty(shard.shape) if split else None
            for index, peer in enumerate(parts):
                target = full.narrow(split, index * size, size)
                if peer == rank:
                    target.copy_(shard)
                    continue
                _exchange([dist.P2POp(dist.irecv, target if buffer is None else buffer, peer, group)])
                if buffer is not None:
                    target.copy_(buffer)
        return full


def _all_gather(shard: Tensor, split: int, count: int, group: Any) -> Tensor:
    stacked = shard.new_empty([count * shard.shape[0], *shard.shape[1:]])
    dist.all_gather_into_tensor(stacked, shard, group=group)
    if split == 0:
        return stacked
    # The collective stacks shards along the first dimension; other splits are joined by a copy.
    return torch.cat(stacked.chunk(count), dim=split)


def _exchange(operations: list[dist.P2POp]) -> None:
    """Run sends or receives of this rank, and wait for them."""
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
