"""verl's training engine ``megascend``, the plugin that registers it, and a CPU platform for verl."""
