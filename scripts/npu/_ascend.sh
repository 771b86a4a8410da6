# Sourced by the scripts that run on NPUs: Ascend's packages for the installed stack go on PYTHONPATH, and their names into $packages.
# Stacks 0.16 and 0.15 need MindSpeed; later ones MegatronAdaptor and TransformerEngineNPU, and take MindSpeed beside them.
#
#   $simulated, $stand_in   not empty if those options were given
#   MEGASCEND_MINDSPEED     a checkout of MindSpeed; not needed where MindSpeed is installed

core=$("$PYTHON" -c 'from importlib.metadata import version; print(*version("megatron-core").split(".")[:2], sep=".")')
case $core in
  0.15 | 0.16) needed=(mindspeed) doubles=$PWD/tests/doubles ;;
  *) needed=(megatron_adaptor transformer_engine) doubles=$PWD/tests/doubles/adaptor_packages ;;
esac
folders=()
if [ -n "$stand_in" ]; then
  [ -n "$simulated" ] || { echo "--stand-in needs --simulated: the stand-ins for Ascend's packages are not for cards" >&2; exit 2; }
  packages="stand-ins, not Ascend's ${needed[*]}"
  folders+=("$doubles")
else
  packages="installed ${needed[*]}"
fi
if [ -n "${MEGASCEND_MINDSPEED:-}" ] && { [ -z "$stand_in" ] || [ "${needed[0]}" != mindspeed ]; }; then
  packages+=", MindSpeed in $MEGASCEND_MINDSPEED"
  folders+=("$MEGASCEND_MINDSPEED")
fi
export PYTHONPATH=$(IFS=:; echo "${folders[*]}${folders:+${PYTHONPATH:+:}}${PYTHONPATH:-}")
for package in "${needed[@]}"; do
  if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$package"; then
    echo "no $package for $PYTHON, which stack $core needs: install it (docs/npu.md), set MEGASCEND_MINDSPEED to a checkout of" \
      "MindSpeed, or use stand-ins (--simulated --stand-in)" >&2
    exit 2
  fi
done
