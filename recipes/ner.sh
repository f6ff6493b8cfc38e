#!/usr/bin/env bash
# Trains recipes/ner.yaml on a task with a term, evaluates it and prints its scores.
#
#   bash recipes/ner.sh sift conll2003 data.path=FOLDER                        # tasks: conll2003 wnut17 pii
#   NPROC=8 bash recipes/ner.sh r3f pii data.path=train.json                   # eight processes with torchrun
#   bash recipes/ner.sh sift wnut17 tiny data.path=FOLDER model.name=FOLDER    # a small pretrained model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
run ner "$@"
