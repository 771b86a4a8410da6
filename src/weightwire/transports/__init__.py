"""Transports, which move the bytes of buckets: one file for each medium, chosen by name."""

from weightwire.transports.base import (
    Setup,
    Transport,
    Work,
    make_transport,
    register_transport,
    transport_names,
)

__all__ = ["Setup", "Transport", "Work", "make_transport", "register_transport", "transport_names"]
