#!/usr/bin/env bash
# Sets everything up, then ruff, mypy and the tests. Further arguments go to pytest.
#
#   bash tests/run.sh            all tests but those below
#   bash tests/run.sh --core     the plug-in alone: mathematics, terms, integrations but compilers; without ruff and mypy
#   bash tests/run.sh --fast     without those marked slow
#   bash tests/run.sh --kernels  the numerical tests with the kernels of older processors, and with one and two threads
#   bash tests/run.sh --nightly  tests/nightly: faults injected into runs, random input, all studies as toys, all architectures
#   bash tests/run.sh --engines  tests/engines: every term under every engine, on two and four ranks, with DeepSpeed, and killed ranks
#   bash tests/run.sh --fairseq  tests/fairseq, or what is named, in an environment with real fairseq; exit code 75 if there is none
#
# tests/environments.sh runs the tests of `pip install seqreg` and of its extras.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "--fairseq" ]; then
    shift
    source tools/fairseq_environment.sh
    exec python -m pytest -q -c tests/fairseq/pytest.ini "${@:-tests/fairseq}"
fi

source tools/environment.sh test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "${1:-}" = "--engines" ]; then
    shift
    source tools/deepspeed.sh
    exec python -m pytest -q -o addopts= "$@" tests/engines
fi
if [ "${1:-}" = "--kernels" ]; then
    shift
    for kernels in default,1 avx2,2 avx512,1 avx512,2; do
        [ "${kernels%,*}" = default ] || grep -q "${kernels%,*}" /proc/cpuinfo || continue
        echo "ATEN_CPU_CAPABILITY=${kernels%,*} OMP_NUM_THREADS=${kernels#*,}"
        ATEN_CPU_CAPABILITY="${kernels%,*}" OMP_NUM_THREADS="${kernels#*,}" python -m pytest -q -n 2 -m "not slow" \
            -k "not test_contract or bart and not mbart" "$@" tests/{fused,terms} tests/metrics/test_{calibration,statistics}.py \
            tests/test_{losses,divergences,noise,golden,golden_adversarial,criterion,context,mutants,smoothness}.py
    done
    exit
fi
if [ "${1:-}" = "--nightly" ]; then
    shift
    exec python -m pytest -q -n 2 --dist loadfile "$@" tests/nightly
fi
if [ "${1:-}" = "--core" ]; then
    shift
    about_the_repository='docs|examples|release|scripts|axolotl_example'
    mapfile -t files < <(find tests -maxdepth 1 -name 'test_*.py' | grep -vE "test_($about_the_repository)\.py" | sort)
    exec python -m pytest -q -n 2 -m "not slow" --ignore tests/integrations/test_compile.py "$@" tests/fused tests/terms \
        tests/integrations "${files[@]}"
fi
chosen=()
if [ "${1:-}" = "--fast" ]; then
    chosen=(-m "not slow")
    shift
fi
ruff check .
ruff format --check --quiet .
mypy
python -m pytest -q -n 2 "${chosen[@]}" "$@"
