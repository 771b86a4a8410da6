#!/usr/bin/env bash
# Smoke run on Ascend: four LoRA adapters on one frozen model with TP 2 x PP 2 x DP 2, on 8 cards.
#
#   bash cookbook/ascend/multi_lora_npu.sh                                      # small random Qwen3, on cards
#   bash cookbook/ascend/multi_lora_npu.sh --model MODEL --lr 2e-4              # your model
#   megascend simnpu -- bash cookbook/ascend/multi_lora_npu.sh                  # without cards, on the simulated device
#   bash cookbook/ascend/multi_lora_npu.sh --platform cpu                       # without any of Ascend's packages
#
# Arguments go to multi_lora_npu.py. NPROC: processes, one for each card (default: 8). PYTHON: interpreter (default: python).
# MEGASCEND_RUN: where the small model goes. What an Ascend run needs from its shell: environment.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/environment.sh"
python=${PYTHON:-python}
small=${MEGASCEND_RUN:-runs/cookbook}/qwen3_lora_npu

if [[ " $* " != *" --model"[\ =]* ]]; then
  # Wide for its depth: adapters cannot change the random output projection, and in a narrow one all tokens are alike.
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --arch qwen3 --layers 2 --hidden 256
  set -- --model "$small" "$@"
fi
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" "$here/multi_lora_npu.py" "$@"
