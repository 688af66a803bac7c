"""Quality of edits that compute less: `python -m benchmarks.quality NAME ...`, with a name of COMMANDS.

Each has --help. Without a name: mask-aware against exact edits, under the default settings or others.
"""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "by-ratio": "by_ratio",
    "step-skipping": "step_skipping",
    "samplers": "samplers",
    "systems": "systems",
    "images": "calibration_images",
}
"""Name -> module, imported when it is run: some need more libraries than others."""

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    module = COMMANDS.get(name)
    import_module(f"benchmarks.quality.{module or 'judge'}").main(rest if module else sys.argv[1:])
