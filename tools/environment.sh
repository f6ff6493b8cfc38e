# Sourced by the scripts: makes sure that an environment with seqreg in it is active.
#
#   source tools/environment.sh [EXTRA]
#
# Uses the active virtual environment, or makes .venv. Installs seqreg[recipes], and EXTRA, with the pinned versions of
# constraints.txt, once: a stamp in the environment remembers what was installed from which files.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_extra="${1:-}"

if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if [ ! -x "$_root/.venv/bin/python" ]; then
        _python="$(command -v python3.11 || command -v python3)" || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
        "$_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            { echo "Python 3.11 or newer is needed; $_python is $("$_python" --version)" >&2; exit 2; }
        echo "Creating $_root/.venv with $("$_python" --version)" >&2
        "$_python" -m venv "$_root/.venv"
    fi
    # shellcheck disable=SC1091
    source "$_root/.venv/bin/activate"
fi

_environment="${VIRTUAL_ENV:-$CONDA_PREFIX}"
_sum="$(cat "$_root/setup.cfg" "$_root/setup.py" "$_root/constraints.txt" "$_root/pyproject.toml" | cksum | tr ' ' '-')"
_stamp="$_environment/.seqreg-$_sum-$(printf %s "$_root" | cksum | tr ' ' '-')"
if ! compgen -G "$_stamp${_extra:+-$_extra}*" > /dev/null; then
    echo "Installing seqreg[recipes${_extra:+,$_extra}] into $_environment (once; a few minutes)" >&2
    python -m pip install --quiet --disable-pip-version-check \
        -c "$_root/constraints.txt" -e "$_root[recipes${_extra:+,$_extra}]" || { echo "installation failed" >&2; exit 1; }
    touch "$_stamp${_extra:+-$_extra}"
fi

# Some virtual CPUs advertise instructions that they cannot run: what oneDNN must be held to, if anything.
_level="$(python -m seqreg.workbench.data.hardware)" || _level=""  # it has said why
if [ -n "$_level" ]; then export ONEDNN_MAX_CPU_ISA="$_level"; fi

export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
