"""Quality of mask-aware edits: `python -m benchmarks.quality [by-ratio | step-skipping | systems | images] ...`.

Each has --help. Without a name: mask-aware against exact edits, under the default settings or others.
"""

from __future__ import annotations

import sys

from benchmarks.quality import by_ratio, calibration_images, judge, step_skipping, systems

COMMANDS = {
    "by-ratio": by_ratio.main,
    "step-skipping": step_skipping.main,
    "systems": systems.main,
    "images": calibration_images.main,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name in COMMANDS:
        COMMANDS[name](rest)
    else:
        judge.main()
