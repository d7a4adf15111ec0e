"""Reads, writes and records Mizan traces: which experts a mixture-of-experts model chose.

The format is specified in FORMAT.md beside this package's sources. Reading and writing need h5py
and numpy; recording needs PyTorch, which is imported when a recorder starts.
"""

from .merging import merge
from .reader import Call, Trace, TraceError
from .reader import open_trace as open  # noqa: A001 - mizan.open(path), as in the manual
from .recorder import Recorder, record
from .writer import Writer

__all__ = ["Call", "Recorder", "Trace", "TraceError", "Writer", "merge", "open", "record"]
__version__ = "0.1.0"
