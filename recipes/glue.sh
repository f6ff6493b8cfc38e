#!/usr/bin/env bash
# Trains recipes/glue.yaml on a task with a term, evaluates it and prints its scores. See there for published scores.
#
#   bash recipes/glue.sh r3f rte                         # tasks: cola sst2 mrpc qqp stsb mnli qnli rte wnli
#   NPROC=8 bash recipes/glue.sh r4f mnli                # eight processes with torchrun
#   bash recipes/glue.sh r3f rte tiny data.path=FOLDER model.name=FOLDER    # a small pretrained model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
run glue "$@"
