#!/usr/bin/env bash
# Run the test suite on one supported stack, in its own virtual environment.
#
#   bash scripts/test.sh [0.16|0.15] [pytest arguments]
#
# MEGASCEND_PYTHON          use this interpreter, which has everything installed, instead of a virtual environment
# MEGASCEND_TEST_DEADLINE   seconds after which the whole run is stopped (default: 1800)
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

stack=0.16
case ${1:-} in 0.*) stack=$1; shift ;; esac
case $stack in
  0.16 | 0.15) ;;
  *) echo "no stack $stack; there are 0.16 and 0.15" >&2; exit 2 ;;
esac

if [ -n "${MEGASCEND_PYTHON:-}" ]; then
  python=$MEGASCEND_PYTHON
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
else
  prepare_venv ".venv-$stack" "stack-${stack/./-},test"
  python=.venv-$stack/bin/python
fi

echo "== tests on stack $stack"
status=0
OMP_NUM_THREADS=1 timeout --kill-after=30 "${MEGASCEND_TEST_DEADLINE:-1800}" "$python" -m pytest "$@" || status=$?
if [ "$status" = 124 ]; then
  echo "the tests did not end within ${MEGASCEND_TEST_DEADLINE:-1800} s" >&2
fi
exit "$status"
