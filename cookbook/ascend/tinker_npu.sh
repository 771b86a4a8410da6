#!/usr/bin/env bash
# `megascend serve` on 8 cards, TP 2 x PP 2 x DP 2, and two tenants who train on it at once with the Tinker client.
#
#   bash cookbook/ascend/tinker_npu.sh                                         # small random Qwen3, on cards
#   PYTHONPATH=MINDSPEED megascend simnpu -- bash cookbook/ascend/tinker_npu.sh  # without cards, on the simulated device
#   PLATFORM=cpu bash cookbook/ascend/tinker_npu.sh                            # without any of Ascend's packages
#
# Needs: pip install -e '.[serve,stack-0-16]'. Arguments go to tinker_two_tenants.py. NPROC: processes, one for each card (default: 8).
# PYTHON: interpreter (default: python). MEGASCEND_RUN: where model and checkpoints go. PRECISION: default bf16.
# The last line is SMOKE OK if both tenants learned, in shared batches.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller
source "$here/environment.sh"
source "$here/../tinker_server.sh"
start_server ada,ben --precision "${PRECISION:-bf16}" --nproc "${NPROC:-8}" --tensor 2 --pipeline 2 \
  --set "platform=${PLATFORM:-npu}" --set window_ms=50
if ! "$python" "$here/../tinker_two_tenants.py" --model "$model" "$@"; then
  echo "SMOKE FAILED"
  exit 1
fi
echo "SMOKE OK"
