"""What can go wrong with data. Every message says what was found, what was expected and what to do."""


class DataError(Exception):
    """A data set cannot be had, read or stored."""


class NoSuchDataError(DataError):
    """A data set or a directory that was asked for by name, and is none."""


class DamagedDataError(DataError):
    """Bytes that are not what they should be: wrong checksum, truncated, not the format, too large."""


class MissingDataError(DataError):
    """No source has the data; the message lists the sources tried and how to place the files by hand."""


class SourceError(DataError):
    """One source failed; the next one is tried."""
