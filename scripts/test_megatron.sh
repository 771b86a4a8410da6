#!/usr/bin/env bash
# Megatron-Core's own unit tests, unmodified, in one process on the CPU platform, or with --simulated on the simulated NPU.
#   MEGATRON_LM          a checkout of Megatron-LM at the tag of the megatron-core that is installed, e.g. core_v0.16.1
#   MEGASCEND_MINDSPEED  a checkout of MindSpeed, for --simulated
#   PYTHON               default: python3; needs megascend, and what the tests import: pytest-timeout pytest-mock six pybind11
# usage: scripts/test_megatron.sh [--simulated] [PYTEST ARGUMENTS]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM}"
platform=(--platform cpu)
export PYTHONPATH="$root/src:$root/scripts/megatron_tests:$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"
if [ "${1:-}" = --simulated ]; then
  shift
  platform=(--simulated)
  . "$root/scripts/_mindspeed.sh"
fi
export OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=${MASTER_PORT:-6719}
cd "$MEGATRON_LM"
unit=tests/unit_tests
files=($unit/tensor_parallel $unit/fusions $unit/test_{parallel_state,utils,basic,optimizer,num_microbatches_calculator}.py
  $unit/test_{optimizer_param_scheduler,process_groups_config}.py $unit/pipeline_parallel/test_helpers.py
  $unit/transformer/test_{mlp,attention,transformer_layer,transformer_block,module,spec_customization,rope,core_attention}.py
  $unit/models/test_{gpt_model,bert_model}.py)
exec timeout 900 "$PYTHON" -m megascend.cli.main run "${platform[@]}" -- "$PYTHON" -m pytest -p megascend_unit_tests \
  -p no:cacheprovider -o addopts= --timeout 25 -q --continue-on-collection-errors --tb=line -rfEs "${files[@]}" "$@"
