#!/usr/bin/env bash
# The acceptance run for 1 to 8 Ascend cards, whose results are sent back: doctor, operators, collectives, recipes, parity with
# Hugging Face, a kill and a resume, speed and memory. docs/npu.md explains its use.
#
#   bash scripts/npu/acceptance.sh [--simulated [--stand-in]] [--cards N] [--only SECTION,...] [--quick] [--deadline S]
#                                  [--out FILE] [--folder DIR]
#
# --simulated   no cards needed: `megascend simnpu`. Its times and memory say nothing about hardware.
# --stand-in    stand-ins in tests/doubles for Ascend's packages (MindSpeed, or MegatronAdaptor and TransformerEngineNPU); only with
#               --simulated
# --only        doctor, operators, collectives, recipes, parity, resume, speed (default: all of them)
#
# MEGASCEND_MINDSPEED   a checkout of MindSpeed to put on PYTHONPATH; not needed where MindSpeed is installed, nor from stack 0.18 on
# PYTHON                interpreter with megascend installed (default: python)
#
# Exits with 1 if a section failed, and with 2 if it cannot start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHON=${PYTHON:-python}
simulated='' stand_in='' passed=()
for argument in "$@"; do
  case $argument in
    --simulated) simulated=yes ;;
    --stand-in) stand_in=yes passed+=(--stand-in) ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    *) passed+=("$argument") ;;
  esac
done
source scripts/npu/_ascend.sh
source cookbook/ascend/environment.sh

start=("$PYTHON")
[ -z "$simulated" ] || start=("$PYTHON" -m megascend.apps.cli.main simnpu -- "$PYTHON")
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/scripts/npu:$PWD/tests"  # for tests/support
exec "${start[@]}" -m npu_acceptance "${passed[@]}"
