"""A pytest plugin: worker processes of multiprocessing's forkserver inherit what the collected tests have imported.

MindSpeed's distributed tests run in pools of eight processes, each of which would import torch, Megatron and MindSpeed
again: minutes on a small machine. The forkserver imports the test modules once, and its children are forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def pytest_collection_finish(session: Any) -> None:
    modules = {item.module for item in session.items if hasattr(item, "module")}
    folders = {str(module.__file__).removesuffix(module.__name__.replace(".", "/") + ".py") for module in modules}
    os.environ["PYTHONPATH"] = os.pathsep.join([*sorted(folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    multiprocessing.set_forkserver_preload(sorted(module.__name__ for module in modules))
