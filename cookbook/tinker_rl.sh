#!/usr/bin/env bash
# Reinforcement learning with the Tinker client: sample, grade, learn, repeat.
# Starts `megascend serve` with a small random model, and ends it. Needs: pip install -e '.[serve,stack-0-16]'.
# Arguments go to tinker_rl.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where model and checkpoints go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/tinker_server.sh"
start_server cookbook --precision fp32
"$python" "$here/tinker_rl.py" --model "$model" "$@"
