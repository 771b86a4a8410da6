"""The MegatronAdaptor provider: Ascend's later stack, with TransformerEngineNPU and optionally MindSpeed.

MegatronAdaptor's and TransformerEngineNPU's sources could not be had. The provider keeps the contract by which these public
programs use them:

- ROLL, ``mcore_adapter`` (bootstrap of the NPU runtime): ``import torch_npu``, then ``import megatron_adaptor``; ``TENorm`` must
  be in ``megatron.core.extensions.transformer_engine``, and ``te_checkpoint`` is added if it is missing; random states and
  ``torch.cuda.current_device`` are directed to the NPU; the defaults of
  ``megatron_adaptor.utils.args_utils.get_mindspeed_args`` are copied onto the configuration where it has no such attribute;
  ``megatron_adaptor.repatch`` is called with the arguments that changed, where ``megatron.training`` can be imported.
- vime, platform ``npu``: MegatronAdaptor before any module of Megatron, after NPUs were selected, because ``torch.cuda`` looks
  available afterwards.
- verl#7142 (engine ``megatron_adaptor``) and ms-swift#10087: one import, no patching for every engine; ``attention_backend`` and
  ``cp_comm_type`` in place of MindSpeed's ``use_flash_attn`` and ``context_parallel_algo``.
- MindSpeed core_r0.17.0 and core_r0.18.0, README and ``mindspeed/__init__.py``: MegatronAdaptor, TransformerEngineNPU,
  MindSpeed, in this order; TransformerEngineNPU takes the name ``transformer_engine`` and cannot be installed beside CUDA's;
  ``core/context_parallel/model_parallel_utils.py``: the kinds of context parallelism that TransformerEngineNPU has.
"""

from megascend.runtime.bootstrap.megatron_adaptor.provider import MegatronAdaptor

__all__ = ["MegatronAdaptor"]
