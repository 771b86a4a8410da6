"""megascend behind SkyRL's Tinker server: ``ranks`` (commands, without SkyRL), ``batches`` (pure), ``backend``, ``launch``."""
