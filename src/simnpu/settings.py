"""Names of the environment variables that set the simulated device up."""

ACTIVE_VARIABLE = "SIMNPU"  # 1 in every process that the simulated device was put in front of
DEVICES_VARIABLE = "SIMNPU_DEVICES"
OBJECTS_VARIABLE = "SIMNPU_OBJECTS"
STRICT_VARIABLE = "SIMNPU_STRICT"  # 1: types that torch_npu does not list for a 910B are errors
LOG_VARIABLE = "SIMNPU_LOG"
NAME_VARIABLE = "SIMNPU_DEVICE_NAME"  # a chip's name, e.g. Ascend910B3, for programs that ask for one
PYTHON_VARIABLE = "SIMNPU_PYTHON"  # the interpreter that `npu-smi` runs on
