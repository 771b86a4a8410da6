"""A device whose kernels reach the same share of its peak at every size, so that a test can compute by hand."""

from __future__ import annotations

from dataclasses import replace

from megascend.apps.plan.hardware import PASSES, UNDER_LOAD, Hardware, Link, Measurements, Table

PEAK, BYTES = 100e12, 1e12
RATE = 0.5 * UNDER_LOAD * PEAK
"""FLOP/s of every product on :func:`flat`."""


def flat(*, gap_s: float = 0.0, launch_s: float = 0.0, network: float = 10e9) -> Hardware:
    """Return a device with half of its peak everywhere; four in a node."""
    half, attention = Table({(1, 1, 1): 0.5}), Table({(1, 1): 0.5})
    measurements = Measurements(
        "paper",
        dict.fromkeys(PASSES, half),
        dict.fromkeys(PASSES, half),
        (attention, attention),
        Table({(1,): 1.0}),
    )
    return Hardware(
        name="paper",
        title="Paper",
        platform="cuda",
        memory=80 * 10**9,
        peak=PEAK,
        bytes_per_s=BYTES,
        fp8=2.0,
        cards_per_node=4,
        node=Link(1e-6, 100e9),
        network=Link(5e-6, network),
        launch_s=launch_s,
        gap_s=gap_s,
        measurements=measurements,
        measured=True,
    )


def without_traffic(hardware: Hardware) -> Hardware:
    """Return a device that moves bytes in no time."""
    return replace(hardware, bytes_per_s=1e30, measurements=hardware.measurements)
