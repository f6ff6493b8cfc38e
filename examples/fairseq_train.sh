#!/usr/bin/env bash
# fairseq-train with R3F: your data and your flags, and three more. Needs fairseq: docs/fairseq.md says how to install it.
#
#   bash examples/fairseq_train.sh DATA-BIN --arch bart_base --task translation -s source -t target --optimizer adam ...
set -euo pipefail
terms='{terms: {r3f: {weight: 0.1, scale: 0.1, relative: true, dropout: shared}}}' # or a file, such as recipes/terms/r3f.yaml
plugin="$(seqreg fairseq-dir)"
fairseq-train "$@" --user-dir "$plugin" --criterion seqreg --seqreg-terms "$terms" --label-smoothing 0.1
