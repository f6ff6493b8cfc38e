# Sourced by the recipes' scripts: `run RECIPE TERM [VARIANT...] [key=value...]` trains, evaluates and prints the table.
#
#   NPROC=8 bash recipes/gigaword.sh r3f            # eight processes with torchrun
#   bash recipes/gigaword.sh r3f tiny data.path=FILE.jsonl
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
export HF_HUB_OFFLINE="${SEQREG_OFFLINE:-0}"  # recipes download what is missing; SEQREG_OFFLINE=1 forbids it

run() {
    local recipe="$1" term="${2:-baseline}" variants=() settings=() name="$1"
    shift; shift || true
    for word in "$@"; do
        case "$word" in
            *=*) settings+=("$word") ;;
            *) variants+=(--variant "$word"); name="$name-$word" ;;
        esac
    done
    local start=(seqreg)
    if [ "${NPROC:-1}" -gt 1 ]; then
        start=(torchrun --standalone --nproc_per_node "$NPROC" -m seqreg.cli)
    fi
    local output="runs/$name/$term"
    "${start[@]}" train "$recipe" --terms "$term" "${variants[@]}" "${settings[@]}" "output=$output"
    "${start[@]}" evaluate "$output"
    seqreg show "$output"
}
