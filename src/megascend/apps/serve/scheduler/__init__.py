"""The path of a request to the ranks and back: `commands`, `inbox`, the `runner` on all ranks, `futures` for answers."""
