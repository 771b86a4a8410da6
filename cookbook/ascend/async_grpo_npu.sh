#!/usr/bin/env bash
# Asynchronous GRPO on 8 NPUs: 4 train (TP 2 x DP 2), 4 roll out.
#
# On cards, with a vllm-ascend and megascend's receiver (pip install ./receiver) in an environment of its own:
#   export WEIGHTWIRE_KEY_FILE=key                      # python -c 'from weightwire.keys import write_key; write_key("key")'
#   for card in 4 5 6 7; do ASCEND_RT_VISIBLE_DEVICES=$card VLLM_PYTHON -m weightwire.vllm --model MODEL --port 800$card & done
#   ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 bash cookbook/ascend/async_grpo_npu.sh --model MODEL \
#       --engine http://127.0.0.1:8004 http://127.0.0.1:8005 http://127.0.0.1:8006 http://127.0.0.1:8007
#
# Without cards, and without vLLM, four engines of transformers on the CPU take its place:
#   PYTHONPATH=MINDSPEED megascend simnpu -- bash cookbook/ascend/async_grpo_npu.sh
#
# Arguments go to async_grpo.py. PYTHON: interpreter (default: python). NPROC: trainer processes (default: 4).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/environment.sh"
python=${PYTHON:-python}
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_digits

if [[ " $* " != *" --model"[\ =]* ]]; then
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --layers 3 --hidden 128 --heads 4 --context 64
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/async_grpo_npu" "$@"
[[ " $* " == *" --engine"[\ =]* ]] || set -- --engine local local local local "$@"
[[ " $* " == *" --platform"[\ =]* ]] || set -- --platform npu "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-4}" "$here/../async_grpo.py" --tensor 2 "$@"
