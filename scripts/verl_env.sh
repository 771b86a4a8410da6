#!/usr/bin/env bash
# An environment with verl and megascend in it, for the tests of megascend's engine and checkpoint engine for verl.
#
#   bash scripts/verl_env.sh [DIRECTORY]      default: .venv-verl, where tests/integrations looks (else set MEGASCEND_VERL_PYTHON)
#
# verl is installed without its dependencies, which would bring inference engines, CUDA and an older transformers; the packages
# that its trainers and modules import are listed here. About 3 GB.
# PYTHON and MEGASCEND_TORCH: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-verl}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --no-compile "${MEGASCEND_TORCH:-torch==2.13.0}" "ray>=2.41" "tensordict>=0.8,<=0.10" \
  "transformers>=5.5.3,<5.11" hydra-core codetiming uvicorn fastapi torchdata pandas pyarrow pylatexenc \
  "TransferQueue>=0.1.10,<0.2" pyzmq msgspec cachetools
"$venv/bin/pip" install --quiet --no-compile --no-deps verl==0.9.1
"$venv/bin/pip" install --quiet --no-compile --editable ".[stack-0-16,test]"
"$venv/bin/python" -c "import megascend.integrations.verl_checkpoint_engine, verl; print('verl', verl.__version__)"
