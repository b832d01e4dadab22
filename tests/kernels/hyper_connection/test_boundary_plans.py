"""The plan of a call, by its number of tokens and the clusters that a GPU runs at once; nothing is compiled."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from dsv4_kernels.hyper_connection import choice
from dsv4_kernels.hyper_connection.plan import Plan


def test_which_plan() -> None:
    def chosen(num_tokens: int, d: int = 4096) -> tuple[int, int]:
        plan = choice.chosen(num_tokens, d, 24, True, False)
        return plan.tokens, plan.teams

    assert [chosen(n) for n in (1, 4, 5, 16, 17, 64, 65, 128)] == [(n, 1) for n in (1, 1, 2, 2, 4, 4, 8, 8)]
    assert chosen(129) == chosen(8192) == (8, 2)
    assert chosen(8192, d=7168) == (8, 1)  # fn does not fit


def test_which_plan_on_blackwell() -> None:
    """Groups as small as on Hopper if all clusters run at once, else larger ones; every plan is compiled ahead."""

    def chosen(num_tokens: int, clusters: int, d: int = 4096, rows: int = 24, post: bool = True) -> Plan:
        return choice.chosen(num_tokens, d, rows, post, False, rows == 24, clusters)

    def wide(tokens: int, d: int = 4096) -> Plan:
        return Plan(tokens, d, 24, True, fp8=True, one_cta=True, interleaved=True)

    sizes = (1, 4, 5, 16, 17, 60, 61, 64, 65, 120)
    assert [chosen(n, 15) for n in sizes] == [wide(n) for n in (1, 1, 2, 2, 4, 4, 8, 8, 8, 8)]
    assert [chosen(n, 16) for n in (61, 64, 65, 128)] == [wide(n) for n in (4, 4, 8, 8)]
    assert chosen(121, 15) == chosen(17, 2) == Plan(8, 4096, 24, True, fp8=True)
    assert [chosen(n, 15, 7168) for n in (60, 64)] == [wide(4, 7168), wide(8, 7168)]
    assert wide(8).side_by_side == 4 and wide(8, 7168).side_by_side == Plan(8, 4096, 24, True).side_by_side == 1
    for n in (129, 8192):
        assert chosen(n, 15) == choice.chosen(n, 4096, 24, True, False, True)
    assert chosen(64, 15, rows=4) == choice.chosen(64, 4096, 4, True, False)  # of hc_finish
    for fewest in (1, 30):
        compiled = set(choice.plans(4096, True, "sm_100a", fewest=fewest))
        forms = [{"rows": rows, "post": post} for rows, post in ((24, True), (24, False), (4, True))]
        needed = {chosen(n, c, **form) for n in range(fewest, 200) for c in range(20) for form in forms}
        assert needed <= compiled and (fewest > 1 or needed == compiled)
