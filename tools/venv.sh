# Sourced by the other tools: moves to the root of the checkout and makes virtual environments there.

CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

# make_venv DIR EXTRAS CONSTRAINTS: installs the package, editable, with EXTRAS ("" or "[dev]") at the versions of the
# file CONSTRAINTS. Does nothing where DIR was made from the same inputs.
make_venv() {
  local dir=$1 extras=$2 constraints=$3 stamp
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "composer3d needs Python 3.11 or newer, python3 is $(python3 --version); put a newer one first in PATH" >&2
    return 2
  }
  # The path is part of the stamp: an editable install points to the checkout that made it.
  stamp=$(python3 -c '
import hashlib, pathlib, sys
files = b"".join(pathlib.Path(path).read_bytes() for path in ("pyproject.toml", sys.argv[2]))
print(hashlib.sha256(files + repr((sys.version, str(pathlib.Path.cwd()), sys.argv[1])).encode()).hexdigest())
' "$extras" "$constraints")
  if [ "$(cat "$dir/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "making $dir" >&2
    python3 -m venv "$dir"
    "$dir/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" -e ".$extras" || return
    echo "$stamp" >"$dir/stamp"
  fi
}
