#!/usr/bin/env bash
# Two tenants at once with the Tinker client, with different ranks and learning rates, in shared batches.
# Starts `megascend serve` with a small random model, and ends it. Needs: pip install -e '.[serve,stack-0-16]'.
# Arguments go to tinker_two_tenants.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where model and checkpoints go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/tinker_server.sh"
start_server ada,ben --precision fp32 --set window_ms=50 # ms; clients on this machine need a few between two steps
"$python" "$here/tinker_two_tenants.py" --model "$model" "$@"
