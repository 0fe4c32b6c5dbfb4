"""Ctrl-C and SIGTERM as a request: the iteration in progress is finished, the state saved, then the run ends."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `signal_name`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal_name is not None
