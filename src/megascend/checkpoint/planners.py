"""How torch's distributed checkpoints plan for state that is held as :class:`Chunks`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megascend.engines.chunks import Chunks


class SavePlanner(DefaultSavePlanner):
    """Plans a save of :class:`Chunks` and of objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, Chunks) else found


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into :class:`Chunks`; objects take their place in the state."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default first replaces tensors on the meta device, and what is no tensor by None.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].part(index)
