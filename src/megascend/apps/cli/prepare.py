"""``megascend prepare``: turn a run's data into token samples beforehand, on a machine without accelerators."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megascend.apps.cli import options

if TYPE_CHECKING:
    from megascend.config import Parallel


def prepare_command(
    config: options.RunFile,
    overrides: options.Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Also write the samples to DIR, for `data.prepared` elsewhere."),
    ] = None,
) -> None:
    """Tokenise the data of CONFIG into the cache folder, where a run finds them; all problems of the data are reported.

    Needs the model's directory and data, but neither its weights in memory nor a device.
    """
    from megascend.apps.data.prepare import prepare_samples, write_prepared
    from megascend.apps.data.preview import SampleStatistics
    from megascend.apps.train.preflight import check_data, check_run
    from megascend.apps.train.run_samples import RunSamples
    from megascend.config import load_config
    from megascend.config.plugins import import_plugins
    from megascend.errors import ConfigError
    from megascend.runtime.io.atomic import require_vacant

    settings = options.read_run_file(load_config, config, overrides)
    for name in ("streaming", "prepared"):
        if getattr(settings.data, name):
            raise ConfigError(f"data.{name} is set, and there is nothing to prepare for such a run: leave it out")
    # Before the data, which may take hours.
    if output is not None:
        require_vacant(output, "--output: ")
    import_plugins(settings.plugins)
    plan = check_run(settings, smallest_world(settings.parallel), False, plugins_pending=False)
    check_data(settings, plan)
    samples = RunSamples.prepare(settings, plan.tokenizer, plan.limits)
    for line in samples.remarks:
        print(f"data: {line}")
    for name, part in (("learned", samples.train), ("held out", samples.held_out)):
        if part is not None:
            figures = SampleStatistics.of(part)
            print(f"{name}: {figures.samples // figures.members:,} {figures.unit}, {figures.tokens:,} tokens")
    if output is None:
        return
    # From the cache, which has just been filled.
    sources = settings.data_sources()
    stores = {
        source.setting: prepare_samples(source, plan.tokenizer, plan.limits, settings.model, settings.template_date)
        for source in sources
    }
    write_prepared(output, stores, plan.limits, {source.setting: source.path for source in sources})
    print(f"written to {output}: set data.prepared: {output} where the run starts")


def smallest_world(parallel: Parallel) -> int:
    """Return the smallest number of ranks of a layout: samples do not depend on how many data parallel ranks there are."""
    attention = parallel.tensor * parallel.pipeline * parallel.context
    experts = (parallel.expert_tensor or parallel.tensor) * parallel.expert * parallel.pipeline
    return math.lcm(attention, experts)
