"""``torch_npu.profiler.profile``: a session over ``torch.profiler``'s record of the CPU."""

from __future__ import annotations

import datetime
import enum
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity as TorchActivity
from torch.profiler import profile as torch_profile

from simnpu.profiler.experimental_config import _ExperimentalConfig
from simnpu.profiler.scheduler import ProfilerAction

__all__ = ["ProfilerActivity", "analyse", "profile", "supported_activities", "tensorboard_trace_handler"]

NOTE = (
    "recorded on the simulated device of simnpu: the CPU's activity alone. There are no kernel times, no AI "
    "core metrics and no device memory in it, and its times say nothing about hardware"
)
HOST = TorchActivity.CPU  # kept: transfer_to_npu may change torch.profiler


class ProfilerActivity(enum.Enum):
    """Device to record; there is nothing of ``NPU`` to record here."""

    CPU = 0
    NPU = 1


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def asks_for_cpu(activities: Iterable[Any] | None) -> bool:
    """Check whether the CPU is among ``activities``, torch_npu's or torch's own; by default it is."""
    return activities is None or any(getattr(activity, "name", "") == "CPU" for activity in activities)


class _KinetoProfile:
    """A session without steps: from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        *,
        activities: Iterable[Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
        custom_trace_id_callback: Callable[[], str] | None = None,
        **steps: Any,
    ) -> None:
        activities = list(activities) if activities else None
        self.experimental_config = experimental_config or _ExperimentalConfig()
        self.metadata: dict[str, Any] = {}
        self.custom_trace_id_callback = custom_trace_id_callback
        self.host: torch_profile | None = None
        if asks_for_cpu(activities):
            self.host = torch_profile(
                activities=[HOST], record_shapes=record_shapes, profile_memory=profile_memory, with_stack=with_stack,
                with_flops=with_flops, with_modules=with_modules, **steps,
            )  # fmt: skip
        else:
            print(
                f"torch_npu.profiler: nothing is recorded, since only the device's activity is asked for ({NOTE}); add "
                "ProfilerActivity.CPU",
                file=sys.stderr,
            )

    def start(self) -> None:
        if self.host is not None:
            self.host.start()

    def stop(self) -> None:
        if self.host is not None:
            self.host.stop()

    def add_metadata(self, key: str, value: str) -> None:
        """Note ``value`` in ``profiler_info.json``."""
        self.metadata[key] = value

    def add_metadata_json(self, key: str, value: str) -> None:
        """Note the value of a JSON text."""
        self.metadata[key] = json.loads(value)

    def export_chrome_trace(self, output_path: str) -> None:
        """Write what was recorded of the CPU."""
        if self.host is not None:
            self.host.export_chrome_trace(str(output_path))

    def export_stacks(self, output_path: str, metric: str = "self_cpu_time_total") -> None:
        """Write stacks with their CPU time, of a session ``with_stack``."""
        if metric != "self_cpu_time_total":
            raise ValueError(f"export_stacks: metric {metric!r} is not recorded on the simulated device")
        if self.host is not None:
            self.host.export_stacks(str(output_path), metric)

    def export_memory_timeline(self, output_path: str, device: str | None = None) -> None:
        """Refuse: not simulated, as the device's memory is the host's."""
        from simnpu.errors import missing

        raise missing("export_memory_timeline", "torch_npu.profiler.profile")

    def get_trace_id(self) -> str:
        return self.custom_trace_id_callback() if self.custom_trace_id_callback else ""

    def set_custom_trace_id_callback(self, callback: Callable[[], str]) -> None:
        self.custom_trace_id_callback = callback


class profile(_KinetoProfile):
    """A session over steps. ``schedule`` says which are recorded; without one, all between start and stop are."""

    def __init__(
        self,
        *,
        activities: Iterable[Any] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
        execution_trace_observer: Any = None,
        custom_trace_id_callback: Callable[[], str] | None = None,
        use_cuda: bool | None = None,
    ) -> None:
        if use_cuda is not None:
            print("torch_npu.profiler: use_cuda has no meaning on an npu", file=sys.stderr)
        self.on_trace_ready = on_trace_ready
        self.step_num = 0
        super().__init__(
            activities=activities, record_shapes=record_shapes, profile_memory=profile_memory, with_stack=with_stack,
            with_flops=with_flops, with_modules=with_modules, experimental_config=experimental_config,
            custom_trace_id_callback=custom_trace_id_callback, schedule=schedule, on_trace_ready=self._trace_ready,
            execution_trace_observer=execution_trace_observer,
        )  # fmt: skip

    def _trace_ready(self, host: torch_profile) -> None:
        if self.on_trace_ready is not None:
            self.on_trace_ready(self)

    def step(self) -> None:
        """Mark the end of one training step."""
        self.step_num += 1
        if self.host is not None:
            self.host.step()

    def __enter__(self) -> profile:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @classmethod
    def enable_profiler_in_child_thread(cls, **options: bool) -> None:
        """Accepted and without effect: ``torch.profiler`` follows the thread that started it."""

    @classmethod
    def disable_profiler_in_child_thread(cls) -> None:
        """See :meth:`enable_profiler_in_child_thread`."""


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[_KinetoProfile], None]:
    """Return a value for ``on_trace_ready`` that writes a folder ``<worker>_<pid>_<time>_ascend_pt`` into ``dir_name``.

    It holds ``profiler_info.json`` and, unless ``analyse_flag`` is False, ``ASCEND_PROFILER_OUTPUT/trace_view.json``.
    """
    worker = f"{worker_name or socket.gethostname()}_{os.getpid()}"

    def handler(session: _KinetoProfile) -> None:
        now = datetime.datetime.now().astimezone().strftime("%Y%m%d%H%M%S%f")
        folder = Path(dir_name or os.environ.get("ASCEND_WORK_PATH") or Path.cwd()) / f"{worker}_{now}_ascend_pt"
        output = folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        info = {"simulated": NOTE, "config": vars(session.experimental_config), "metadata": session.metadata}
        (folder / "profiler_info.json").write_text(json.dumps(info, indent=2, default=str), encoding="utf-8")
        if analyse_flag:
            with tempfile.TemporaryDirectory() as scratch:  # programs that watch the folder see complete files
                session.export_chrome_trace(os.path.join(scratch, "trace_view.json"))
                shutil.move(os.path.join(scratch, "trace_view.json"), output / "trace_view.json")

    return handler


def analyse(
    profiler_path: str, max_process_number: int = 1, export_type: str | list[str] | None = None, **options: Any
) -> None:
    """Do nothing: what the simulated device records is written at once."""
    if not os.path.isdir(profiler_path):
        raise FileNotFoundError(f"torch_npu.profiler.profiler.analyse: no folder {profiler_path}")
    print(f"torch_npu.profiler: nothing to analyse in {profiler_path}: {NOTE}", file=sys.stderr)
