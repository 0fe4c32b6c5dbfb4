"""Ctrl-C during a step: noted at once, and raised at the next point where nothing is half done.

A KeyboardInterrupt can come up between any two lines of Python: while a mode of torch is being left, it would stay on for
good. Inside a step it comes up in `poll` alone, which every pass of the model and every curvature product begins with.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Note:
    """Whether an interrupt is waiting, and whether parameters are being written. Signal handlers belong to the whole
    process, so there is one note for it."""

    waiting = False
    writing = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler: the second Ctrl-C does not wait (a pass may take long), unless parameters are being written."""
        if self.waiting and not self.writing:
            raise KeyboardInterrupt
        self.waiting = True


_NOTE = _Note()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Around a step. Threads other than the main one, and handlers that the user has set, are left as they are."""
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _NOTE.waiting = _NOTE.writing = False
    signal.signal(signal.SIGINT, _NOTE.take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        poll()


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Around the writes at the end of a step, inside of `deferred_interrupts`: not even the second one comes up."""
    _NOTE.writing = True
    try:
        yield
    finally:
        _NOTE.writing = False


def poll() -> None:
    """Raises the KeyboardInterrupt that is waiting, if one is."""
    if _NOTE.waiting:
        _NOTE.waiting = False
        raise KeyboardInterrupt
