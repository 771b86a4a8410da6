"""Launch, process groups, and collectives that say what they are."""
