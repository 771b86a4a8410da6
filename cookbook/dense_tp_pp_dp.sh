#!/usr/bin/env bash
# A dense model with TP 2 x PP 2 on NPROC processes (default 4); data parallelism takes the rest of them.
#
#   bash cookbook/dense_tp_pp_dp.sh                                          # small random Qwen3, CPU or GPUs
#   NPROC=8 bash cookbook/dense_tp_pp_dp.sh --model MODEL --precision bf16 --lr 1e-5
#
# Arguments go to dense_tp_pp_dp.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where the small model goes, and
# the output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3

if [[ " $* " != *" --model"[\ =]* ]]; then
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --arch qwen3 --layers 4
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/dense_tp_pp_dp" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-4}" "$here/dense_tp_pp_dp.py" "$@"
