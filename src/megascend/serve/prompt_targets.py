"""Tokens that clients name for the places of a prompt, [n, k] or sparse, and tensors of such a shape in answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascend.errors import DataError
from megascend.serve.wire import tensor_of_json

MAX_CELLS = 2**20
"""Most tokens that one request names."""


@dataclass(frozen=True)
class PromptTargets:
    """Tokens that a client names.

    Attributes:
        cells: int64 [n, k]; -1: none. Of a sparse tensor, what it does not list is -1.
        sparse: of a sparse one, ``crow`` and ``col``: where each row begins in the list, and the column of each in it.
    """

    cells: np.ndarray
    sparse: dict[str, np.ndarray] | None

    def _order(self) -> np.ndarray:
        """Columns of every row, those that name something first, as far as a row has some."""
        named = self.cells >= 0
        width = int(named.sum(1).max(initial=0))
        return np.argsort(~named, axis=1, kind="stable")[:, :width]

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """What is named for every place, without the gaps between; -1 fills the rows up."""
        return tuple(map(tuple, np.take_along_axis(self.cells, self._order(), 1).tolist()))

    def answered(self, rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
        """A float32 tensor of what was computed for :meth:`rows`, as the client wrote its own: [n, k], or what is listed."""
        found = np.zeros(self.cells.shape, np.float32)
        order = self._order()
        np.put_along_axis(found, order, np.array(rows, np.float32).reshape(order.shape), 1)
        found[self.cells < 0] = 0
        if self.sparse is None:
            return found, None
        places = np.repeat(np.arange(len(found)), np.diff(self.sparse["crow"]))
        return found[places, self.sparse["col"]], {**self.sparse, "shape": np.array(found.shape)}


def targets_of(value: Any) -> PromptTargets | None:
    """Read ``target_prompt_logprobs`` of a request to sample.

    Raises:
        DataError: it cannot be read, or is no int64 tensor of two dimensions.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, Mapping) or value["dtype"] != "int64":
            raise DataError("an int64 tensor is expected")
        if value.get("sparse_crow_indices") is None:
            cells, sparse = tensor_of_json(value), None
        else:
            shifted = {**value, "data": (np.asarray(value["data"], np.int64) + 1).tolist()}  # what is not listed is 0
            cells = tensor_of_json(shifted) - 1
            names = {"crow": "sparse_crow_indices", "col": "sparse_col_indices"}
            sparse = {short: np.asarray(value[name], np.int64) for short, name in names.items()}
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"target_prompt_logprobs cannot be read: {type(error).__name__}") from None
    if cells.ndim != 2 or cells.size > MAX_CELLS:
        raise DataError(f"target_prompt_logprobs {list(cells.shape)}: [prompt - 1, k], at most {MAX_CELLS} values")
    return PromptTargets(cells, sparse)


def json_of_tensor(values: np.ndarray, sparse: dict[str, np.ndarray] | None) -> dict[str, Any]:
    """A tensor as clients read it in JSON; ``values`` are those listed if it is sparse."""
    shape = list(values.shape) if sparse is None else sparse["shape"].tolist()
    found = {
        "data": values.ravel().tolist(),
        "dtype": "int64" if values.dtype.kind == "i" else "float32",
        "shape": shape,
    }
    if sparse is not None:
        found |= {"sparse_crow_indices": sparse["crow"].tolist(), "sparse_col_indices": sparse["col"].tolist()}
    return found


def message_of_tensor(messages: Any, values: np.ndarray, sparse: dict[str, np.ndarray] | None) -> Any:
    """The same as a protobuf ``Tensor``, whole numbers in 32 bits."""
    whole = values.dtype.kind == "i"
    content = np.ascontiguousarray(values, np.int32 if whole else np.float32).tobytes()
    tensor = messages.Tensor(dtype=messages.DTYPE_INT32 if whole else messages.DTYPE_FLOAT32)
    if sparse is None:
        tensor.dense = content
        tensor.shape.extend(values.shape)
    else:
        tensor.sparse_csr.values = content
        tensor.sparse_csr.crow_indices = sparse["crow"].tobytes()
        tensor.sparse_csr.col_indices = sparse["col"].tobytes()
        tensor.shape.extend(sparse["shape"].tolist())
    return tensor
