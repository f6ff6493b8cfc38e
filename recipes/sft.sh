#!/usr/bin/env bash
# Trains recipes/sft.yaml with a term, evaluates it and prints its scores. See there for hardware.
#
#   bash recipes/sft.sh anchor data.path=FILE.jsonl
#   NPROC=8 bash recipes/sft.sh anchor data.path=FILE.jsonl                       # eight processes with torchrun
#   bash recipes/sft.sh anchor tiny data.path=FILE_OR_FOLDER model.name=FOLDER    # a small pretrained model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
run sft "$@"
