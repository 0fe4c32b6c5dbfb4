"""The last source: the file from its public home page, by URL."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shf.lab.clock import Clock, wall

from .errors import SourceError
from .files import SLACK, DataFile

CONNECT_SECONDS = 30.0
TOTAL_SECONDS = 900.0
CHUNK = 1 << 18


@dataclass(frozen=True)
class HomePage:
    """Each file from the URL it names."""

    page: str

    @property
    def description(self) -> str:
        return f"home page {self.page}"

    def deliver(self, files: Sequence[DataFile], progress: Callable[[str], None]) -> Iterator[tuple[DataFile, bytes]]:
        for file in files:
            progress(f"downloading {file.home}")
            yield file, download(file.home, file.size + SLACK)


def download(url: str, limit: int, *, seconds: float = TOTAL_SECONDS, clock: Clock = wall) -> bytes:
    """At most ``limit`` bytes from an http(s) address, within ``seconds``."""
    deadline = clock() + seconds
    request = urllib.request.Request(url, headers={"User-Agent": "shf"})
    content = bytearray()
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            while chunk := answer.read1(CHUNK):  # what has come: `read` would wait for all of it, beyond the deadline
                content += chunk
                if len(content) > limit:
                    raise SourceError(f"{url}: more than the {limit} bytes expected")
                if clock() > deadline:
                    raise SourceError(f"{url}: not finished within {seconds:.0f} s")
    except (OSError, http.client.HTTPException) as fault:  # URLError and TimeoutError are OSErrors
        raise SourceError(f"{url}: {fault}") from fault
    return bytes(content)
