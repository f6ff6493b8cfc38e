# Sourced by the recipes' scripts: `run RECIPE [TERM [VARIANT...]] [key=value...]` trains, evaluates and prints scores.
#
#   NPROC=8 bash recipes/gigaword.sh r3f            # eight processes with torchrun
#   NPROC=8 MAX_RESTARTS=3 bash recipes/gigaword.sh r3f    # and started again when one of them dies
#   NNODES=2 RDZV_ENDPOINT=node0:29500 NPROC=8 bash recipes/gigaword.sh r3f engine.name=fsdp2    # on each of two nodes
#   bash recipes/gigaword.sh r3f tiny data.path=FILE.jsonl
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE="${SEQREG_OFFLINE:-${HF_HUB_OFFLINE:-0}}"  # recipes download what is missing; 1 forbids it
source tools/environment.sh ""  # without the "" it would see the arguments of the script

run() {
    local recipe="$1" term=baseline words=() start=(seqreg)
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
    case "${NPROC:-1}" in
        [1-9] | [1-9][0-9] | [1-9][0-9][0-9]) ;;
        *) echo "NPROC=$NPROC: expected a whole number of processes from 1 to 999" >&2; exit 2 ;;
    esac
    if [[ "${NPROC:-1}" != 1 || "${NNODES:-1}" != 1 ]]; then
        start+=(launch --nproc "${NPROC:-1}" --max-restarts "${MAX_RESTARTS:-0}")
        [[ "${NNODES:-1}" == 1 ]] || start+=(--nnodes "$NNODES" --rdzv-endpoint "${RDZV_ENDPOINT:-}")
    fi
    "${start[@]}" train "$recipe" --terms "$term" "${words[@]}"
}
