"""The start of a run of any kind, in its order: the process is made ready, then the engine's packages, then the model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.app.event_log import EventLog
from megascend.app.lasting_output import LastingOutput
from megascend.app.resume import belongs, check_start
from megascend.app.start_phases import StartPhases
from megascend.config import TrainerConfig
from megascend.distributed.launch import Launch

if TYPE_CHECKING:
    from megascend.app.kernels_ahead import KernelsAhead
    from megascend.app.self_check_ahead import SelfCheckAhead
    from megascend.backend import Backend
    from megascend.bootstrap import Runtime


class Start:
    """What a run has from its first moment on. Methods are called in their order.

    Attributes:
        launch: this process among those of the run.
        event_log: of the run.
        phases: where the time goes.
        self_check: what is done of it ahead, once the process is made ready.
        kernels: likewise.
    """

    def __init__(self, config: TrainerConfig, overwrite: bool, resume: str | Path | None) -> None:
        """Refuse what can be refused in the first second, on every rank alike.

        Raises:
            ConfigError, CheckpointError: as :func:`megascend.app.resume.check_start`.
        """
        self.phases = StartPhases()
        self.self_check: SelfCheckAhead | None = None
        self.kernels: KernelsAhead | None = None
        self.phases.ended("Python")
        self.launch = Launch.from_environment()
        check_start(config.output, overwrite, resume, self.launch)
        self._output = LastingOutput()
        self._output.install()
        active = belongs(config.output, resume, self.launch)
        self.event_log = EventLog(config.output, self.launch, active=active, losses=self._output.losses)

    def process(self, config: TrainerConfig) -> Runtime:
        """Make the process ready, before anything imports Megatron; transformers is there afterwards."""
        from megascend.app.kernels_ahead import KernelsAhead
        from megascend.app.self_check_ahead import SelfCheckAhead

        self.self_check = SelfCheckAhead(config, self.launch.rank)
        self.self_check.stand_by()
        self.kernels = KernelsAhead(config, self.launch)
        self.kernels.begin()

        from megascend.app.run import bootstrap  # which imports torch

        self.phases.ended("settings")
        runtime = bootstrap(config)
        runtime.platform.start_ahead(self.launch.local_rank)
        self.phases.ended("torch")

        from transformers import AutoConfig, AutoTokenizer  # noqa: F401  for data and the self-check: a phase of its own

        self.phases.ended("transformers")
        return runtime

    def engine(self, config: TrainerConfig, runtime: Runtime) -> None:
        """Import what the engine needs, the self-check of the model beside it: data and settings have been found fit."""
        from megascend.bootstrap.engines import needs

        self.phases.ended("data")
        megatron = needs(config.engine).megatron
        if megatron:
            # In another process; its verdict is needed when the model is built.
            assert self.self_check is not None
            self.self_check.begin()
            runtime.load_megatron()
        # Modules stay: garbage collection need not look through them again, between steps least of all.
        gc.collect()
        gc.freeze()
        self.phases.ended("Megatron" if megatron else "engine")

    def backend(self, config: TrainerConfig) -> Backend:
        """Build the model: trained itself, or frozen under one adapter."""
        from megascend.app.run import make_backend

        backend = make_backend(config)
        self.phases.ended("model")
        if backend.self_check is not None:
            self.phases.set_apart("self-check", "model", backend.self_check_s)
        return backend

    def ready(self) -> None:
        """Say how long it took until the first step begins."""
        self.phases.ended("preparing")
        print(f"ready after {self.phases}", flush=True)

    def close(self) -> None:
        """Whatever became of the run: no process of its start is left."""
        gc.unfreeze()  # the caller's own objects are among those that have been frozen
        if self.self_check is not None:
            self.self_check.close()
        if self.kernels is not None:
            self.kernels.close()
        self._output.restore()

    def first_step(self) -> None:
        """The first step is done: its time and that of everything before it go to the log."""
        self.phases.ended("first step")
        if self.kernels is not None:
            self.kernels.close()
        self.event_log.event("first_step", **self.phases.record())
