# Sourced by the scripts that run on NPUs: the MindSpeed that they use goes on PYTHONPATH, and its name into $mindspeed.
#
#   $simulated, $double     not empty if those options were given
#   MEGASCEND_MINDSPEED     a checkout of MindSpeed; not needed where MindSpeed is installed

if [ -n "$double" ]; then
  [ -n "$simulated" ] || { echo "--double needs --simulated: the tests' double of MindSpeed is not for cards" >&2; exit 2; }
  mindspeed="the tests' double, not MindSpeed" folder=$PWD/tests/doubles
elif [ -n "${MEGASCEND_MINDSPEED:-}" ]; then
  mindspeed=$MEGASCEND_MINDSPEED folder=$MEGASCEND_MINDSPEED
else
  mindspeed=installed folder=
fi
export PYTHONPATH=$folder${folder:+${PYTHONPATH:+:}}${PYTHONPATH:-}
if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mindspeed") is None)'; then
  echo "no mindspeed for $PYTHON: set MEGASCEND_MINDSPEED to a checkout, or use the tests' double (--simulated --double)" >&2
  exit 2
fi
