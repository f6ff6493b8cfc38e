#!/usr/bin/env bash
# Installs seqreg as its users do, each time into an environment below .environments, and runs the tests that concern it.
#
#   bash tests/environments.sh torch       pip install seqreg: torch alone, without numpy
#   bash tests/environments.sh hf          pip install seqreg[hf], with the pinned transformers
#   bash tests/environments.sh hf-4.57     pip install seqreg[hf], with the oldest transformers
#   bash tests/environments.sh recipes     everything: what `bash tests/run.sh` runs
#
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind="${1:-}"
shift || true

extra="" wanted="" pins=constraints.txt
case "$kind" in
    torch) ;;
    hf) extra="[hf]" wanted="peft" ;;
    hf-4.57) extra="[hf]" wanted="peft transformers==4.57.3 accelerate==1.10.1" ;;
    recipes) exec bash tests/run.sh "$@" ;;
    *) echo "bash tests/environments.sh torch|hf|hf-4.57|recipes: unknown: ${kind:-nothing}" >&2; exit 2 ;;
esac

home="$PWD/.environments/$kind"
sum="$(cat setup.cfg setup.py constraints.txt "${BASH_SOURCE[0]}" | cksum | tr ' ' '-')"
if [ ! -e "$home/.seqreg-$sum" ]; then
    echo "Installing seqreg$extra into $home (once)" >&2
    rm -rf "$home"
    "$(command -v python3.11 || command -v python3)" -m venv "$home"
    if [ "$kind" = hf-4.57 ]; then # of which transformers 4.57 wants older ones
        pins="$home/constraints.txt"
        grep -vE '^(transformers|accelerate|huggingface_hub|tokenizers)==' constraints.txt > "$pins"
    fi
    pip() { "$home/bin/python" -m pip "$@" --quiet --disable-pip-version-check -c "$pins"; }
    # shellcheck disable=SC2086
    pip install -e ".$extra" ${wanted:+$(printf '%s\n' $wanted | grep ==)}
    "$home/bin/python" -m pip list --format=freeze --disable-pip-version-check | grep -vE '^(pip|setuptools|wheel|seqreg)==' > "$home/installed.txt"
    echo "$(wc -l < "$home/installed.txt") distributions, $(du -sm "$home" | cut -f1) MB" >&2
    # shellcheck disable=SC2086
    pip install pytest pytest-timeout hypothesis $wanted
    touch "$home/.seqreg-$sum"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
core="tests/test_noise.py tests/test_schedules.py"
contract="r3f or smart or jachess or rdrop or neftune"
case "$kind" in
    torch)
        # shellcheck disable=SC2086
        set -- -W "ignore:Failed to initialize NumPy" tests/environments/test_torch_alone.py $core "$@"
        ;;
    hf*)
        if [ "$kind" = hf-4.57 ]; then # what tests of transformers 5 alone import, and what it does otherwise
            set -- --ignore tests/integrations/test_layer_input.py --ignore tests/integrations/test_private_names.py "$@"
            while read -r test; do set -- --deselect "$test" "$@"; done < <(grep -v '^#' tests/environments/transformers_4.txt)
        fi
        # What needs TRL or TensorBoard, and what `bash tests/run.sh` runs on several ranks and compiled.
        for name in sft compile engines distributed; do set -- --ignore "tests/integrations/test_$name.py" "$@"; done
        set -- -m "not slow" --deselect tests/integrations/test_trainer.py::test_tensorboard_has_every_part "$@"
        "$home/bin/python" -m pytest -q -o addopts= tests/environments/test_hf.py tests/integrations "$@"
        if [ "$kind" = hf-4.57 ]; then contract="($contract) and not led and not bert2bert"; fi # masks, as above
        set -- tests/terms/test_contract.py -k "$contract"
        ;;
esac
"$home/bin/python" -m pytest -q -o addopts= "$@"
