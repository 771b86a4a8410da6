"""The name ``torch_npu`` while ``simnpu`` is active; everything lives in :mod:`simnpu.surface`."""


def _autoload() -> None:
    """Called by ``import torch`` (entry point ``torch.backends``); importing this module does the work.

    Defined before torch is imported below: that import calls it when a program imports torch_npu first.
    """


from simnpu import surface as _surface  # noqa: E402

__simulated_by__ = "simnpu"
__version__ = _surface.simulated_version()

_surface.install(__name__)


def __getattr__(name: str) -> object:
    raise _surface.missing(name)
