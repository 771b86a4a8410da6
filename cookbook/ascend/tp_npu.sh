#!/usr/bin/env bash
# Smoke run on Ascend: a dense model with TP 2 x PP 2 x DP 2 and the distributed optimizer, on 8 cards.
#
#   bash cookbook/ascend/tp_npu.sh                                      # small random Qwen3, on cards
#   bash cookbook/ascend/tp_npu.sh --model MODEL --lr 1e-5              # your model
#   megascend simnpu -- bash cookbook/ascend/tp_npu.sh                  # without cards, on the simulated device
#   bash cookbook/ascend/tp_npu.sh --platform cpu                       # without any of Ascend's packages
#
# Arguments go to tp_npu.py. NPROC: processes, one for each card (default: 8). PYTHON: interpreter (default: python).
# MEGASCEND_RUN: where the small model goes. What an Ascend run needs from its shell: environment.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/environment.sh"
python=${PYTHON:-python}
small=${MEGASCEND_RUN:-runs/cookbook}/qwen3_npu

if [[ " $* " != *" --model"[\ =]* ]]; then
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --arch qwen3 --layers 2 --hidden 64
  set -- --model "$small" "$@"
fi
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" "$here/tp_npu.py" "$@"
