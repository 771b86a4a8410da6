"""The norm of Transformer Engine specs on branch 0.16."""

from __future__ import annotations

from mindspeed.core.megatron_basic.megatron_basic import PTNorm


class TENorm(PTNorm):
    """Calling it makes a norm of the configured kind, not an instance of this class."""
