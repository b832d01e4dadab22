"""Figures of a GPU that the model of time uses: published rates, and the few constants that were fitted."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fitted:
    """Constants of an H200 that `measured.fit` finds from `measured.FITTED`, and from no other kernel's times."""

    gap_us: float = 1.33
    """From the end of a launch to the first load of the next one in a CUDA graph. The fit finds no difference between
    launches in turns and dependent launches, which save the loads that they ask for before the wait."""
    dram_us: float = 1.35
    """The first load of a launch from memory, until its value can be used, while all multiprocessors begin to load."""
    memory_share: float = 0.716
    """Share of the published bandwidth of memory that a launch reaches whose work was divided beforehand: it ends with
    its slowest multiprocessor."""
    l2_clock_bytes: float = 40.2
    """Bytes a clock from L2 into a multiprocessor."""
    issue_clocks: float = 1.0
    """Clocks between two PTX instructions of a warp that runs alone on its scheduler, on average. The fit ends at its
    bound: a warp issues at most one instruction a clock, and the assembler removes a part of PTX's instructions."""
    peer_us: float = 1.63
    """From a store into another GPU's memory to the load that sees it."""
    link_share: float = 0.66
    """Share of the published bandwidth of NVLink that peer stores reach."""


COPY_SHARE = 0.88
"""Share of an H200's 4.8 TB/s with which a copy reads and writes: 4.23 TB/s (`copy_tb_s` of the results). Its launch
has so many CTAs that multiprocessors which get less bandwidth compute fewer of them."""
BALANCED_WAVES = 4
"""Waves of CTAs from which on a launch balances itself so."""
L2_CLOCKS = 263
"""Latency of a load from L2 on Hopper (Luo et al. 2024, arXiv 2402.13499)."""
FLIGHT_US = 0.6
"""Latency of memory while other loads are on their way, but fewer than its bandwidth allows (docs/log/decode_step.md:
seven dependent loads)."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of one GPU, and constants.

    Sources: NVIDIA's datasheets (H200: 4.8 TB/s, 989 TFLOP/s in bf16 at 132 multiprocessors and 1.83 GHz, 900 GB/s of
    NVLink in both directions; HGX B200 and B300: 8 TB/s, 2.25 PFLOP/s in bf16, 1.8 TB/s); `ptx_emulator.report` for
    rates a clock. B300's faster exponentials and its faster FP4 products bound no launch here. Latencies and shares of
    Blackwell are assumed to be an H200's: nothing was measured there.
    """

    name: str
    multiprocessors: int
    clocks_us: float
    """Clocks a microsecond while most multiprocessors work: power limits them."""
    most_clocks_us: float
    """Clocks a microsecond otherwise: the highest clock."""
    memory_bytes_us: float
    """Published bytes a microsecond between memory and L2."""
    link_bytes_us: float
    """Published bytes a microsecond to the other GPUs of the host, in one direction."""
    bf16_flops_clock: int
    """Dense flops a clock of one multiprocessor."""
    fitted: Fitted = Fitted()

    def at(self, clocks_us: float) -> Gpu:
        """Return the same GPU at another clock."""
        return replace(self, clocks_us=clocks_us)

    @property
    def is_hopper(self) -> bool:
        """Return whether the kernels for sm_90a run on it."""
        return self.name == "H200"

    def memory_us(self, waves: float) -> float:
        """Return the bytes a microsecond between memory and L2 of a launch whose CTAs start in so many waves."""
        return self.memory_bytes_us * (COPY_SHARE if waves >= BALANCED_WAVES else self.fitted.memory_share)

    def clock(self, ctas: int) -> float:
        """Return the clocks a microsecond of a launch that runs so many CTAs at once."""
        return self.clocks_us if ctas >= self.multiprocessors / 2 else self.most_clocks_us

    def l2_us(self, ctas: int) -> float:
        """Return the bytes a microsecond from L2 into all multiprocessors."""
        return self.fitted.l2_clock_bytes * self.clock(ctas) * self.multiprocessors


H200 = Gpu("H200", 132, 1600.0, 1980.0, 4.8e6, 450e3, 4096)
B200 = Gpu("B200", 148, 1850.0, 1965.0, 8.0e6, 900e3, 8192)
B300 = Gpu("B300", 148, 1850.0, 1965.0, 8.0e6, 900e3, 8192)
GPUS = {gpu.name: gpu for gpu in (H200, B200, B300)}
