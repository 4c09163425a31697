"""How html_reader and html_program speak."""

from __future__ import annotations

import struct

SIZES = struct.Struct("<II")
SIZE = struct.Struct("<I")
"""Before a page: its bytes and those of its charset; before an answer: its bytes."""
