#!/usr/bin/env bash
# `tests/apps/serve/test_serve_client.py` with Tinker clients of several versions, each in a separate environment that sees megascend's
# packages, against servers on one rank, TP2, PP2, DP2 and CP2.
#
#     bash scripts/test_serve.sh [VERSION...]      default: 0.16.0 0.22.0 0.25.0 0.30.0 newest
#
# "newest" is the newest on the package index; that of .venv-0.16 is tested in any case. Takes some minutes on two cores.
#
# MEGASCEND_PYTHON      the interpreter, which has everything installed, instead of .venv-0.16 (bash scripts/test.sh makes it)
# TINKER_ENVIRONMENTS   where environments are made and kept, DIRECTORY/VERSION (default: .venv-tinker)
# PYTEST_ADDOPTS        more arguments of pytest, such as -k 'CP2 and 0.16' or --junitxml=FILE, which keeps the largest differences
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_tinker_venv.sh

versions=("$@")
[ "${#versions[@]}" -gt 0 ] || versions=(0.16.0 0.22.0 0.25.0 0.30.0 newest)

clients=$(mktemp -d)
trap 'rm -rf "$clients"' EXIT
for version in "${versions[@]}"; do
  environment=$environments/$version
  if [ ! -e "$environment/.installed" ]; then
    make_environment "$environment"
    [ "$version" = newest ] || "$environment/bin/pip" install --quiet --no-deps "tinker==$version"
    touch "$environment/.installed"
  fi
  if [ "$version" = newest ]; then
    "$environment/bin/pip" install --quiet --no-deps --ignore-installed --upgrade tinker
    version=$("$environment/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("tinker"))')
  fi
  ln -sfn "$environment" "$clients/$version"
done
echo "clients: $(ls "$clients" | tr '\n' ' ')"
export MEGASCEND_TINKER_CLIENTS=$clients OMP_NUM_THREADS=1
"$python" -m pytest -q tests/apps/serve/test_serve_client.py
