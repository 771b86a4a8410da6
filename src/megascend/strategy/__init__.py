"""How model, process groups and optimizer are made to work together on one topology."""
