"""Tables of a comparison with several contenders, from made up results."""

from __future__ import annotations

import pytest
from documents import served_tables
from lib.serve_rows import Row, as_json


def test_a_row_has_the_best_of_the_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best contender differs from row to row; the shortest time is the best. Variants of ours are in a table of
    their own."""
    work = "decode", 16, "tok_s"
    rows = [
        Row(*work, ours=1830.0, builtin=1307.0, contender="builtin+marlin"),
        Row(*work, ours=1830.0, builtin=1500.0, contender="builtin+flashinfer_fp8+custom_all_reduce"),
        Row(*work, ours=2013.0, builtin=1307.0, contender="builtin+marlin", of_ours="ours+our_all_reduce"),
        Row("decode_dspark_5.45", 1, "step_ms", ours=7.99, builtin=10.98, contender="builtin+marlin"),
        Row("decode_dspark_5.45", 1, "step_ms", ours=7.99, builtin=9.4, contender="builtin+flashinfer"),
        Row("decode", 16, "itl_p50", ours=1.0, builtin=1.0),
    ]
    monkeypatch.setattr(served_tables, "load", lambda name: {"rows": [as_json(row) for row in rows]})
    assert served_tables.best_of_builtin("any").splitlines()[2:] == [
        "| decode, 16 requests, tok/s | 1,830 | 1,500 | flashinfer fp8, custom all reduce | 1.22 |",
        "| DSpark, 5.45 tokens a step, 1 request: a step, ms | 7.99 | 9.40 | flashinfer | 1.18 |",
    ]
    assert served_tables.variants_of_ours("any").splitlines() == [
        "|  | ours | our all reduce |",
        "| --- | --- | --- |",
        "| decode, 16 requests, tok/s | 1,830 | 1.10 |",
    ]
