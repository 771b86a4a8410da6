#!/usr/bin/env bash
# An environment with Ray Train and megascend in it, for the drivers that `megascend job ray` writes.
#
#   bash scripts/ray_env.sh [DIRECTORY]       default: .venv-ray, where tests/integrations looks (else set MEGASCEND_RAY_PYTHON)
#
# Every node of a Ray cluster needs such an environment at the same path. About 2 GB with torch's CPU build.
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

venv=${1:-.venv-ray}
prepare_venv "$venv" stack-0-16,test
"$venv/bin/pip" install --quiet --no-compile "ray[train]>=2.47"
"$venv/bin/python" -c "import megascend, ray.train.torch; print('Ray', ray.__version__)"
