#!/usr/bin/env bash
# Sets everything up, then ruff, mypy and the tests. Further arguments go to pytest.
#
#   bash tests/run.sh            all tests
#   bash tests/run.sh --fast     without those marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh test

chosen=()
if [ "${1:-}" = "--fast" ]; then
    chosen=(-m "not slow")
    shift
fi
export OMP_NUM_THREADS=1
ruff check .
ruff format --check --quiet .
mypy
python -m pytest -q -n 2 "${chosen[@]}" "$@"
