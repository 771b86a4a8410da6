#!/usr/bin/env bash
# From plain Python to a trained model: install, train a small Qwen3 on 2 processes, and show its answers.
#
#   bash scripts/quickstart.sh
#
# MEGASCEND_VENV    where to install (default: .venv-quickstart)
# MEGASCEND_RUN     where model and results go (default: runs/quickstart); replaced if it exists
# MEGASCEND_TORCH   as in scripts/_venv.sh (default: torch, the newest that pyproject.toml admits, as by README's line)
# PYTHON and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

venv=${MEGASCEND_VENV:-.venv-quickstart}
run=${MEGASCEND_RUN:-runs/quickstart}
data=examples/quickstart/chat.jsonl

export MEGASCEND_TORCH=${MEGASCEND_TORCH:-torch}

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "Install"
prepare_venv "$venv" stack-0-16,track
bin=$(cd "$venv/bin" && pwd)
export PATH="$bin:$PATH"
SECONDS=0

step "Check this machine: megascend doctor"
megascend doctor

step "A small random Qwen3: megascend new-model"
rm -rf "$run/model"
megascend new-model "$run/model" --arch qwen3 --hidden 128 --layers 4 --heads 4 --kv-heads 2

step "Train it with tensor parallelism on 2 processes: megascend train"
megascend train examples/quickstart/quickstart.yaml --nproc 2 --overwrite \
  --set model="$run/model" --set output="$run/run"

step "Ask it, with plain transformers"
python scripts/quickstart_answers.py "$run/run/hf" "$data"

step "Done"
echo "metrics: $run/run/metrics.jsonl   plot: $run/run/metrics.png   model: $run/run/hf"
