#!/usr/bin/env bash
# Fine-tunes a tiny BART on text made here, with and without R3F, and shows what the loss is made of.
#
#   bash recipes/quickstart.sh
#
# Hardware: any; about a minute on 2 cores. Downloads nothing beyond Python packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
python recipes/quickstart.py "$@"
