#!/usr/bin/env bash
# Build wheel and source distribution from the commit, and test them in empty environments: one for each extra.
#
#   bash scripts/test_release.sh [EXTRA...]       default: none, track, wandb, swanlab, trackio, mlflow, stack-0-16, stack-0-15
#   bash scripts/test_release.sh sdist            check that pip builds a wheel with the same files from the source distribution
#   bash scripts/test_release.sh container        run the steps of containers/Containerfile.cpu in an empty environment instead of an image;
#                                                 TORCH and TORCH_INDEX as for the container file
#
# "none" is the wheel without an extra. In each environment: pip check, megascend --version, doctor, and two steps of training on a
# model that the command makes, from a directory where no source lies; with the extra's tracker, offline. Extras cuda and npu need their devices' machines: name them there.
#
# PYTHON, MEGASCEND_TORCH and pip's settings: see scripts/_venv.sh
# MEGASCEND_RELEASE   keep the distributions and the environments in this directory (default: a temporary one, removed at the end)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [ -n "${MEGASCEND_RELEASE:-}" ]; then
  mkdir -p "$MEGASCEND_RELEASE"
  folder=$(cd "$MEGASCEND_RELEASE" && pwd)
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi

echo "== building from $(git rev-parse --short HEAD)"
rm -rf "$folder/tree" "$folder/dist"
mkdir -p "$folder/tree"
git archive HEAD pyproject.toml README.md LICENSE src | tar -x -C "$folder/tree"
"$python" -m venv "$folder/build"
"$folder/build/bin/pip" install --quiet --no-compile build twine
"$folder/build/bin/python" -m build --outdir "$folder/dist" "$folder/tree" > "$folder/build.log" 2>&1 || {
  tail -n 30 "$folder/build.log" >&2
  exit 1
}
"$folder/build/bin/twine" check --strict "$folder"/dist/*
wheel=$(ls "$folder"/dist/*.whl)
version=$(basename "$wheel" | cut -d- -f2)

try_sdist() {
  rm -rf "$folder/again"
  "$folder/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$folder/again" "$folder"/dist/*.tar.gz
  diff <(unzip -Z1 "$wheel" | sort) <(unzip -Z1 "$folder"/again/*.whl | sort)
}

try_extra() {
  local extra=$1 venv="$folder/$1" work="$folder/work-$1" wanted=$wheel
  [ "$extra" = none ] || wanted="$wheel[$extra]"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --no-compile "${MEGASCEND_TORCH:-torch==2.13.0}" "$wanted" || return 1
  case $extra in
    wandb | swanlab | trackio | mlflow) train_with "$venv" "$work" "trackers: [$extra]" 'plot: false' ;;
    track) train_with "$venv" "$work" 'trackers: [tensorboard]' 'plot: true' ;;
    *) train_with "$venv" "$work" 'plot: false' ;;
  esac
}

# Without a compiler, like the image: a package that must be compiled is an error.
try_container() {
  local venv="$folder/container" root="$folder/root" steps
  rm -rf "$venv" "$root"
  "$python" -m venv "$venv"
  steps=$("$python" scripts/container_steps.py containers/Containerfile.cpu) || return 1
  (cd "$folder/tree" && ROOT=$root PATH="$venv/bin:$PATH" PIP_ONLY_BINARY=:all: PIP_QUIET=1 bash -c "$steps") || return 1
  train_with "$venv" "$folder/work-container" 'trackers: [tensorboard]' 'plot: true'
}

# Two steps of training in an environment; further arguments are lines of the run file.
train_with() {
  local venv=$1 work=$2
  shift 2
  rm -rf "$work"
  "$venv/bin/pip" check || return 1
  mkdir "$work"
  (
    cd "$work"
    unset PYTHONPATH
    export OMP_NUM_THREADS=1 PATH="$venv/bin:$PATH" WANDB_MODE=offline SWANLAB_MODE=offline
    mkdir trackio mlflow
    export TRACKIO_DIR=$work/trackio MLFLOW_TRACKING_URI=sqlite:///$work/mlflow/runs.db
    [ "$(megascend --version)" = "megascend $version" ] || { echo "not version $version: $(megascend --version)"; exit 1; }
    megascend new-model model > /dev/null
    printf '%s\n' '{"messages": [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "blue"}]}' > chat.jsonl
    printf '%s\n' 'model: model' 'output: out' 'data: {path: chat.jsonl, global_batch_size: 1}' 'steps: 2' 'platform: cpu' \
      'precision: fp32' "$@" > run.yaml
    megascend doctor --timeout 600 > doctor.log || { cat doctor.log; exit 1; }
    megascend train run.yaml > train.log 2>&1 || { tail -n 20 train.log; exit 1; }
    ! grep "^tracker " train.log || exit 1  # megascend's message about a tracker that failed
    python - "$@" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers

import megascend

assert "site-packages" in megascend.__file__, megascend.__file__
rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
assert [row["step"] for row in rows] == [1, 2], rows
transformers.AutoModelForCausalLM.from_pretrained("out/hf")
assert Path("out/metrics.png").exists() == ("plot: true" in sys.argv)
for line in sys.argv:
    if line.startswith("trackers: "):
        name = line.removeprefix("trackers: [").removesuffix("]")
        folders = {"tensorboard": "out/tensorboard", "trackio": "trackio", "mlflow": "mlflow"}
        folder = Path(folders.get(name, f"out/trackers/{name}"))
        assert any(path.is_file() and path.stat().st_size for path in folder.rglob("*")), f"{name} left nothing"
PYTHON
  )
}

failed=()
[ "$#" -gt 0 ] || set -- sdist none track wandb swanlab trackio mlflow stack-0-16 stack-0-15
for extra in "$@"; do
  echo "== $extra"
  SECONDS=0
  case $extra in
    sdist | container) try=("try_$extra") ;;
    *) try=(try_extra "$extra") ;;
  esac
  if "${try[@]}"; then echo "worked, in $SECONDS s"; else failed+=("$extra"); fi
  [ -n "${MEGASCEND_RELEASE:-}" ] || rm -rf "${folder:?}/$extra"
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "version $version can be installed: $*"
