#!/usr/bin/env bash
# Asynchronous GRPO on sorting digits: NPROC trainer processes (default 1) and a real vLLM in its own environment.
#
#   bash cookbook/async_grpo.sh                                  # the first time installs vLLM into .venv-vllm, 3.5 GB and more
#   NPROC=2 bash cookbook/async_grpo.sh --tensor 2
#   bash cookbook/async_grpo.sh --engine local                   # without vLLM; an --engine vllm needs --vllm-python
#
# With GPUs, trainer processes use the first ones and vLLM the next; with one GPU they share it. CUDA_VISIBLE_DEVICES limits both.
#
# Arguments go to async_grpo.py. PYTHON: interpreter (default: python). MEGASCEND_VLLM_PYTHON: interpreter of an environment that
# has a vLLM and the receiver (pip install ./receiver); VLLM_ENV: where one is made otherwise (default: .venv-vllm).
# MEGASCEND_RUN: where the small model and the results go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_digits
venv=$(realpath -m "${VLLM_ENV:-$here/../.venv-vllm}")

if [[ " $* " != *" --engine"[\ =]* && " $* " != *" --vllm-python"[\ =]* && -z "${MEGASCEND_VLLM_PYTHON:-}" ]]; then
  bash "$here/../scripts/vllm_env.sh" "$venv"
  set -- --vllm-python "$venv/bin/python" "$@"
fi
if [[ " $* " != *" --model"[\ =]* ]]; then
  # vLLM's attention wants heads of 32 or more.
  [ -f "$small/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$small" --layers 3 --hidden 128 --heads 4 --context 64
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/async_grpo" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-1}" "$here/async_grpo.py" "$@"
