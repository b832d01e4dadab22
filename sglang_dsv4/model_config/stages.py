"""How the stages of a pipeline (`--pp-size`) share a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES_VARIABLE = "SGLANG_PP_LAYER_PARTITION"
"""SGLang's variable with the number of layers of each stage."""


class StagesDifferError(RuntimeError):
    """Two stages of a pipeline have decided otherwise; the server must end."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. All stages must batch, cache and evict alike, so this server ends. Report this line, with the "
            "flags and the requests before it"
        )


@dataclass(frozen=True)
class Stage:
    """One of `count` stages, which have consecutive layers. The first has the embedding, the last the head.

    Attributes:
        index: of the stage.
        count: number of stages; 1 where the model is not divided.
        layers: the layers that this stage has.
        num_layers: the model's.
    """

    index: int
    count: int
    layers: range
    num_layers: int

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """The one stage of a model that is not divided."""
        return cls(0, 1, range(num_layers), num_layers)

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.index == self.count - 1

    def require_entries(self, ratios: Sequence[int]) -> None:
        """Raise if the stage has sliding-window layers only: its pools would hold nothing of a token.

        Args:
            ratios: the compression ratio of each of the model's layers, 0 for a sliding window only.

        Raises:
            ValueError: names the stage.
        """
        if self.count > 1 and not any(ratios[layer] for layer in self.layers):
            raise ValueError(
                f"{self.name}, has no layer with compressed entries: use fewer stages, or give it more layers by "
                f"{SIZES_VARIABLE}"
            )

    @property
    def name(self) -> str:
        """The stage for messages and identities: its number, and its layers."""
        return f"stage {self.index} of {self.count}, layers {self.layers.start} to {self.layers.stop - 1}"


def stages(num_layers: int, count: int, sizes: str | None = None) -> tuple[Stage, ...]:
    """All stages of a model, first to last, as SGLang divides the layers.

    Args:
        num_layers: the model's.
        count: `--pp-size`.
        sizes: layers of each stage, divided by commas (`SIZES_VARIABLE`); None: equal numbers, and one layer
            more on the last stages where they can't be equal.

    Raises:
        ValueError: the layers can't be divided so.
    """
    if not 1 <= count <= num_layers:
        raise ValueError(f"--pp-size {count}: expected 1 to {num_layers} stages, one layer each at least")
    if count == 1 or not sizes:
        each, more = divmod(num_layers, count)
        numbers = [each] * (count - more) + [each + 1] * more
    else:
        parts = [part.strip() for part in sizes.split(",")]
        numbers = [int(part) if part.isdecimal() else 0 for part in parts]
        if len(numbers) != count or sum(numbers) != num_layers or not all(numbers):
            raise ValueError(
                f"{SIZES_VARIABLE}={sizes}: expected {count} numbers of layers (--pp-size {count}), divided by "
                f"commas, each at least 1, {num_layers} together"
            )
    ends = [sum(numbers[: i + 1]) for i in range(count)]
    return tuple(
        Stage(i, count, range(end - number, end), num_layers)
        for i, (number, end) in enumerate(zip(numbers, ends, strict=True))
    )
