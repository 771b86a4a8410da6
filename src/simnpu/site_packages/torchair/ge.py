"""Stand-in for ``torchair.ge``: the types that appear in converters' annotations."""


class Tensor:
    """A tensor of a graph; never made here."""


class TensorSpec:
    """Shape and type of a graph's tensor; never made here."""


class DataType:
    """Element types of a graph."""

    DT_FLOAT, DT_FLOAT16, DT_BF16, DT_INT8, DT_UINT8, DT_INT32, DT_INT64, DT_UINT64, DT_BOOL = range(9)


def __getattr__(name: str) -> object:
    raise AttributeError(f"torchair.ge.{name} is not simulated by simnpu: there is no graph mode")
