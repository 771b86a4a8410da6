# Sourced by the tinker_*.sh beside it: starts `megascend serve` on $model, with the options that it is given, and ends it with the shell.
#
#   start_server NAMES OPTIONS...     NAMES: of tenants, separated by commas; each gets a key of its own
#
# Sets TINKER_BASE_URL, TINKER_API_KEY (the first tenant's) and MEGASCEND_API_KEYS (all of them) for programs started after it.
# PYTHON: interpreter (default: python). MEGASCEND_RUN: where model, log and checkpoints go (default: runs/cookbook).
python=${PYTHON:-python}
run=$(mkdir -p "${MEGASCEND_RUN:-runs/cookbook}" && cd "${MEGASCEND_RUN:-runs/cookbook}" && pwd)
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # deprecations inside the stack's packages, once a process
model=$run/tinker-model

start_server() {
  local names=$1 log=$run/tinker-server.log keys=()
  shift
  for name in ${names//,/ }; do
    keys+=("$name=tml-$("$python" -c 'import secrets; print(secrets.token_hex(16))')")
  done
  MEGASCEND_API_KEYS=$(IFS=,; echo "${keys[*]}")
  TINKER_API_KEY=${keys[0]#*=}
  export MEGASCEND_API_KEYS TINKER_API_KEY
  # Wide for its depth: without its output layer, adapters cannot do much with a narrow model whose weights are random.
  [ -f "$model/config.json" ] || "$python" -m megascend.apps.cli.main new-model "$model" --hidden 64 --layers 2 --context 256 --seed 0
  : > "$log"
  "$python" -m megascend.apps.cli.main serve --model "$model" --port 0 --storage "$run/tinker" "$@" > "$log" 2>&1 &
  server=$!
  trap 'kill $server 2> /dev/null; wait $server 2> /dev/null || true' EXIT
  until grep -q TINKER_BASE_URL "$log"; do
    kill -0 $server 2> /dev/null || { cat "$log"; exit 1; }
    sleep 0.5
  done
  TINKER_BASE_URL=$(sed -n 's/^export TINKER_BASE_URL=\([^ ]*\).*/\1/p' "$log")
  export TINKER_BASE_URL
}
