#!/usr/bin/env bash
# Long packed sequences with CP 2 on NPROC processes (default 2).
#
#   bash cookbook/long_context_cp.sh                                             # small random Qwen3, CPU or GPUs
#   NPROC=8 bash cookbook/long_context_cp.sh --model MODEL --context 8 --length 131072 --precision bf16 --recompute --lr 1e-5
#
# Arguments go to long_context_cp.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where the small model goes, and
# the output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_long

if [[ " $* " != *" --model"[\ =]* ]]; then
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --layers 2 --hidden 64 --context 65536
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/long_context_cp" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" "$here/long_context_cp.py" "$@"
