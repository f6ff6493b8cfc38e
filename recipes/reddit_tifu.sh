#!/usr/bin/env bash
# Trains recipes/reddit_tifu.yaml with a term, evaluates it and prints its scores. See there for hardware and published scores.
#
#   bash recipes/reddit_tifu.sh r3f
#   NPROC=8 bash recipes/reddit_tifu.sh r3f                       # eight processes with torchrun
#   bash recipes/reddit_tifu.sh r3f tiny data.path=FILE_OR_FOLDER model.name=FOLDER    # a small pretrained model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
run reddit_tifu "$@"
