#!/usr/bin/env bash
# Sets everything up, then ruff, mypy and the tests. Further arguments go to pytest.
#
#   bash tests/run.sh            all tests but those below
#   bash tests/run.sh --fast     without those marked slow
#   bash tests/run.sh --engines  tests/engines: every term under every engine, on two and four ranks, with DeepSpeed, and killed ranks
#   bash tests/run.sh --fairseq  tests/fairseq, or what is named, in an environment with real fairseq; exit code 75 if there is none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "--fairseq" ]; then
    shift
    source tools/fairseq_environment.sh
    exec python -m pytest -q -c tests/fairseq/pytest.ini "${@:-tests/fairseq}"
fi

source tools/environment.sh test
if [ "${1:-}" = "--engines" ]; then
    shift
    source tools/deepspeed.sh
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec python -m pytest -q -o addopts= "$@" tests/engines
fi
chosen=()
if [ "${1:-}" = "--fast" ]; then
    chosen=(-m "not slow")
    shift
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ruff check .
ruff format --check --quiet .
mypy
python -m pytest -q -n 2 "${chosen[@]}" "$@"
