"""What every kind of backend does before and after its engine is built: the process, the checkpoint, the layout, the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megascend.bootstrap import Runtime, bootstrap
from megascend.config import Parallel, PlatformName, Precision
from megascend.distributed import process_groups
from megascend.distributed.engine_groups import GroupFactory
from megascend.distributed.launch import Launch
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.files import weight_files
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.huggingface.read_ahead import read_ahead
from megascend.huggingface.scalar_head import HeadKind
from megascend.topology.topology import Topology, plan


@dataclass(frozen=True)
class EngineContext:
    """What an engine is built in.

    Attributes:
        runtime: this process, prepared for the engine.
        topology, groups: who does what, and how ranks meet.
        info: of the checkpoint in ``model_dir``.
    """

    runtime: Runtime
    topology: Topology
    groups: ProcessGroups
    info: ModelInfo
    model_dir: Path


Prepare = Callable[[Runtime, Topology, Path], GroupFactory | None]
"""(the process, the layout, the checkpoint's directory) -> what makes the engine's groups; None: plain ones.

It refuses what the engine cannot do, and imports what it needs. No rank has met another yet.
"""


@contextmanager
def engine_context(
    engine: str,
    model: str | Path,
    *,
    precision: Precision,
    platform: PlatformName = "auto",
    tf32: bool | None = None,
    parallel: Parallel | None = None,
    provider: str | None = None,
    timeout_s: float = 600.0,
    prepare: Prepare = lambda runtime, topology, model_dir: None,
    head: HeadKind = "lm",
) -> Iterator[EngineContext]:
    """Build an engine in the block; if that fails, the process groups are destroyed and another attempt finds none. Collective.

    Args:
        engine: the name under which it is registered.
        model: directory of a Hugging Face checkpoint with safetensors weights.
        platform, tf32, provider: as for :func:`megascend.bootstrap`, which is called if it has not been.
        parallel: how the ranks divide the work; default: data parallelism alone.
        timeout_s: seconds after which a missing rank is an error on all others.
        prepare: called before ranks meet.
        head: what the model ends with: logits (``lm``), the scalar head of its checkpoint (``scalar``), or a new one in place of
            a causal language model's output layer (``new_sequence_classifier``, ``new_token_classifier``).

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError, CollectiveTimeoutError:
            before anything is built.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
    layout, model_dir = parallel or Parallel(), Path(model)
    launch = Launch.from_environment()
    with read_ahead(_weights(model_dir, launch), launch.local_rank, launch.local_size):
        runtime = bootstrap(platform, layout, tf32, engine, precision, provider)
        info = inspect_checkpoint(model_dir, head)
        topology = plan(layout, launch.world_size, info.shape)
        factory = prepare(runtime, topology, model_dir)
        runtime.configure_topology(topology, timeout_s)
        groups = process_groups.initialize(topology, runtime.platform, timeout_s, launch, factory)
        try:
            if precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            with groups.monitor.phase("build"):
                yield EngineContext(runtime, topology, groups, info, model_dir)
        except BaseException:
            groups.destroy()
            raise


def _weights(model_dir: Path, launch: Launch) -> list[Path]:
    """Files that the ranks of this host will read whole, one part here and one there. Of several hosts, none may need all."""
    if launch.local_size != launch.world_size:
        return []
    try:
        return [path for path in weight_files(model_dir) if path.is_file()]
    except CheckpointError:
        return []  # a moment later, inspect_checkpoint raises it
