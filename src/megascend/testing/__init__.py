"""Help for testing code that trains: real ranks on one machine, and tiny Hugging Face checkpoints.

For example::

    from megascend.testing import run_distributed

    def total(rank_plus: int) -> float:
        value = torch.tensor([float(dist.get_rank() + rank_plus)])
        dist.all_reduce(value)
        return value.item()

    assert run_distributed(total, 4, 1) == [10.0] * 4
"""

from megascend.testing.distributed import Lost, run_distributed
from megascend.testing.tiny_models import ARCHITECTURES, tiny_config, write_tiny_checkpoint

__all__ = ["ARCHITECTURES", "Lost", "run_distributed", "tiny_config", "write_tiny_checkpoint"]
