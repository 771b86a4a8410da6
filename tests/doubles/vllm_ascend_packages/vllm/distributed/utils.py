"""Stands for vLLM's module of this name: a class to be recognised by."""


class StatelessProcessGroup:
    """Members of a group that have a store in common."""
