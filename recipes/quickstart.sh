#!/usr/bin/env bash
# Pretrains a small BART on one kind of generated news, fine-tunes it on a little of another kind without and with R3F,
# and shows the scores on the new task beside what is left of the old one.
#
#   bash recipes/quickstart.sh                           # the pretraining is done once, and used again
#   bash recipes/quickstart.sh smart                     # another term
#   bash recipes/quickstart.sh optimisation.max_steps=100    # settings are those of the fine-tunings
#
# Hardware: any; two minutes on 2 cores, after the installation. Downloads nothing beyond Python packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh ""  # without the "" it would see the arguments of the script
seqreg quickstart "$@"
