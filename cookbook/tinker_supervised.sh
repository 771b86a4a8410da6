#!/usr/bin/env bash
# Supervised learning with the Tinker client: capitals of countries, asked for afterwards.
# Starts `megascend serve` with a small random model, and ends it. Needs: pip install -e '.[serve,stack-0-16]'.
# Arguments go to tinker_supervised.py. PYTHON: interpreter (default: python). MEGASCEND_RUN: where model and checkpoints go.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/tinker_server.sh"
start_server cookbook --precision fp32
"$python" "$here/tinker_supervised.py" --model "$model" "$@"
