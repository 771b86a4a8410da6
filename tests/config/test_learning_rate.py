import pytest
import torch
from transformers import optimization

from megascend.config import Schedule
from megascend.config.training import learning_rate
from megascend.errors import ConfigError


def rates(schedule, steps, peak=1.0):
    return [learning_rate(schedule, peak, step) for step in range(steps)]


PEAK, TOTAL = 3e-4, 97
TRANSFORMERS = {
    "constant": ({"warmup_steps": 9}, "get_constant_schedule_with_warmup", {}),
    "linear": ({"kind": "linear", "warmup_steps": 9}, "get_linear_schedule_with_warmup", {"num_training_steps": TOTAL}),
    "cosine to a minimum": (
        {"kind": "cosine", "warmup_steps": 9, "min_lr": 1e-5},
        "get_cosine_with_min_lr_schedule_with_warmup",
        {"num_training_steps": TOTAL, "min_lr": 1e-5},
    ),
    "polynomial": (
        {"kind": "polynomial", "warmup_steps": 9, "power": 2.5, "min_lr": 1e-6},
        "get_polynomial_decay_schedule_with_warmup",
        {"num_training_steps": TOTAL, "lr_end": 1e-6, "power": 2.5},
    ),
    # 0.09 * 97 = 8.73 and 0.2 * 97 = 19.4 are rounded up.
    "polynomial, warm-up as a share": (
        {"kind": "polynomial", "warmup_ratio": 0.09},
        "get_polynomial_decay_schedule_with_warmup",
        {"num_training_steps": TOTAL, "lr_end": 0.0},
    ),
    **{
        f"wsd {shape}": (
            {"kind": "wsd", "warmup_ratio": 0.09, "decay_ratio": 0.2, "decay_shape": shape, "min_lr": 3e-5},
            "get_wsd_schedule",
            {"num_training_steps": TOTAL, "num_decay_steps": 20, "decay_type": shape, "min_lr_ratio": 0.1},
        )
        for shape in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_step_has_the_rate_of_transformers(name):
    settings, function, options = TRANSFORMERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    reference = getattr(optimization, function)(optimizer, num_warmup_steps=9, **options).lr_lambdas[0]
    minimum = options.get("min_lr_ratio", 0.0)
    expected = []
    for step in range(TOTAL + 10):
        if step < 9:
            # The first step of transformers' warm-up has rate 0 (wsd: min_lr), and changes nothing: step s is its step s + 1.
            factor = reference(step + 1) if step < 8 else reference(9)
            expected.append(PEAK * (factor - minimum) / (1 - minimum))
        else:
            expected.append(PEAK * reference(min(step, TOTAL)))  # beyond the end transformers' cosine rises again
    schedule = Schedule(**settings).ending_with(TOTAL)
    assert rates(schedule, TOTAL + 10, PEAK) == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert max(expected) == PEAK
    assert expected[-1] == pytest.approx(settings.get("min_lr", PEAK if name == "constant" else 0.0), abs=1e-18)


def test_shares_are_rounded_up_to_steps():
    assert Schedule(kind="linear", warmup_ratio=0.07, total_steps=100).warmup == 7  # 0.07 * 100 is 7.000000000000001
    assert Schedule(kind="linear", warmup_ratio=0.03, total_steps=10).warmup == 1
    assert Schedule(kind="wsd", decay_ratio=1, total_steps=10).decay == 10
    assert Schedule(warmup_ratio=0.5).ending_with(6).warmup == 3


def test_a_share_of_no_steps_raises_config_error():
    with pytest.raises(ConfigError, match="schedule warmup_ratio needs total_steps"):
        learning_rate(Schedule(warmup_ratio=0.1), 1.0, 0)
