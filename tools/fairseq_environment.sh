# Sourced by tests/run.sh --fairseq: makes sure that an environment with real fairseq in it is active.
#
#   source tools/fairseq_environment.sh
#
# The environment is .fairseq, beside .venv; torch is the version of constraints.txt. fairseq comes as source, and
# building it takes some minutes: the wheel is kept in ~/.cache/seqreg, for this Python and torch. Where it cannot be
# built, or not within SEQREG_FAIRSEQ_MINUTES (40), the script says why and exits with 75.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_home="${SEQREG_FAIRSEQ:-$_root/.fairseq}"
_fairseq="fairseq-fixed==0.12.3.1"

_cannot() {
    echo "fairseq cannot be had here: $1" >&2
    exit 75
}

_sum="$(cat "$_root/constraints.txt" "$_root/tools/fairseq_requirements.txt" "${BASH_SOURCE[0]}" | cksum | tr ' ' '-')"
if [ ! -e "$_home/.seqreg-$_sum" ]; then
    _python="$(command -v python3.11 || command -v python3)" || _cannot "there is no Python"
    "$_python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        _cannot "Python 3.11 is needed, and $_python is $("$_python" --version 2>&1)"
    "$_python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
        _cannot "the headers of $_python are not installed"
    command -v c++ > /dev/null || _cannot "there is no C++ compiler"
    echo "Installing fairseq into $_home (once; a few minutes)" >&2
    rm -rf "$_home"
    "$_python" -m venv "$_home" || _cannot "$_python has no venv"
    _pip() { "$_home/bin/python" -m pip "$@" --quiet --disable-pip-version-check -c "$_root/constraints.txt"; }
    _pip install torch -r "$_root/tools/fairseq_requirements.txt" || _cannot "what it needs could not be installed"
    _torch="$("$_home/bin/python" -c 'import torch; print(torch.__version__)')"
    _wheels="${XDG_CACHE_HOME:-${HOME:-$_home}/.cache}/seqreg/cp311-torch-$_torch"
    if ! mkdir -p "$_wheels" 2> /dev/null || [ ! -w "$_wheels" ]; then
        _wheels="$_home/wheels"
        mkdir -p "$_wheels"
    fi
    if ! compgen -G "$_wheels/fairseq_fixed-*.whl" > /dev/null; then
        echo "Building $_fairseq (once; four minutes of CPU)" >&2
        _built="$(mktemp -d "$_wheels/.build-XXXXXX")" # beside it, so that a wheel is there as a whole or not at all
        timeout "${SEQREG_FAIRSEQ_MINUTES:-40}m" "$_home/bin/python" -m pip wheel --quiet --disable-pip-version-check \
            --no-deps --no-build-isolation -w "$_built" "$_fairseq" || _cannot "building it failed or took too long"
        mv "$_built"/fairseq_fixed-*.whl "$_wheels/"
        rmdir "$_built"
    fi
    _pip install --no-deps "$_wheels"/fairseq_fixed-*.whl || _cannot "its wheel could not be installed"
    touch "$_home/.seqreg-$_sum"
fi

# shellcheck disable=SC1091
source "$_home/bin/activate"
export PYTHONPATH="$_root" OMP_NUM_THREADS=1 OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
