#!/usr/bin/env bash
# Run the tests on one supported stack, in its own virtual environment.
#
#   bash scripts/test.sh                     what CI runs on stack 0.16 for a change of the backend: its tests and the core of the
#                                            applications' (scripts/changed_rooms.py), then the Ascend path on the simulated device
#   bash scripts/test.sh --full              the applications' tests, too
#   bash scripts/test.sh --quick             about a minute of tests of pure functions, for while you work
#   bash scripts/test.sh --nightly           everything, the long tests too
#   bash scripts/test.sh 0.19 --differences  what CI runs on the newest stack: tests with the marker difference
#   bash scripts/test.sh [STACK] [main|npu] [--quick|--full|--differences|--nightly] [pytest arguments]
#                                            STACK: 0.19, 0.18, 0.16 (the default) or 0.15
#   bash scripts/test.sh [0.16|0.15] npu --verify-simulator     the simulator's own tests; notes in tests/simnpu/.verified that they passed
#
# main is everything but the Ascend path; npu is the Ascend path, in processes of its own on the simulated device, with the stand-ins
# for Ascend's packages in tests/doubles: MindSpeed, and from stack 0.18 on MegatronAdaptor and TransformerEngineNPU. If
# MEGASCEND_MINDSPEED names a checkout of the stack's branch, the real MindSpeed is used; stack 0.19 has none.
# Without either, both run; with pytest arguments, main. CONTRIBUTING.md says what runs when. Stacks 0.19 and 0.18 need Python 3.12;
# the simulator's own tests run there at night only.
#
# MEGASCEND_OTHER_STACK_PYTHON  an interpreter with another stack, with which checkpoints are exchanged (tests/training/checkpoint/test_across_stacks.py);
#                           default: on other stacks that of .venv-0.16, if there is one
# MEGASCEND_PYTHON          use this interpreter, which has everything installed, instead of a virtual environment
# MEGASCEND_TEST_WORKERS    pytest processes side by side, files of tests divided over them (default: one a core, at most 7)
# MEGASCEND_TEST_DEADLINE   seconds after which a part is stopped (default: 3600; --nightly: 28800)
# MEGASCEND_TEST_RETRIES    run up to so many failed tests again, alone; those that pass then are listed as flaky (default: 0; CI: 3)
# MEGASCEND_TEST_VERIFIED   1 leaves the simulator's own tests out where it is the one that tests/simnpu/.verified notes (default: 1;
#                           --nightly: 0)
# MEGASCEND_PARITY_STEPS    optimizer steps of parity's trajectories (default: 4; --nightly: 10)
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

stack=0.16 parts=() suite=standard later=0
case ${1:-} in 0.*) stack=$1; shift ;; esac
case $stack in
  0.16 | 0.15) ;;
  0.19 | 0.18) MINIMUM_PYTHON=3.12 later=1 ;;  # megatron-core requires it from 0.17 on
  *) echo "no stack $stack; there are 0.19, 0.18, 0.16 and 0.15" >&2; exit 2 ;;
esac
case ${1:-} in main | npu) parts=("$1"); shift ;; esac
case ${1:-} in --quick | --full | --differences | --nightly | --verify-simulator) suite=${1#--}; shift ;; esac
if [ "${#parts[@]}" = 0 ]; then
  parts=(main)
  [ "$#" -gt 0 ] || [ "$suite" = quick ] || parts=(main npu)
fi
case $suite in
  quick) filter=(-m "not nightly and not slow and not torchrun") deadline=3600 verified=1 steps=4 ;;
  differences) filter=(-m difference) deadline=3600 verified=1 steps=4 ;;
  nightly) filter=() deadline=28800 verified=0 steps=10 ;;
  *) filter=(-m "not nightly") deadline=3600 verified=1 steps=4 ;;
esac
export MEGASCEND_PARITY_STEPS=${MEGASCEND_PARITY_STEPS:-$steps}
deadline=${MEGASCEND_TEST_DEADLINE:-$deadline}
verified=${MEGASCEND_TEST_VERIFIED:-$verified}

if [ -n "${MEGASCEND_PYTHON:-}" ]; then
  python=$MEGASCEND_PYTHON
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
else
  prepare_venv ".venv-$stack" "stack-${stack/./-},test"
  python=.venv-$stack/bin/python
fi

if [ "$stack" != 0.16 ] && [ -z "${MEGASCEND_OTHER_STACK_PYTHON:-}" ] && [ -x .venv-0.16/bin/python ]; then
  export MEGASCEND_OTHER_STACK_PYTHON=$PWD/.venv-0.16/bin/python
fi

cores=$(getconf _NPROCESSORS_ONLN)
# One worker more than cores made ranks wait for each other longer than it filled gaps.
workers=${MEGASCEND_TEST_WORKERS:-$((cores < 7 ? cores : 7))}

run_pytest() {
  OMP_NUM_THREADS=1 timeout --kill-after=30 "$deadline" "$python" -m pytest "${filter[@]}" "$@"
}

run_tests() {
  local status=0 start=$SECONDS cache
  cache=$(mktemp -d)
  run_pytest -n "$workers" -o cache_dir="$cache" "$@" || status=$?
  if [ "$status" = 5 ] && [[ "$*" == *--concerned* ]]; then status=0; fi  # a change may concern none of these tests
  if [ "$status" = 1 ] && retry_failed "$cache" "$@"; then status=0; fi
  rm -rf "$cache"
  if [ "$status" = 124 ]; then
    echo "stopped: the tests did not end within $deadline s (MEGASCEND_TEST_DEADLINE)" >&2
  fi
  echo "(took $((SECONDS - start)) s)"
  return "$status"
}

# retry_failed CACHE ARGUMENTS: run the tests again that failed, one after the other.
retry_failed() {
  local cache=$1 names
  shift
  names=$("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache/v/cache/lastfailed")
  [ "$(wc -l <<< "$names")" -le "${MEGASCEND_TEST_RETRIES:-0}" ] || return 1
  echo "== once more, alone: $names"
  run_pytest --last-failed -o cache_dir="$cache" "$@" || return 1
  sed 's/^/flaky, failed beside other tests and passed alone: /' <<< "$names"
}

# files_marked MARKER FOLDER: the files with tests of that marker, so that the others need not be imported.
files_marked() {
  local without=()
  [ -n "${MEGASCEND_OTHER_STACK_PYTHON:-}" ] || without=(--exclude=test_across_stacks.py)  # it needs one
  grep -rl --include='test_*.py' "${without[@]}" "pytest\.mark\.$1" "$2" | sort
}

run_main() {
  local files=()
  case $suite in
    differences) mapfile -t files < <(files_marked difference tests | grep -v '^tests/npu/') ;;
    standard) [ "$#" -gt 0 ] || files=(--concerned "$("$python" scripts/changed_rooms.py --backend)") ;;
  esac
  echo "== tests on stack $stack"
  run_tests "${files[@]}" "$@"
}

# Two processes: MindSpeed's patches, and whatever has run a backward pass (ranks are forked), stay in a process for good.
run_npu() {
  local status=0 files=(tests/npu)
  export SIMNPU=1
  echo "== tests of the Ascend path on stack $stack, MindSpeed: ${MEGASCEND_MINDSPEED:-none but what is in tests/doubles}"
  if [ "$suite" = differences ]; then
    mapfile -t files < <(files_marked difference tests/npu)
  # .verified notes the Python of stack 0.16, so that on a later stack its tests would always run.
  elif [ "$verified" != 1 ] || { [ "$later" = 0 ] && ! "$python" scripts/npu/simnpu_verified.py; }; then
    run_tests tests/simnpu "$@" || status=$?
  fi
  run_tests "${files[@]}" "$@" || status=$?
  return "$status"
}

if [ "$suite" = verify-simulator ]; then
  if [ "${parts[*]}" != npu ] || [ "$#" -gt 0 ]; then
    echo "--verify-simulator runs all of tests/simnpu: bash scripts/test.sh [0.16|0.15] npu --verify-simulator" >&2
    exit 2
  fi
  export SIMNPU=1
  filter=()
  state=$("$python" scripts/npu/simnpu_verified.py --state)
  run_tests tests/simnpu || exit
  exec "$python" scripts/npu/simnpu_verified.py --write "$state"
fi

if [ "$suite" = quick ] && [ "$#" = 0 ]; then
  # Packages of pure functions, whose tests start hardly any process.
  set -- tests/config tests/training/batch tests/apps/data tests/models/checkpoint_files tests/runtime/io tests/runtime/topology tests/test_rooms.py
fi

failed=()
for part in "${parts[@]}"; do
  ("run_$part" "$@") || failed+=("$part")
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "FAILED: ${failed[*]}" >&2
  exit 1
fi
