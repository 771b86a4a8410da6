#!/usr/bin/env bash
# Four LoRA adapters at once on one frozen model with TP 2 on NPROC processes (default 2).
#
#   bash cookbook/multi_lora.sh                                              # small random Qwen3, CPU or GPUs
#   NPROC=8 bash cookbook/multi_lora.sh --model MODEL --precision bf16 --lr 2e-4
#
# Arguments go to multi_lora.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where the small model goes, and the
# adapters.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_lora

if [[ " $* " != *" --model"[\ =]* ]]; then
  # Wide for its depth: an adapter cannot change the random output projection, and in a narrow one all tokens are alike.
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --layers 2 --hidden 256
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/adapters" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" "$here/multi_lora.py" "$@"
