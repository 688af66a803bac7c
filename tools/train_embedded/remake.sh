#!/usr/bin/env bash
# Makes again what depends on the embedded model's weights, after `python -m tools.train_embedded export`. Figures that
# the documentation quotes go to $OUT; its tables are edited by hand. About three hours of two cores; every part can also
# be run alone: remake.sh scores calibration quality edges pictures
set -euo pipefail

PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-.train/remake}
mkdir -p "$OUT"

scores() { # evaluation.json, the contact sheet, and what limits the scores
  "$PYTHON" -m tools.train_embedded evaluate | tee "$OUT/evaluate.txt"
  "$PYTHON" -m tools.train_embedded limits --cases 20 | tee "$OUT/limits.txt"
}

calibration() { # compare with model_executor/embedded/calibration.json, whose setting is chosen by hand
  "$PYTHON" -m benchmarks.quality images "$OUT/edits" --num-edits 24
  "$PYTHON" -m entrypoints.calibrate --images "$OUT/edits/images" --prompts-file "$OUT/edits/prompts.txt" \
    --num-edits 24 --schedule-steps 8 28 --dtype float32 --output "$OUT/calibration.json"
}

quality() { # the tables of docs/quality.md
  "$PYTHON" -m benchmarks.quality --steps 8 --num-edits 100 | tee "$OUT/silhouettes.txt"
  "$PYTHON" -m benchmarks.quality --steps 8 --num-edits 100 --masks box | tee "$OUT/boxes.txt"
  "$PYTHON" -m benchmarks.quality --steps 28 --num-edits 48 --masks box | tee "$OUT/boxes_28.txt"
  "$PYTHON" -m benchmarks.quality --steps 28 --num-edits 100 --masks box --step-schedule calibrated |
    tee "$OUT/boxes_calibrated.txt"
  "$PYTHON" -m benchmarks.quality step-skipping --threads 1 | tee "$OUT/step_skipping.txt"
  "$PYTHON" -m benchmarks.quality by-ratio | tee "$OUT/by_ratio.txt"
}

edges() { # the ControlNet, which adds to this model's blocks: train it anew
  rm -rf .train/edges
  "$PYTHON" -m tools.train_edges | tee "$OUT/edges.txt"
}

pictures() { # docs/benchmarks_sheet_*.png, and the playground's screenshots
  "$PYTHON" -m benchmarks.evidence --only quality
  npm --prefix tests/browser run screenshots
}

for part in "${@:-all}"; do
  case $part in
    all) scores && calibration && quality && edges && pictures ;;
    scores | calibration | quality | edges | pictures) "$part" ;;
    *)
      echo "remake.sh: no part $part" >&2
      exit 1
      ;;
  esac
done
