#!/usr/bin/env bash
# Asynchronous GRPO on sorting digits: NPROC trainer processes (default 1) and a real vLLM on the CPU in its own environment.
#
#   bash cookbook/async_grpo.sh                                  # the first time installs vLLM into .venv-vllm, 3.5 GB
#   NPROC=2 bash cookbook/async_grpo.sh --tensor 2
#   bash cookbook/async_grpo.sh --engine local                   # without vLLM; an --engine vllm needs --vllm-python
#
# Arguments go to async_grpo.py. PYTHON: interpreter (default: python). VLLM_ENV: vLLM's environment (default: .venv-vllm).
# MEGASCEND_RUN: where the small model and the results go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
python=${PYTHON:-python}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
run=${MEGASCEND_RUN:-runs/cookbook}
small=$run/qwen3_digits
venv=$(realpath -m "${VLLM_ENV:-$here/../.venv-vllm}")

if [[ " $* " != *" --engine"[\ =]* ]]; then
  bash "$here/../scripts/vllm_env.sh" "$venv"
  set -- --vllm-python "$venv/bin/python" "$@"
fi
if [[ " $* " != *" --model"[\ =]* ]]; then
  # vLLM's attention on a CPU wants heads of 32 or more.
  [ -f "$small/config.json" ] || "$python" -m megascend.cli.main new-model "$small" --layers 3 --hidden 128 --heads 4 --context 64
  set -- --model "$small" "$@"
fi
[[ " $* " == *" --output"[\ =]* ]] || set -- --output "$run/async_grpo" "$@"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-1}" "$here/async_grpo.py" "$@"
