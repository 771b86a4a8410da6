"""``torch_npu.profiler``: the calls that verl and MindSpeed make, and that nothing written passes for a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from simnpu.errors import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")


@pytest.fixture
def profiler() -> Any:
    import torch_npu

    return torch_npu.profiler


def events(folder: Path) -> list[str]:
    """Names in the one trace under ``folder``."""
    (trace,) = folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")
    return [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]


def test_a_schedule_as_mindspeed_makes_it_records_its_steps(profiler: Any, tmp_path: Path) -> None:
    config = profiler._ExperimentalConfig(
        aic_metrics=profiler.AiCMetrics.PipeUtilization, profiler_level=profiler.ProfilerLevel.Level1, l2_cache=False
    )
    with profiler.profile(
        activities=[profiler.ProfilerActivity.NPU, profiler.ProfilerActivity.CPU],
        record_shapes=True,
        with_stack=False,
        experimental_config=config,
        schedule=profiler.schedule(wait=0, warmup=0, active=2, repeat=1, skip_first=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path)),
    ) as session:
        for step in range(5):
            with torch.profiler.record_function(f"work {step}"):
                torch.ones(2, device="npu").add(1)
            session.step()
    names = events(tmp_path)
    assert [f"work {step}" in names for step in range(5)] == [False, True, True, False, False]
    (info,) = tmp_path.glob("*_ascend_pt/profiler_info.json")
    assert "no kernel times" in json.loads(info.read_text())["simulated"]


def test_a_session_as_verl_makes_it(profiler: Any, tmp_path: Path) -> None:
    session = profiler.profile(
        with_modules=True,
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
        activities=[profiler.ProfilerActivity.CPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path / "1" / "actor"), analyse_flag=True),
        experimental_config=profiler._ExperimentalConfig(
            profiler_level=profiler.ProfilerLevel.Level_none,
            export_type=profiler.ExportType.Db,
            data_simplification=True,
            msprof_tx=True,
            mstx_domain_exclude=["communication"],
        ),
    )
    session.start()
    torch.ones(2, device="npu")
    session.step()
    session.stop()
    assert events(tmp_path / "1" / "actor")


def test_the_devices_activity_alone_records_nothing_and_says_so(profiler: Any, tmp_path: Path, capsys: Any) -> None:
    handler = profiler.tensorboard_trace_handler(str(tmp_path))
    with profiler.profile(activities=[profiler.ProfilerActivity.NPU], on_trace_ready=handler) as session:
        session.step()
    assert list(tmp_path.iterdir()) == []
    assert "nothing is recorded, since only the device's activity is asked for" in capsys.readouterr().err


def test_names_values_and_faults(profiler: Any, tmp_path: Path) -> None:
    assert profiler.supported_activities() == {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU}
    assert profiler.supported_profiler_level() == {"Level0", "Level1", "Level2", "Level_none"}
    assert profiler.AiCMetrics.AiCoreNone in profiler.supported_ai_core_metrics()
    assert profiler.supported_export_type() == {"db", "text"}
    actions = [profiler.schedule(wait=1, warmup=1, active=2, repeat=1)(step).name for step in range(6)]
    assert actions == ["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE", "NONE", "NONE"]
    with pytest.raises(ValueError, match="active must be 1 or more, found 0"):
        profiler.schedule(wait=0, active=0)
    with pytest.warns(UserWarning, match="profiler_level must be one of Level0, .* found 7; Level0 is used"):
        assert profiler._ExperimentalConfig(profiler_level=7).profiler_level == "Level0"
    with pytest.raises(NotSimulatedError, match=r"torch_npu\.profiler\.gpu_profile"):
        _ = profiler.gpu_profile
    session = profiler.profile()
    session.start()
    session.stop()
    session.export_chrome_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(NotSimulatedError, match="export_memory_timeline"):
        session.export_memory_timeline(str(tmp_path / "memory.html"))


def test_its_modules_can_be_imported(profiler: Any, tmp_path: Path) -> None:
    import torch_npu.profiler.dynamic_profile as dynamic_profile
    from torch_npu.profiler import profile
    from torch_npu.profiler.profiler import analyse

    assert profile is profiler.profile
    dynamic_profile.init(str(tmp_path))
    dynamic_profile.step()
    analyse(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        analyse(str(tmp_path / "nothing"))
