"""Writing a text file in one step."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, whose folder is made where it is missing.

    The text goes to a temporary file in the same folder, which then takes the name: another process sees the
    old file or the new one, and a crash leaves no half of one. OSError when the folder can't be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)  # mkstemp makes files that their owner alone can read
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
