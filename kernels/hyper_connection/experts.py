"""The sum over experts inside of the boundary: a thread sums its channels of its token, in `y`'s place.

A launch less than with the sum's own kernel (`moe/sums.py`), with its bits: both add by `device/expert_rows.py`.
"""

from cutlass import Int32

from dsv4_kernels.device import bf16_rows, expert_rows, ptx
from dsv4_kernels.hyper_connection.plan import ArgumentsOfExperts, Plan


class Experts:
    """Methods of a thread of a plan with experts."""

    plan: Plan

    def slots(self, args: ArgumentsOfExperts, token: Int32) -> list:
        """The slots of a token's experts by rising expert; -1 after the last token."""
        return expert_rows.in_order(
            *expert_rows.listed(args.of_experts, token, self.plan.experts, args.num_tokens - token)
        )

    def sum_over_experts(self, args: ArgumentsOfExperts, token: Int32, channel: Int32, slots: list) -> list:
        """A thread's channels of the sum, as words of bf16 or fp32, run after run; zeros after the last token."""
        plan, exists = self.plan, args.num_tokens - token
        runs = [
            expert_rows.load(args.of_experts, slots, token, channel + run * plan.run_step, plan.run_words, exists, True)
            for run in range(plan.runs)
        ]
        sums = [value for rows in runs for value in expert_rows.total(rows, plan.fp32_parts, True)]
        return [ptx.as_u32(value) for value in sums] if plan.fp32_parts else list(bf16_rows.packed(sums))
