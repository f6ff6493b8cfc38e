#!/usr/bin/env bash
# Runs a study of this folder: `seqreg study`, in an environment that is made if there is none.
#
#   bash recipes/studies/run.sh noise --models FOLDER --data FOLDER                   # the same command resumes it
#   bash recipes/studies/run.sh noise --models FOLDER --data FOLDER --plan            # commands and number of runs
#   bash recipes/studies/run.sh noise --size paper                                    # downloads the paper's model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export HF_HUB_OFFLINE="${SEQREG_OFFLINE:-${HF_HUB_OFFLINE:-0}}"
source tools/environment.sh ""
seqreg study "$@"
