"""The MindSpeed provider: prerequisites, arguments, patching and verification.

It works in two phases. *Before Megatron* (:meth:`MindSpeed.before_megatron`): prerequisites, seeded arguments, the import of the
adaptor. *With the ModelConfig* (:meth:`MindSpeed.for_model`): arguments from the model and the layout, a repatch if they
changed, checks. ``docs/npu-internals.md`` has the facts behind each file.
"""

from megascend.runtime.bootstrap.mindspeed.provider import MindSpeed

__all__ = ["MindSpeed"]
