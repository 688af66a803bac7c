#!/usr/bin/env bash
# One run of at most 8 minutes on a machine with a GPU: `benchmarks/gpu/run.sh [options of benchmarks.gpu]`.
#
# PYTHON: the interpreter, by default python3. WHEELS: a folder of wheels for a machine without network, installed into a
# folder of their own. OUT: where results, document and log go, by default where benchmarks.gpu puts them.
set -euo pipefail

LIMIT_SECONDS=480

cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

options=("$@")
log=/dev/null
if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    options+=(--out "$OUT")
    log=$OUT/log
fi
timeout --kill-after=10 "$LIMIT_SECONDS" "$python" -m benchmarks.gpu "${options[@]}" 2>&1 | tee "$log"
