"""The check of batch invariance on a CPU: it finds operators whose bits depend on the number of rows."""

from __future__ import annotations

import pytest
import row_invariance
import torch
from row_invariance import MODELS, Operator, ask, operators
from torch import Tensor

from dsv4_kernels import registry

CPU = torch.device("cpu")


def operator(rows: row_invariance.Rows) -> Operator:
    return Operator("planted", "by hand", "8 x 64", True, rows)


X, WEIGHT = row_invariance.normal(40, 64, device=CPU, seed=1).float(), row_invariance.normal(8, 64, device=CPU, seed=2)


def by_rows(rows: slice) -> Tensor:
    """Sums in the reverse order for more than 16 rows, as a product with two tiles may."""
    order = torch.arange(64) if rows.stop - rows.start <= 16 else torch.arange(63, -1, -1)
    total = torch.zeros(rows.stop - rows.start, 8)
    for k in order:
        total = total + X[rows, k : k + 1] * WEIGHT[:, k].float()
    return total


def by_chance(rows: slice) -> Tensor:
    """Sums in a random order, as atomics do."""
    total = X[rows].sum(1)
    return torch.where(torch.rand(len(total)) < 0.5, total, torch.nextafter(total, torch.tensor(torch.inf)))


def test_what_depends_on_the_rows_is_found() -> None:
    verdict = ask(operator(by_rows), most=40, batches=(1, 8, 16, 17, 39, 40))
    assert verdict.differs_at == (1, 8, 16) and verdict.repeats and verdict.breaks_its_word
    verdict = ask(operator(by_chance), most=40, batches=(30,))
    assert not verdict.repeats and verdict.breaks_its_word
    verdict = ask(operator(lambda rows: X[rows] * 2), most=40, batches=(1, 8, 40))
    assert not verdict.differs_at and verdict.repeats and not verdict.breaks_its_word


def test_the_place_of_a_row_counts_too() -> None:
    """A batch of the last rows: an operator that treats the first row of a batch differently."""

    def first_is_special(rows: slice) -> Tensor:
        result = X[rows].clone()
        result[0] += 1.0
        return result

    assert ask(operator(first_is_special), most=40, batches=(5,)).differs_at == (5,)


def test_a_cpus_operators_keep_their_word() -> None:
    """Operators of every kind that sums; all are marked, and no missing implementation is called."""
    asked = list(operators(MODELS["tiny"], CPU, 48))
    names = {one.name for one in asked}
    assert {"linear_fp32: logits", "grouped_linear: wo_a", "hc_boundary", "rms_norm", "sampler: log_softmax"} <= names
    assert all(one.marked for one in asked)
    for one in asked:
        assert not ask(one, most=48, batches=(1, 3, 9, 47)).breaks_its_word, one.name
    assert not registry.requires_batch_invariance()


def test_on_a_gpu_both_choices_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch-invariant implementation and the default differ in this test, as on Blackwell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    cuda = torch.device("cuda", 0)
    found = row_invariance.implementations("linear_fp32", cuda)
    assert [(one.name, one.is_batch_invariant(cuda)) for one in found] == [("sm100", True), ("cublas", False)]
    assert [one.name for one in row_invariance.implementations("rms_norm", cuda)] == ["sm100"]
