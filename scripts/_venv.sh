# Sourced by the other scripts: a virtual environment with megascend installed in it.
#
#   prepare_venv DIRECTORY EXTRAS...  creates it if needed, installs '.[EXTRAS]' if pyproject.toml or EXTRAS changed; several EXTRAS
#                                     are installed at once, and each is noted, so that a later call may name one of them
#   prepare_torch DIRECTORY           the first half of that, which may run in parallel for several directories
#   python_of 3.MINOR                 prints an interpreter of that version or later
#
# MINIMUM_PYTHON    the oldest version that the environment may have (default: 3.10)
# PYTHON            the interpreter to create it with (default: the first that starts and is new enough of python3, python3.12,
#                   python3.13, python3.14 and pyenv's versions)
# MEGASCEND_TORCH   what to install as torch where there is none yet (default: torch==2.13.0); "torch": the newest that pyproject.toml admits
# Modules are compiled on first import: of 18,000, most never are. Bytecode is always stored, whatever the caller has set;
# otherwise every process would compile torch, transformers and Megatron-Core again.
# pip's own configuration and PIP_* variables apply.

unset PYTHONDONTWRITEBYTECODE

# A name on PATH may be a shim of pyenv's that starts nothing while its version is not selected: each candidate is started.
python_of() {
  local minimum=$1 python versions=()
  if [ -n "${PYTHON:-}" ]; then
    if is_python "$PYTHON" "$minimum"; then
      echo "$PYTHON"
      return 0
    fi
    echo "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | head -n 1); Python $minimum or later is needed here" >&2
    return 1
  fi
  if command -v pyenv > /dev/null; then
    mapfile -t versions < <(pyenv versions --bare | sort -V | sed "s|.*|$(pyenv root)/versions/&/bin/python|")
  fi
  for python in python3 python3.12 python3.13 python3.14 "${versions[@]}"; do
    if is_python "$python" "$minimum"; then
      echo "$python"
      return 0
    fi
  done
  echo "Python $minimum or later is needed, and none starts here (tried python3, python3.12 to python3.14 and pyenv's versions). Install" \
    "one, for example with 'apt-get install python3-venv' on a distribution that has it, 'pyenv install 3.12' or" \
    "'uv python install 3.12', and set PYTHON to it" >&2
  return 1
}

is_python() { # COMMAND 3.MINOR
  "$1" -c 'import sys; sys.exit(sys.version_info < tuple(map(int, sys.argv[1].split("."))))' "$2" 2> /dev/null
}

prepare_torch() {
  local venv=$1 python torch=${MEGASCEND_TORCH:-torch==2.13.0}
  if [ ! -x "$venv/bin/python" ]; then
    python=$(python_of "${MINIMUM_PYTHON:-3.10}") || return 1
    echo "creating $venv with $python"
    "$python" -m venv "$venv" || return 1
  fi
  if ! "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    if [[ $torch != *+cpu ]] && ! command -v nvidia-smi > /dev/null; then
      echo "no NVIDIA GPU found; on Linux, PyPI's torch brings CUDA libraries along nevertheless. For the smaller CPU build,"
      echo "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels (see its installation page) and MEGASCEND_TORCH=torch==2.13.0+cpu"
    fi
    [ "$torch" != torch ] || return 0  # megascend's own requirements bring it, within their bounds
    "$venv/bin/pip" install --quiet --no-compile "$torch" || return 1
  fi
}

prepare_venv() {
  local venv=$1 extras stamp stamps=() missing=0
  shift
  for extras in "$@"; do
    stamp="$venv/.installed-$(printf '%s\n' "$extras" "${MEGASCEND_TORCH:-}" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
    stamps+=("$stamp")
    [ -e "$stamp" ] || missing=1
  done
  if [ "$missing" = 0 ]; then
    return 0
  fi
  prepare_torch "$venv" || return 1
  extras=$(IFS=,; echo "$*")
  echo "installing megascend[$extras] into $venv"
  "$venv/bin/pip" install --quiet --no-compile --editable ".[$extras]" || return 1
  touch "${stamps[@]}"
}
