#!/usr/bin/env bash
# Megatron-Core's own unit tests, unmodified, on the CPU platform, or with --simulated on the simulated NPU.
#   MEGATRON_LM          a checkout of Megatron-LM at the tag of the megatron-core that is installed, e.g. core_v0.16.1
#   MEGASCEND_MINDSPEED  a checkout of MindSpeed, for --simulated
#   PYTHON               default: python3; needs megascend, and what the tests import: pip install -r scripts/megatron_tests/requirements.txt
#   RESULTS              a new folder for the outcome of each test (default: a temporary one)
#   DEADLINE             seconds after which a file is stopped (default: 600)
#   FILES                files or folders below the checkout's tests/unit_tests, instead of those below
# usage: scripts/test_megatron.sh [--simulated] [--ranks N] [PYTEST ARGUMENTS]
# The ranks are restarted for each file, so that a dead rank or a desynchronised group does not affect other files.
# Finally prints the counts, and every failure by reason (scripts/megatron_tests/count.py). Failed tests do not affect the exit code.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM}"
platform=(--platform cpu) ranks=1
while :; do
  case "${1:-}" in
    --simulated) platform=(--simulated) ;;
    --ranks) ranks=$2; shift ;;
    *) break ;;
  esac
  shift
done
export PYTHONPATH="$root/src:$root/scripts/megatron_tests:$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"
if [ "${platform[0]}" = --simulated ]; then
  simulated=1 stand_in=
  . "$root/scripts/npu/_ascend.sh"
fi
export MEGASCEND_UNIT_RESULTS=${RESULTS:-$(mktemp -d)}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE  # otherwise every process of every file would compile Megatron-LM again
mkdir -p "$MEGASCEND_UNIT_RESULTS"
cd "$MEGATRON_LM"
unit=tests/unit_tests
chosen=(tensor_parallel fusions test_{parallel_state,utils,basic,optimizer,num_microbatches_calculator}.py
  test_{optimizer_param_scheduler,process_groups_config}.py pipeline_parallel/test_helpers.py
  transformer/test_{mlp,attention,transformer_layer,transformer_block,module,spec_customization,rope,core_attention}.py
  models/test_{gpt_model,bert_model}.py)
[ -z "${FILES:-}" ] || read -ra chosen <<< "$FILES"
mapfile -t files < <(cd "$unit" && find "${chosen[@]}" -name 'test_*.py' | sort)
launch=("$PYTHON" -m torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node "$ranks" -m)
for file in "${files[@]}"; do
  echo "== $file"
  timeout --kill-after=30 "${DEADLINE:-600}" "$PYTHON" -m megascend.apps.cli.main run "${platform[@]}" -- "${launch[@]}" pytest \
    -p megascend_unit_tests -p no:cacheprovider -o addopts= --timeout 120 -q --continue-on-collection-errors --tb=line \
    "$unit/$file" "$@" > "$MEGASCEND_UNIT_RESULTS/${file//\//.}.log" 2>&1 || echo "ended with $?"
done
"$PYTHON" "$root/scripts/megatron_tests/count.py" "$MEGASCEND_UNIT_RESULTS"
