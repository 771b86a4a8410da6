"""The training service behind ``megascend serve``, which programs written for the Tinker API train against."""
