"""A stream for what a person may see and nothing depends on: where it cannot be written, it falls silent."""

import io
from typing import IO


class Outlet:
    """Passes text on to a stream; after the first failure (a full disk, a reader who has left, a terminal that is gone) to
    nobody, and likewise from the start where Python has no such stream. `rich` takes it for a file."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # ValueError: it was closed
                self._stream = None
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def line(self, text: str) -> None:
        """A line that is seen at once."""
        self.write(f"{text}\n")
        self.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()
