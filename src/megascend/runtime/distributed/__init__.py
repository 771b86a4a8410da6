"""Launch, process groups, and collectives that check that every rank makes the same call."""
