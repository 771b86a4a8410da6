"""Stand-in for CANN's ``acl``: what MindSpeed asks of it. The device is simulated (``megascend.simnpu``)."""

from acl import rt as rt


def get_soc_name() -> str:
    """Name of the chip. MindSpeed compares with ``910B``, the generation whose kernels are simulated."""
    return "Ascend910B1"
