#!/usr/bin/env bash
# Runs a study of this folder: `python -m research`, in an environment that is made if there is none.
#
#   bash research/run.sh noise --models FOLDER --data FOLDER                   # the same command resumes it
#   bash research/run.sh noise --models FOLDER --data FOLDER --plan            # commands and number of runs
#   bash research/run.sh noise --size paper                                    # downloads the paper's model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE="${SEQREG_OFFLINE:-${HF_HUB_OFFLINE:-0}}"
source tools/environment.sh ""
python -m research "$@"
