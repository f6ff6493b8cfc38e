# Sourced by the recipes' scripts: `run RECIPE [TERM [VARIANT...]] [key=value...]` trains, evaluates and prints scores.
#
#   NPROC=8 bash recipes/gigaword.sh r3f            # eight processes with torchrun
#   bash recipes/gigaword.sh r3f tiny data.path=FILE.jsonl
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE="${SEQREG_OFFLINE:-${HF_HUB_OFFLINE:-0}}"  # recipes download what is missing; 1 forbids it
source tools/environment.sh ""  # without the "" it would see the arguments of the script

run() {
    local recipe="$1" term=baseline words=()
    shift
    if [[ -n "${1:-}" && "$1" != -* && ("$1" != *=* || "${1%%=*}" == *:*) ]]; then  # r3f, or r3f:weight=1.0
        term="$1"
        shift
    fi
    for word in "$@"; do
        case "$word" in
            -* | *=*) words+=("$word") ;;
            *) words+=(--variant "$word") ;;
        esac
    done
    local processes="${NPROC:-1}" start=(seqreg)
    case "$processes" in
        1) ;;
        [1-9] | [1-9][0-9] | [1-9][0-9][0-9]) start=(torchrun --standalone --nproc_per_node "$processes" -m seqreg) ;;
        *) echo "NPROC=$processes: expected a whole number of processes from 1 to 999" >&2; exit 2 ;;
    esac
    "${start[@]}" train "$recipe" --terms "$term" "${words[@]}"
}
