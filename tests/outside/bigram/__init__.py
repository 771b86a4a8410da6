"""A package of somebody else's: an engine that predicts each token from the one before it. Importing it registers the engine."""

import megascend
from bigram.backend import BigramBackend

megascend.register_engine("bigram", BigramBackend, packages=["torch"])
