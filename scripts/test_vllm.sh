#!/usr/bin/env bash
# Run the tests against a real vLLM on the CPU, in a separate environment.
#
#   bash scripts/test_vllm.sh [pytest arguments]
#
# Creates both environments if they are missing: .venv-0.16 for the tests, .venv-vllm (3.5 GB) for the servers that they start.
#
# MEGASCEND_PYTHON          the tests' interpreter, which has everything installed, instead of .venv-0.16
# MEGASCEND_VLLM_PYTHON     vLLM's interpreter, instead of .venv-vllm
# MEGASCEND_TEST_DEADLINE   seconds after which the whole run is stopped (default: 1800)
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

if [ -n "${MEGASCEND_PYTHON:-}" ]; then
  python=$MEGASCEND_PYTHON
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
else
  prepare_venv .venv-0.16 stack-0-16,test
  python=.venv-0.16/bin/python
fi
if [ -z "${MEGASCEND_VLLM_PYTHON:-}" ]; then
  bash scripts/vllm_env.sh .venv-vllm
  MEGASCEND_VLLM_PYTHON=$PWD/.venv-vllm/bin/python
fi
export MEGASCEND_VLLM_PYTHON

echo "== tests against vLLM: $MEGASCEND_VLLM_PYTHON"
# In sequence: each file starts a server, which takes most of two cores at start-up.
OMP_NUM_THREADS=1 exec timeout --kill-after=30 "${MEGASCEND_TEST_DEADLINE:-1800}" "$python" -m pytest tests/real_vllm "$@"
