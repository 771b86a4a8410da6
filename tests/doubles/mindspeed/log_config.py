"""The logging configuration that the adaptor imposes on the whole process."""

from __future__ import annotations

import os
from logging.config import dictConfig


def set_log_config() -> None:
    """Replace the root logger's handlers with one on stdout; whatever the program had configured is gone."""
    level = os.getenv("MIND_SPEED_LOG_LEVEL", "INFO")
    dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s %(levelname)s [%(name)s] %(message)s"}},
            "handlers": {
                "console": {
                    "class": "logging.StreamHandler",
                    "level": level,
                    "formatter": "plain",
                    "stream": "ext://sys.stdout",
                }
            },
            "root": {"handlers": ["console"], "level": level},
        }
    )
