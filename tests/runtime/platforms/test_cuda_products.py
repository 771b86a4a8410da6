"""TF32: process settings, and detection of products with another precision than requested."""

import pytest

import megascend
from megascend.errors import ConfigError, PlatformError
from megascend.runtime.platforms import choose
from megascend.runtime.platforms.cuda import TF32_VARIABLE, check_fp32_products, configure_tf32


def test_fp32_is_fp32_by_default():
    environment = {}
    changes = configure_tf32(False, environment)
    assert environment == {TF32_VARIABLE: "0"}
    assert [change.split(":")[0] for change in changes] == [f"{TF32_VARIABLE}=0"]


@pytest.mark.parametrize(("tf32", "value"), [(False, "0"), (True, "1")])
def test_agreeing_tf32_variable_is_unchanged(tf32, value):
    environment = {TF32_VARIABLE: value}
    assert configure_tf32(tf32, environment) == []
    assert environment == {TF32_VARIABLE: value}


@pytest.mark.parametrize(("tf32", "value"), [(False, "1"), (True, "0")])
def test_contradicting_tf32_variable_raises_config_error(tf32, value):
    with pytest.raises(ConfigError, match=f"tf32={tf32} contradicts {TF32_VARIABLE}={value}"):
        configure_tf32(tf32, {TF32_VARIABLE: value})


@pytest.mark.parametrize("error", [2.9e-7, 1e-6])
def test_the_rounding_of_fp32_is_accepted(error):
    check_fp32_products(error)


@pytest.mark.parametrize("error", [2.9e-4, 1e-3])
def test_the_rounding_of_tf32_is_not(error):
    with pytest.raises(PlatformError, match=rf"relative error of {error:.1e}.*{TF32_VARIABLE}=0"):
        check_fp32_products(error)


def test_tf32_on_a_platform_without_it_raises_config_error():
    assert choose("cpu").configure_products(False) == []
    with pytest.raises(ConfigError, match="platform 'cpu' has no TF32"):
        choose("cpu").configure_products(True)


def test_the_choice_is_made_once_in_a_process():
    assert megascend.bootstrap("cpu").tf32 is False
    assert megascend.bootstrap("cpu", tf32=False).tf32 is False
    with pytest.raises(ConfigError, match=r"bootstrapped with tf32=False.*first call"):
        megascend.bootstrap("cpu", tf32=True)
