#!/usr/bin/env bash
# Recipes of tinker-cookbook, unmodified but for model and data, against `megascend serve` on this machine.
#
#     bash scripts/test_tinker_cookbook.sh [pytest arguments]
#
# Needs .venv-0.16 (bash scripts/test.sh makes it). tinker-cookbook is put into .venv-tinker/cookbook-VERSION, which sees megascend's
# packages; without tml-renderers, which is on no package index in the version that it asks for, and which no recipe here imports.
# COOKBOOK: version (default: 0.6.1)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv-0.16/bin/python
[ -x "$python" ] || { echo "there is no $python: bash scripts/test.sh makes it" >&2; exit 1; }
version=${COOKBOOK:-0.6.1}
environment=$PWD/.venv-tinker/cookbook-$version
if [ ! -e "$environment/.installed" ]; then
  "$python" -m venv "$environment"
  inside=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$inside/zz-megascend.pth" # behind its own packages
  "$environment/bin/pip" install --quiet chz blobfile tiktoken pyrage termcolor cloudpickle sympy pylatexenc
  "$environment/bin/pip" install --quiet --no-deps "tinker-cookbook==$version"
  touch "$environment/.installed"
fi
export MEGASCEND_TINKER_COOKBOOK=$environment/bin/python OMP_NUM_THREADS=1
"$python" -m pytest -rs -s tests/serve/test_tinker_cookbook.py "$@"
