#!/usr/bin/env bash
# Makes .venv and installs skyformer into it with the extras given as the only argument.
# Does nothing when the same extras of the same pyproject.toml are installed already.
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:-cli}"
python="${PYTHON:-python3}"
stamp=".venv/.installed-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)-${extras//,/-}"

if [ -e "$stamp" ]; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "skyformer needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[${extras}]"
touch "$stamp"
