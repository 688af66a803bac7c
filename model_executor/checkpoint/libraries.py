"""Settings of the libraries that read checkpoints."""

from __future__ import annotations

import diffusers.utils.logging
import transformers.utils.logging


def quiet_libraries() -> None:
    """Turn off progress bars and advice of the libraries, which do not belong in a server's log; their errors still
    arrive as exceptions."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
