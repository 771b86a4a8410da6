"""Whether mixed precision can be used."""

__all__ = ["amp_definitely_not_available"]


def amp_definitely_not_available() -> bool:
    return False
