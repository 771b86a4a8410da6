#!/usr/bin/env bash
# Run every recipe of cookbook/ascend on 8 cards, or on the simulated device, and print a table of the results.
#
#   bash scripts/npu/smoke.sh [--simulated [--stand-in]] [RECIPE...]
#
# --simulated   no cards needed: `megascend simnpu`, which refuses types that torch_npu does not list (SIMNPU_STRICT=1). A warning in
#               the log is a failure. Its times and memory say nothing about hardware.
# --stand-in    stand-ins in tests/doubles for Ascend's packages (MindSpeed, or MegatronAdaptor and TransformerEngineNPU); only with
#               --simulated
# RECIPE        tp_npu, tp_moe_npu, tp_moe_cp_npu, multi_lora_npu (default: all of them)
#
# MEGASCEND_MINDSPEED        a checkout of MindSpeed to put on PYTHONPATH; not needed where MindSpeed is installed, nor from stack 0.18 on
# MEGASCEND_SMOKE_DEADLINE   seconds that one recipe may take (default: 600)
# MEGASCEND_RUN              folder of the small models and of the logs (default: runs/npu_smoke)
# PYTHON                     interpreter with megascend installed (default: python)
# NPROC                      processes, one for each card (default: 8)
#
# Exits with 1 if a recipe failed, after printing the end of its log, and with 2 if it cannot start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHON=${PYTHON:-python} MEGASCEND_RUN=${MEGASCEND_RUN:-runs/npu_smoke}
deadline=${MEGASCEND_SMOKE_DEADLINE:-600}
simulated='' stand_in='' recipes=()

for argument in "$@"; do
  case $argument in
    --simulated) simulated=yes ;;
    --stand-in) stand_in=yes ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *)
      [ -f "cookbook/ascend/$argument.py" ] || { echo "no recipe cookbook/ascend/$argument.py" >&2; exit 2; }
      recipes+=("$argument")
      ;;
  esac
done
[ ${#recipes[@]} -gt 0 ] || recipes=(tp_npu tp_moe_npu tp_moe_cp_npu multi_lora_npu)

source scripts/npu/_ascend.sh

device=cards start=()
if [ -n "$simulated" ]; then
  device="simulated (its times say nothing about cards)" start=("$PYTHON" -m megascend.apps.cli.main simnpu --)
  export SIMNPU_STRICT=${SIMNPU_STRICT:-1}
fi

# Fields of a log, which holds lines like: step 3/10  loss 5.1569  grad norm 1.976  222 ms
steps() { grep -E '^step [0-9]+/' "$1" || true; }
last_of() { awk '{ value = $0 } END { print value == "" ? "-" : value }'; }
losses() { steps "$1" | sed -E 's/.*  loss ([^ ]+) .*/\1/'; }
norm() { steps "$1" | sed -E 's/.*  grad norm ([^ ]+) .*/\1/' | last_of; }
median_ms() {
  steps "$1" | sed -E 's/.*  ([0-9,]+) ms.*/\1/; s/,//g' | sort -n |
    awk '{ value[NR] = $1 } END { print NR ? value[int((NR + 1) / 2)] : "-" }'
}
monitors() { sed -nE 's/^hang monitors: ([0-9]+) of ([0-9]+) alive$/\1\/\2/p' "$1" | last_of; }
layout() { # "8 ranks = tensor 2 x context 1 x ..." as TP2 CP1 ...
  sed -nE '
    /^[0-9]+ ranks = /{s/.*tensor ([0-9]+) x context ([0-9]+) x data ([0-9]+) x pipeline ([0-9]+).*/TP\1 CP\2 DP\3 PP\4/p}
    /^experts: /{s/.*expert tensor ([0-9]+) x expert ([0-9]+) .*/ETP\1 EP\2/p}' "$1" | paste -sd ' ' | grep . || echo -
}
report() { # print the error of a failed run: the first rank that raised, else warnings, else the end of the log
  local rank
  rank=$(grep -m1 -oE '^\[rank[0-9]+\]: Traceback' "$1" | grep -oE '^\[rank[0-9]+\]' || true)
  if [ -n "$rank" ]; then grep -F "$rank" "$1" | tail -n 12; else grep -m 12 'Warning: ' "$1" || tail -n 30 "$1"; fi
}

logs=$MEGASCEND_RUN/logs
mkdir -p "$logs"
row='%-14s  %-30s  %10s  %9s  %9s  %14s  %8s  %9s  %s\n'
echo "device: $device"
echo "packages: $packages"
# shellcheck disable=SC2059
printf "$row" recipe layout 'first loss' 'last loss' 'grad norm' 'median step ms' monitors 'seconds' verdict
failed=()
for recipe in "${recipes[@]}"; do
  log=$logs/$recipe.log
  SECONDS=0 status=0
  # torchrun gives its workers 30 s to end, then kills them: let it.
  timeout --kill-after=60 "$deadline" "${start[@]}" bash "cookbook/ascend/$recipe.sh" > "$log" 2>&1 || status=$?
  if [ "$status" = 0 ] && [ "$(tail -n 1 "$log")" = "SMOKE OK" ]; then
    verdict=OK alive=$(monitors "$log")
    # A monitor that has ended is noticed only when a rank is lost.
    [ "${alive%/*}" = "${alive#*/}" ] || verdict="FAILED (hang monitors: $alive)"
    [ -z "$simulated" ] || ! grep -q 'Warning: ' "$log" || verdict="FAILED (a warning)"
    [ "$verdict" = OK ] || failed+=("$recipe")
  else
    failed+=("$recipe")
    verdict="FAILED (exit code $status)"
    [ "$status" != 124 ] || verdict="FAILED (not done after $deadline s)"
  fi
  # shellcheck disable=SC2059
  printf "$row" "$recipe" "$(layout "$log")" "$(losses "$log" | head -n 1 | last_of)" "$(losses "$log" | last_of)" \
    "$(norm "$log")" "$(median_ms "$log")" "$(monitors "$log")" "$SECONDS" "$verdict"
done

for recipe in "${failed[@]}"; do
  printf '\n== %s\n' "$logs/$recipe.log"
  report "$logs/$recipe.log"
done
[ ${#failed[@]} = 0 ]
