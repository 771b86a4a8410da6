# Sourced by the other scripts: a virtual environment with megascend installed in it.
#
#   prepare_venv DIRECTORY EXTRAS     creates it if needed, installs '.[EXTRAS]' if pyproject.toml or EXTRAS changed
#   prepare_torch DIRECTORY           the first half of that, which may run in parallel for several directories
#
# PYTHON            the interpreter to create it with (default: python3, 3.10 or later)
# MEGASCEND_TORCH   what to install as torch where there is none yet (default: torch==2.13.0)
# Modules are compiled on first import: of 18,000, most never are. Bytecode is always stored, whatever the caller has set;
# otherwise every process would compile torch, transformers and Megatron-Core again.
# pip's own configuration and PIP_* variables apply.

unset PYTHONDONTWRITEBYTECODE

prepare_torch() {
  local venv=$1 python=${PYTHON:-python3}
  if [ ! -x "$venv/bin/python" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "$python is $("$python" --version 2>&1); megascend needs Python 3.10 or later (set PYTHON)" >&2
      return 1
    fi
    echo "creating $venv"
    "$python" -m venv "$venv" || return 1
  fi
  if ! "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    if [ -z "${MEGASCEND_TORCH:-}" ] && ! command -v nvidia-smi > /dev/null; then
      echo "no NVIDIA GPU found; on Linux, PyPI's torch brings CUDA libraries along nevertheless. For the smaller CPU build,"
      echo "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels (see its installation page) and MEGASCEND_TORCH=torch==2.13.0+cpu"
    fi
    "$venv/bin/pip" install --quiet --no-compile "${MEGASCEND_TORCH:-torch==2.13.0}" || return 1
  fi
}

prepare_venv() {
  local venv=$1 extras=$2 stamp
  stamp="$venv/.installed-$(printf '%s\n' "$extras" "${MEGASCEND_TORCH:-}" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
  if [ -e "$stamp" ]; then
    return 0
  fi
  prepare_torch "$venv" || return 1
  echo "installing megascend[$extras] into $venv"
  "$venv/bin/pip" install --quiet --no-compile --editable ".[$extras]" || return 1
  touch "$stamp"
}
