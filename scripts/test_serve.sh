#!/usr/bin/env bash
# `tests/serve/test_serve_client.py` with Tinker clients of several versions, each in an environment of its own that sees megascend's packages.
#
#     bash scripts/test_serve.sh [VERSION...]      default: 0.16.0 0.22.0 0.25.0 0.30.0 newest
#
# "newest" is the newest on the package index; that of .venv-0.16 is tested in any case. Needs .venv-0.16 (bash scripts/test.sh makes it).
# The environments are kept in .venv-tinker/VERSION. Takes some minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv-0.16/bin/python
[ -x "$python" ] || { echo "there is no $python: bash scripts/test.sh makes it" >&2; exit 1; }
versions=("$@")
[ "${#versions[@]}" -gt 0 ] || versions=(0.16.0 0.22.0 0.25.0 0.30.0 newest)
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

clients=$(mktemp -d)
trap 'rm -rf "$clients"' EXIT
for version in "${versions[@]}"; do
  environment=$PWD/.venv-tinker/$version
  if [ ! -e "$environment/.installed" ]; then
    "$python" -m venv "$environment"
    inside=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$packages" > "$inside/zz-megascend.pth"  # behind its own packages
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
"$python" -m pytest -q tests/serve/test_serve_client.py
