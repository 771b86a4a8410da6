#!/usr/bin/env bash
# Recipes of tinker-cookbook, unmodified but for model and data, against `megascend serve` on this machine.
#
#     bash scripts/test_tinker_cookbook.sh [pytest arguments]
#
# tinker-cookbook is installed into a separate environment, cookbook-VERSION, which sees megascend's packages; without
# tml-renderers, whose required version is on no package index, and which no recipe here imports.
#
# COOKBOOK              version (default: 0.6.1)
# MEGASCEND_PYTHON      the interpreter, which has everything installed, instead of .venv-0.16 (bash scripts/test.sh makes it)
# TINKER_ENVIRONMENTS   where the environment is made and kept (default: .venv-tinker)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_tinker_venv.sh

version=${COOKBOOK:-0.6.1}
environment=$environments/cookbook-$version
if [ ! -e "$environment/.installed" ]; then
  make_environment "$environment"
  "$environment/bin/pip" install --quiet chz blobfile tiktoken pyrage termcolor cloudpickle sympy pylatexenc
  "$environment/bin/pip" install --quiet --no-deps "tinker-cookbook==$version"
  touch "$environment/.installed"
fi
export MEGASCEND_TINKER_COOKBOOK=$environment/bin/python OMP_NUM_THREADS=1
"$python" -m pytest -rs -s tests/apps/serve/test_tinker_cookbook.py "$@"
