# Sourced by the scripts that run on NPUs: the MindSpeed that they use goes on PYTHONPATH, and its name into $mindspeed.
#
#   $simulated, $stand_in   not empty if those options were given
#   MEGASCEND_MINDSPEED     a checkout of MindSpeed; not needed where MindSpeed is installed

if [ -n "$stand_in" ]; then
  [ -n "$simulated" ] || { echo "--stand-in needs --simulated: the stand-in for MindSpeed is not for cards" >&2; exit 2; }
  mindspeed="a stand-in, not MindSpeed" folder=$PWD/tests/doubles
elif [ -n "${MEGASCEND_MINDSPEED:-}" ]; then
  mindspeed=$MEGASCEND_MINDSPEED folder=$MEGASCEND_MINDSPEED
else
  mindspeed=installed folder=
fi
export PYTHONPATH=$folder${folder:+${PYTHONPATH:+:}}${PYTHONPATH:-}
if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mindspeed") is None)'; then
  echo "no mindspeed for $PYTHON: set MEGASCEND_MINDSPEED to a checkout, or use the stand-in for it (--simulated --stand-in)" >&2
  exit 2
fi
