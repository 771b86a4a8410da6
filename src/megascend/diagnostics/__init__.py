"""What each rank does now, and who keeps the others waiting."""
