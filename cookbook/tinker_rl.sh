#!/usr/bin/env bash
# Starts `megascend serve` with a small model in runs/cookbook, and trains against it with the Tinker client: cookbook/tinker_rl.py.
# Needs: pip install -e '.[serve,stack-0-16]'. Arguments go to tinker_rl.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # paths that are given are of the directory of the caller

folder=runs/cookbook model=$PWD/runs/cookbook/tinker-model log=runs/cookbook/tinker-server.log
mkdir -p "$folder"
[ -d "$model" ] || python -m megascend new-model "$model" --hidden 64 --layers 2 --context 256 --seed 0
export MEGASCEND_API_KEYS=cookbook=tml-$(python -c 'import secrets; print(secrets.token_hex(16))')

python -m megascend serve --model "$model" --port 0 --precision fp32 --storage "$folder/tinker" > "$log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; wait $server 2> /dev/null || true' EXIT
until grep -q TINKER_BASE_URL "$log"; do
  kill -0 $server 2> /dev/null || { cat "$log"; exit 1; }
  sleep 0.5
done
TINKER_BASE_URL=$(sed -n 's/^export TINKER_BASE_URL=\([^ ]*\).*/\1/p' "$log")
export TINKER_BASE_URL TINKER_API_KEY=${MEGASCEND_API_KEYS#*=}
python "$here/tinker_rl.py" --model "$model" "$@"
