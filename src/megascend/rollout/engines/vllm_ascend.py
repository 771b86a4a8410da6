"""vLLM on Ascend NPUs (vllm-ascend): started in the same way, with the same routes; weights travel over HCCL."""

from __future__ import annotations

from megascend.errors import EngineError
from megascend.rollout.engines.vllm import VllmEngine
from weightwire.offer import Offer

DEVICE = "npu"
TRANSPORT = "hccl"


class VllmAscendEngine(VllmEngine):
    """One server of vllm-ascend.

    Its workers keep received weights on the NPU, where HCCL puts them. With ``WEIGHTWIRE_STAGING=cpu`` in its environment they
    receive into host memory instead, over ``gloo``, where there is no HCCL between trainer and engine.
    """

    kind = "vLLM Ascend"

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`.

        Raises:
            EngineError: the server's workers are not on NPUs: a vLLM that has not found vllm-ascend starts on the CPU.
        """
        device = (await self.info())["device"]
        if device != DEVICE:
            raise EngineError(
                f"{self.name}: its workers are on {device}, not on {DEVICE}: is vllm-ascend installed there?"
            )
        await super().begin_update(offer)
