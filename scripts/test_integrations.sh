#!/usr/bin/env bash
# Run the tests of megascend's integrations with third-party frameworks, each in a separate environment.
#
#   bash scripts/test_integrations.sh [PART] [pytest arguments]        default: every part, in order
#
# A part is a function part_NAME below: it creates its environment if it is missing, and runs its tests.
#
# MEGASCEND_VERL_PYTHON     verl's interpreter, which has everything installed, instead of .venv-verl
# MEGASCEND_TWINKLE_PYTHON, MEGASCEND_BRIDGES_PYTHON, MEGASCEND_MEGATRON_BRIDGE_PYTHON, MEGASCEND_SKYRL_PYTHON,
# MEGASCEND_RAY_PYTHON, MEGASCEND_SKYPILOT_PYTHON    likewise
# MEGASCEND_VLLM_PYTHON     the interpreter of a vLLM (scripts/vllm_env.sh), with which verl's rollouts are tested, too
# MEGASCEND_MEGATRON_BRIDGE  a checkout of Megatron-Bridge (tag v0.3.1), whose conversion example is then run, too
# MEGASCEND_TEST_DEADLINE   seconds after which a part is stopped (default: 3600)
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_venv.sh

# megascend's requirements except torch: installed separately, so that they do not override a part's pins.
MEGASCEND_REQUIRES=(megatron-core==0.16.1 mcore-bridge==1.6.5 datasets pillow safetensors filelock httpx xxhash packaging psutil
  "pydantic>=2.7" pyyaml "typer>=0.19" "rich>=13")
TWINKLE=(twinkle-kit==0.5.1 peft==0.19.0 "numpy<2.3")
BRIDGES=(transformers "peft==0.19.*")
# megatron-bridge requires Transformer Engine and other packages that need CUDA to build: installed with these requirements only.
MEGATRON_BRIDGE=(transformers==4.57.6 peft==0.19.1 accelerate einops "hydra-core>1.3,<=1.3.2" "omegaconf>=2.3" regex six tensorboard tqdm)
SKYRL=("transformers>=5.6.1,<=5.8.0" peft==0.19.1 "fastapi[standard]" sqlmodel "sqlalchemy[asyncio]" aiosqlite cloudpathlib
  tinker==0.16.1 starlette zstandard protobuf)

run_tests() { # PYTHON pytest-arguments
  OMP_NUM_THREADS=1 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" \
    timeout --kill-after=30 "${MEGASCEND_TEST_DEADLINE:-3600}" "$1" -m pytest -p no:cacheprovider "${@:2}"
}

# verl: its trainers on megascend's engine, and the checkpoint engine
part_verl() {
  if [ -z "${MEGASCEND_VERL_PYTHON:-}" ]; then
    bash scripts/verl_env.sh .venv-verl
    MEGASCEND_VERL_PYTHON=$PWD/.venv-verl/bin/python
  fi
  export MEGASCEND_VERL_PYTHON
  run_tests "$MEGASCEND_VERL_PYTHON" tests/integrations/verl tests/integrations/test_verl_checkpoint_engine.py "$@"
}

make_env() { # DIRECTORY PYTHON requirements: with their dependencies
  local venv=$1 python=$2
  shift 2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --no-compile "${MEGASCEND_TORCH:-torch==2.13.0}" pytest "$@"
  "$venv/bin/pip" install --quiet --no-compile --no-deps --editable .
}

# twinkle: its Megatron models on the CPU platform
part_twinkle() {
  if [ -z "${MEGASCEND_TWINKLE_PYTHON:-}" ]; then
    make_env .venv-twinkle "$(python_of 3.10)" "${TWINKLE[@]}" "${MEGASCEND_REQUIRES[@]}"
    MEGASCEND_TWINKLE_PYTHON=$PWD/.venv-twinkle/bin/python
  fi
  run_tests "$MEGASCEND_TWINKLE_PYTHON" tests/integrations/twinkle "$@"
}

# mcore-bridge: a model in, trained, out
part_bridges() {
  if [ -z "${MEGASCEND_BRIDGES_PYTHON:-}" ]; then
    make_env .venv-bridges "$(python_of 3.10)" "${BRIDGES[@]}" "${MEGASCEND_REQUIRES[@]}"
    MEGASCEND_BRIDGES_PYTHON=$PWD/.venv-bridges/bin/python
  fi
  run_tests "$MEGASCEND_BRIDGES_PYTHON" tests/integrations/bridges "$@"
}

# megatron-bridge: a model in, trained, out, without mcore-bridge
part_megatron_bridge() {
  if [ -z "${MEGASCEND_MEGATRON_BRIDGE_PYTHON:-}" ]; then
    local each requires=()
    for each in "${MEGASCEND_REQUIRES[@]}"; do
      [[ $each == mcore-bridge* ]] || requires+=("$each")
    done
    make_env .venv-megatron-bridge "$(python_of 3.10)" "${MEGATRON_BRIDGE[@]}" "${requires[@]}"
    .venv-megatron-bridge/bin/pip install --quiet --no-compile --no-deps megatron-bridge==0.3.1
    MEGASCEND_MEGATRON_BRIDGE_PYTHON=$PWD/.venv-megatron-bridge/bin/python
  fi
  run_tests "$MEGASCEND_MEGATRON_BRIDGE_PYTHON" tests/integrations/megatron_bridge "$@"
}

# SkyRL: its Tinker server on megascend
part_skyrl() {
  if [ -z "${MEGASCEND_SKYRL_PYTHON:-}" ]; then
    local python
    python=$(python_of 3.12) || return 1  # which SkyRL 0.3.0 needs
    make_env .venv-skyrl "$python" "${SKYRL[@]}" "${MEGASCEND_REQUIRES[@]}"
    .venv-skyrl/bin/pip install --quiet --no-compile --no-deps skyrl==0.3.0
    MEGASCEND_SKYRL_PYTHON=$PWD/.venv-skyrl/bin/python
  fi
  run_tests "$MEGASCEND_SKYRL_PYTHON" tests/integrations/skyrl "$@"
}

# job files: Ray Train runs one, SkyPilot checks one
part_jobs() {
  if [ -z "${MEGASCEND_RAY_PYTHON:-}" ]; then
    bash scripts/ray_env.sh .venv-ray
    MEGASCEND_RAY_PYTHON=$PWD/.venv-ray/bin/python
  fi
  if [ -z "${MEGASCEND_SKYPILOT_PYTHON:-}" ]; then
    local python
    python=$(python_of 3.10) || return 1
    [ -x .venv-skypilot/bin/python ] || "$python" -m venv .venv-skypilot
    .venv-skypilot/bin/pip install --quiet --no-compile "skypilot==0.14.1"
    MEGASCEND_SKYPILOT_PYTHON=$PWD/.venv-skypilot/bin/python
  fi
  export MEGASCEND_SKYPILOT_PYTHON
  run_tests "$MEGASCEND_RAY_PYTHON" tests/integrations/test_job_environments.py "$@"
}

parts=$(declare -F | sed -n 's/^declare -f part_//p')
if [ $# -gt 0 ] && [[ "$1" != -* ]] && [[ "$1" != */* ]]; then
  if ! grep -qx "$1" <<< "$parts"; then
    echo "no part $1; there are: $(tr '\n' ' ' <<< "$parts")" >&2
    exit 2
  fi
  parts=$1
  shift
fi
for part in $parts; do
  echo "== $part"
  "part_$part" "$@"
done
