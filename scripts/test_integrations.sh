#!/usr/bin/env bash
# Run the tests of megascend inside programs of others, each in an environment of its own.
#
#   bash scripts/test_integrations.sh [PART] [pytest arguments]        default: every part, one after the other
#
# A part is a function part_NAME below: it makes its environment if it is not there, and runs its tests.
#
# MEGASCEND_VERL_PYTHON     verl's interpreter, which has everything installed, instead of .venv-verl
# MEGASCEND_TEST_DEADLINE   seconds after which a part is stopped (default: 1800)
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

run_tests() { # PYTHON pytest-arguments
  OMP_NUM_THREADS=1 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" \
    timeout --kill-after=30 "${MEGASCEND_TEST_DEADLINE:-1800}" "$1" -m pytest -p no:cacheprovider "${@:2}"
}

# verl: its trainers on megascend's engine, and the checkpoint engine
part_verl() {
  if [ -z "${MEGASCEND_VERL_PYTHON:-}" ]; then
    bash scripts/verl_env.sh .venv-verl
    MEGASCEND_VERL_PYTHON=$PWD/.venv-verl/bin/python
  fi
  export MEGASCEND_VERL_PYTHON
  run_tests "$MEGASCEND_VERL_PYTHON" tests/integrations/verl tests/integrations/test_verl_checkpoint_engine.py "$@"
}

parts=$(declare -F | sed -n 's/^declare -f part_//p')
if [ $# -gt 0 ] && [[ "$1" != -* ]] && [[ "$1" != */* ]]; then
  if ! grep -qx "$1" <<< "$parts"; then
    echo "no part $1; there are: $(tr '\n' ' ' <<< "$parts")" >&2
    exit 2
  fi
  parts=$1
  shift
fi
for part in $parts; do
  echo "== $part"
  "part_$part" "$@"
done
