"""Text from the model as it is trained, on the ranks that train it."""
