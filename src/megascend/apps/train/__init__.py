"""The application behind ``megascend train``: loop, data, run log, checkpoints, resume."""
