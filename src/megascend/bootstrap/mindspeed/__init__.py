"""MindSpeed under control: what it needs, what it is told, when it patches, and what is checked afterwards.

Two phases. *Before Megatron* (:meth:`MindSpeed.before_megatron`): prerequisites, seeded arguments, the adaptor's import.
*With the ModelConfig* (:meth:`MindSpeed.for_model`): arguments from the model and the layout, a repatch if they changed,
checks. The facts behind each file are in ``docs/npu.md``.
"""

from megascend.bootstrap.mindspeed.provider import MindSpeed

__all__ = ["MindSpeed"]
