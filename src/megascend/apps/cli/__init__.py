"""The ``megascend`` command. One file per command; nothing heavy is imported until a command runs."""
