"""What the CUDA platform sets up, as far as it shows without a GPU."""

from megascend.platforms.cuda import shorten_dump


def test_the_wait_after_a_timeout_is_shortened_unless_it_is_set():
    environment = {}
    assert shorten_dump(environment) == ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=2000"]
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
    assert shorten_dump(environment) == []
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
