# Sourced by the scripts that run Tinker clients of other versions: $python, $environments, and
#
#   make_environment DIRECTORY     a virtual environment whose packages take precedence over megascend's, which it sees too
#
# MEGASCEND_PYTHON      the interpreter, which has everything installed, instead of .venv-0.16
# TINKER_ENVIRONMENTS   where environments are made and kept (default: .venv-tinker)

environments=$(realpath -m "${TINKER_ENVIRONMENTS:-.venv-tinker}")
if [ -n "${MEGASCEND_PYTHON:-}" ]; then
  python=$MEGASCEND_PYTHON
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
else
  python=$PWD/.venv-0.16/bin/python
  [ -x "$python" ] || { echo "there is no $python: bash scripts/test.sh makes it, or set MEGASCEND_PYTHON" >&2; exit 1; }
fi

make_environment() {
  local packages inside
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m venv "$1"
  inside=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$packages" > "$inside/zz-megascend.pth"
}
