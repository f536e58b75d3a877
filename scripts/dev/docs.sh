#!/usr/bin/env bash
# Builds the documentation into site/, with search, from the checkout alone: no page asks another server for anything.
#
#   scripts/dev/docs.sh            builds; a dead link is an error
#   scripts/dev/docs.sh serve      builds, and shows the pages at http://127.0.0.1:8000 until Ctrl-C (search needs a server)
#
# Settings (environment): those of scripts/env.sh (VENV, PYTHON).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
bash scripts/env.sh dev >&2
python="${VENV:-$root/.venv}/bin/python"
case "${1:-build}" in
  build)
    "$python" -m mkdocs build --strict --quiet --site-dir site
    echo "site/index.html"
    ;;
  serve) exec "$python" -m mkdocs serve --strict ;;
  *)
    echo "docs.sh: usage: scripts/dev/docs.sh [serve]" >&2
    exit 2
    ;;
esac
