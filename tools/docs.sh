#!/usr/bin/env bash
# Builds the documentation as a site in site/; a broken link or reference is an error.
#
#   bash tools/docs.sh              # then open site/index.html
#   bash tools/docs.sh serve        # at http://127.0.0.1:8000, built again when a page changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
action="${1:-build}"
source tools/environment.sh docs
case "$action" in
    build) NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet && echo "Written: site/index.html" ;;
    serve) NO_MKDOCS_2_WARNING=1 python -m mkdocs serve --strict ;;
    *) echo "bash tools/docs.sh [build|serve]: unknown: $action" >&2; exit 2 ;;
esac
