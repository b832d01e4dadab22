"""Words that ranks send each other through mailboxes: a word that is not EMPTY says itself that it has arrived.

The protocol is described in `all_reduce/gpu.py`. Mailboxes are `host/mailboxes.py`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4_kernels.device import bf16_rows, ptx
from dsv4_kernels.host.mailboxes import MOST_RANKS, Mailboxes

EMPTY = 0xFFFFFFFF
"""A word that says that nothing has arrived: as bf16 and as fp32 a NaN that no arithmetic instruction returns."""
NAN = 0x7FFFFFFF
"""A word of NaN that is sent where a part holds EMPTY; in bf16 both halves are NaN."""
POLLS = 256
"""Polls between two readings of the clock."""

Addresses = NamedTuple("Addresses", [(f"rank_{r}", Int64) for r in range(MOST_RANKS)])
"""A mailbox of each rank, as this GPU addresses it."""


class Peers(NamedTuple):
    """A rank's mailboxes as dynamic arguments of a kernel; addresses are Int64."""

    own: Int64
    """This rank's mailbox."""
    buffer_of: Int64
    """[channels] int32: which buffer a channel uses next."""
    failed: Int64
    """int32 on this GPU: whether a sum has failed."""
    late: Int64
    """[ranks] int32 in the host's memory: which senders did not arrive."""
    time_limit: Int64
    """Nanoseconds."""
    buffer_bytes: Int64
    channel_bytes: Int64
    place_bytes: Int64
    rank: Int32
    mailboxes: Addresses


def peers_of(mailboxes: Mailboxes) -> Peers:
    """The arguments of a launch, as Python's numbers."""
    plan, addresses = mailboxes.plan, mailboxes.addresses
    return Peers(
        own=addresses[mailboxes.rank],
        buffer_of=mailboxes.buffer_of.data_ptr(),
        failed=mailboxes.failed.data_ptr(),
        late=mailboxes.late.data_ptr(),
        time_limit=mailboxes.time_limit,
        buffer_bytes=plan.buffer_bytes,
        channel_bytes=plan.channel_bytes,
        place_bytes=plan.place_bytes,
        rank=mailboxes.rank,
        mailboxes=Addresses(*addresses, *(0,) * (MOST_RANKS - plan.ranks)),
    )


def store(address: Int64, words: list) -> None:
    """Stores two or four words to any GPU's memory; each becomes visible to polls of that GPU at its own time."""
    listed = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
    ptx.asm(f"st.relaxed.sys.global.v{len(words)}.b32 [{{$r0}}], {{{listed}}};", [], address, *words)


def poll(address: Int64, count: int, exists: Int32 | int = 1) -> tuple:
    """Two or four words that any GPU may be storing at the same time; zeros unless `exists` is positive."""
    words = [f"{{$w{i}}}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {word}, 0;" for word in words)
    return ptx.asm(
        f"{{\n.reg .pred p;\nsetp.gt.s32 p, {{$r1}}, 0;\n{zeros}\n"
        f"@p ld.relaxed.sys.global.v{count}.b32 {{{', '.join(words)}}}, [{{$r0}}];\n}}",
        [Uint32] * count,
        address,
        Int32(exists),
    )


def load_flag(address: Int64) -> Int32:
    """A word that other CTAs of this GPU may be setting."""
    return ptx.asm("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", [Int32], address)


def set_flag(address: Int64) -> None:
    """Stores 1 for other CTAs of this GPU, and for the host."""
    ptx.asm("st.relaxed.sys.global.b32 [{$r0}], {$r1};", [], address, Int32(1))


def sendable(word: Uint32) -> Uint32:
    """The word, or another NaN in place of EMPTY."""
    return ptx.asm(
        f"{{\n.reg .pred p;\nsetp.eq.u32 p, {{$r0}}, {EMPTY};\nselp.b32 {{$w0}}, {NAN}, {{$r0}}, p;\n}}", [Uint32], word
    )


def empties(words: list) -> Int32:
    """1 if one of two or four words is EMPTY, else 0."""
    largest = "".join(f"max.u32 x, x, {{$r{i}}};\n" for i in range(1, len(words)))
    return ptx.asm(
        "{\n.reg .pred p;\n.reg .b32 x;\nmov.b32 x, {$r0};\n"
        f"{largest}setp.eq.u32 p, x, {EMPTY};\nselp.b32 {{$w0}}, 1, 0, p;\n}}",
        [Int32],
        *words,
    )


def total(parts: list, fp32: bool) -> list:
    """The sum in fp32 of the ranks' words, in the order of the ranks: a number for each fp32 or bf16 of a part."""
    numbers = [[ptx.as_f32(word) for word in words] if fp32 else bf16_rows.channels(words) for words in parts]
    added: list[Float32] = numbers[0]
    for part in numbers[1:]:
        added = [bf16_rows.add(a, b) for a, b in zip(added, part, strict=True)]
    return added


def time_limit_of(peers: Peers) -> Int64:
    """The limit of a wait; almost none after a sum that has failed. Called after `dependent_launch.wait`."""
    failed = load_flag(peers.failed)
    return ptx.asm(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\nselp.b64 {$w0}, 0, {$r1}, p;\n}", [Int64], failed, peers.time_limit
    )


def poll_parts(address: Int64, ranks: int, sender_bytes: int, count: int, exists: Int32 | int = 1) -> cute.Tensor:
    """The words of all ranks at a place of this rank's mailbox, [count * ranks], EMPTY where a word has not arrived;
    zeros unless `exists` is positive. The loads are only asked for; `wait_for_parts` looks at the words."""
    arrived = cute.make_rmem_tensor((count * ranks,), Uint32)
    for r in range(ranks):
        for w, word in enumerate(poll(address + r * sender_bytes, count, exists)):
            arrived[count * r + w] = word
    return arrived


def lacks_words(arrived: cute.Tensor, ranks: int, count: int) -> Int32:
    """1 if a word of the result of `poll_parts` is EMPTY, else 0."""
    missing = Int32(0)
    for r in range(ranks):
        missing = missing | empties([arrived[count * r + w] for w in range(count)])
    return missing


@cute.jit
def wait_for_parts(
    peers: Peers,
    address: Int64,
    arrived: cute.Tensor,
    time_limit: Int64,
    ranks: cutlass.Constexpr,
    sender_bytes: cutlass.Constexpr,
    count: cutlass.Constexpr,
) -> None:
    """Waits until `arrived`, the result of `poll_parts` at this address, has all words; EMPTY where the time is over.

    Sets `late` and `failed` if the time is over.
    """
    missing, polls, since = lacks_words(arrived, ranks, count), Int32(0), Int64(0)
    while missing != 0:
        for r in cutlass.range_constexpr(ranks):
            words = poll(address + r * sender_bytes, count)
            for w in cutlass.range_constexpr(count):
                arrived[count * r + w] = words[w]
        missing = lacks_words(arrived, ranks, count)
        polls += 1
        if missing != 0 and polls % POLLS == 0:
            now = cute.arch.globaltimer()
            if since == 0:
                since = now
            if now - since >= time_limit and polls > POLLS:
                for r in cutlass.range_constexpr(ranks):
                    if empties([arrived[count * r + w] for w in range(count)]) != 0:
                        set_flag(peers.late + 4 * r)
                set_flag(peers.failed)
                missing = Int32(0)
