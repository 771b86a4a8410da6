"""Who computes what: rank layouts (pure), process groups, and collectives for Python objects."""
