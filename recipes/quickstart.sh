#!/usr/bin/env bash
# Trains a small BART on generated news, without and with R3F, and shows the scores side by side.
#
#   bash recipes/quickstart.sh                           # further arguments are settings: optimisation.steps=100
#
# Hardware: any; two minutes on 2 cores. Downloads nothing beyond Python packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
seqreg train recipes/quickstart.yaml --overwrite "$@"
seqreg train recipes/quickstart.yaml --terms r3f --overwrite "$@"
seqreg show runs/quickstart/baseline runs/quickstart/r3f
