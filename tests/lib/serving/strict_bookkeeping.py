"""Bookkeeping errors of tails end a test: the ledgers of this process, and of every server that a test starts, raise.

Outside of tests a ledger counts them, and the server goes on. In a server's processes this module is a plugin of
SGLang, found through PYTHONPATH. A ledger that is made with `strict=False` still counts.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

ENTRY_POINT = "[sglang.srt.plugins]\nstrict_bookkeeping = strict_bookkeeping:setup\n"


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin into `folder`; returns the environment of servers that load it."""
    info = folder / "strict_bookkeeping-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strict-bookkeeping\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "strict_bookkeeping.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


def setup() -> None:
    """The plugin's entry point: ledgers of this process raise by default."""
    from dsv4_radix_cache.ledger import Ledger

    original = Ledger.__init__

    @functools.wraps(original)
    def strict(self: Ledger, *args: object, **options: object) -> None:
        original(self, *args, **{"strict": True, **options})

    Ledger.__init__ = strict
