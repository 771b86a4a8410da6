#!/usr/bin/env bash
# A mixture of experts under FSDP2 on NPROC processes (default 2).
#
#   bash cookbook/fsdp_moe.sh                                                    # small random Qwen3-MoE, CPU or GPUs
#   NPROC=8 bash cookbook/fsdp_moe.sh --model MODEL --precision bf16 --recompute --lr 1e-5
#
# Arguments go to fsdp_moe.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where the small model goes, and
# the output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_moe

if [[ " $* " != *" --model"[\ =]* ]]; then
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --arch qwen3_moe --experts 8
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/fsdp_moe" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" "$here/fsdp_moe.py" "$@"
