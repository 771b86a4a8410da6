"""Stand-in for ``torchair.configs``."""
