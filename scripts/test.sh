#!/usr/bin/env bash
# Run the tests on one supported stack, in its own virtual environment.
#
#   bash scripts/test.sh [0.16|0.15] [npu] [pytest arguments]
#   bash scripts/test.sh [0.16|0.15] npu --verify-simulator     the simulator's own tests; notes in tests/simnpu/.verified that they passed
#
# Without "npu": everything but the Ascend path. With it: the Ascend path, in a process of its own on the simulated device,
# with the stand-in for MindSpeed in tests/doubles, or with the real one if MEGASCEND_MINDSPEED names a checkout of the stack's branch.
#
# MEGASCEND_PYTHON          use this interpreter, which has everything installed, instead of a virtual environment
# MEGASCEND_TEST_WORKERS    pytest processes side by side, files of tests divided over them (default: cores + 1, at most 8)
# MEGASCEND_TEST_VERIFIED=1 leave the simulator's own tests out where it is the one that tests/simnpu/.verified notes
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
part=main
if [ "${1:-}" = npu ]; then part=npu; shift; fi

if [ -n "${MEGASCEND_PYTHON:-}" ]; then
  python=$MEGASCEND_PYTHON
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
else
  prepare_venv ".venv-$stack" "stack-${stack/./-},test"
  python=.venv-$stack/bin/python
fi

cores=$(getconf _NPROCESSORS_ONLN)
workers=${MEGASCEND_TEST_WORKERS:-$((cores < 8 ? cores + 1 : 8))}

run_tests() {
  local status=0
  OMP_NUM_THREADS=1 timeout --kill-after=30 "${MEGASCEND_TEST_DEADLINE:-1800}" "$python" -m pytest -n "$workers" "$@" || status=$?
  if [ "$status" = 124 ]; then
    echo "the tests did not end within ${MEGASCEND_TEST_DEADLINE:-1800} s" >&2
  fi
  return "$status"
}

if [ "$part" = main ]; then
  echo "== tests on stack $stack"
  run_tests "$@"
else
  export SIMNPU=1
  echo "== tests of the Ascend path on stack $stack, MindSpeed: ${MEGASCEND_MINDSPEED:-the stand-in in tests/doubles}"
  if [ "${1:-}" = --verify-simulator ]; then
    shift
    if [ "$#" -gt 0 ]; then echo "--verify-simulator runs all of tests/simnpu: no further arguments" >&2; exit 2; fi
    state=$("$python" scripts/simnpu_verified.py --state)
    run_tests tests/simnpu || exit
    exec "$python" scripts/simnpu_verified.py --write "$state"
  fi
  # Two processes: MindSpeed's patches, and whatever has run a backward pass (ranks are forked), stay in a process for good.
  status=0
  if [ -z "${MEGASCEND_TEST_VERIFIED:-}" ] || ! "$python" scripts/simnpu_verified.py; then
    run_tests tests/simnpu "$@" || status=$?
  fi
  run_tests tests/npu "$@" || status=$?
  exit "$status"
fi
