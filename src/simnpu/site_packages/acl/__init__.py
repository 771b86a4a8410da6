"""Stand-in for CANN's ``acl``: what MindSpeed asks of it. The device is simulated (``simnpu``)."""

from acl import rt as rt


def get_soc_name() -> str:
    """Name of the chip: the one that was set, else of the generation whose kernels are simulated, a 910B."""
    from simnpu.identity import GENERATION, chip

    return (chip() or GENERATION).name
