"""Resources and instruction counts of a kernel, read from its cubin without a GPU or CUDA's tools."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_REGISTERS, _FRAME_BYTES, _STACK_BYTES = 0x2F, 0x11, 0x12  # attributes of .nv.info: (symbol, value)
_OPCODE = 0xFFF  # low bits of the first of an instruction's two 64-bit words, for GPUs since Volta
_WGMMA, _LOCAL = (0x9F0, 0xDF0), (0x983, 0x387)  # HGMMA in two encodings; LDL and STL
_NAMED = {0x216: "PRMT", 0xDF3: "QGMMA", 0x9F3: "QGMMA", 0x82E: "ACQBULK", 0x82D: "PREEXIT"}
_NAMED |= {0x981: "LDG", 0x381: "LDG", 0x986: "STG", 0x386: "STG", 0xFAE: "LDGSTS", 0x5B4: "UTMALDG"}
_WARPGROUP = 0x9C5  # .ARRIVE and .DEPBAR
_IS_WAIT = 1 << 47  # bit that tells WARPGROUP.DEPBAR from WARPGROUP.ARRIVE


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the sections of a 64-bit ELF file."""
    table = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        begin = names + name
        has_bytes = kind != 8  # SHT_NOBITS
        yield cubin[begin : cubin.index(b"\0", begin)].decode(), cubin[offset : offset + size if has_bytes else offset]


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and stack bytes of a thread at launch and bytes of code, for a cubin with one kernel.

    Spilled registers are kept on the stack: without stack bytes there are no spills.
    """
    found = {"registers": 0, "stack_bytes": 0, "code_bytes": 0}
    for name, contents in sections(cubin):
        if name.startswith(".text."):
            found["code_bytes"] += len(contents)
        if not name.startswith(".nv.info"):
            continue
        place = 0
        while place < len(contents):
            kind, attribute, value_bytes = struct.unpack_from("<BBH", contents, place)
            place += 4
            if kind == 4:  # a value with a length of its own follows; other kinds hold the value in the two bytes
                if attribute in (_REGISTERS, _FRAME_BYTES, _STACK_BYTES):
                    key = "registers" if attribute == _REGISTERS else "stack_bytes"
                    found[key] = max(found[key], struct.unpack_from("<II", contents, place)[1])
                place += value_bytes
    assert found["registers"] > 0, "the cubin says nothing about registers"
    return found


def opcodes(cubin: bytes) -> Iterator[str]:
    """Yield, in order, the instructions that have a name here: PRMT, QGMMA (wgmma of FP8), waits for wgmma, global
    loads and stores (not bulk copies), `griddepcontrol.wait` (ACQBULK) and `.launch_dependents` (PREEXIT)."""
    for name, contents in sections(cubin):
        if name.startswith(".text."):
            for word, _ in struct.iter_unpack("<QQ", contents):
                opcode = word & _OPCODE
                if opcode == _WARPGROUP and word & _IS_WAIT:
                    yield "wait"
                elif opcode in _NAMED:
                    yield _NAMED[opcode]


def hopper_instructions(cubin: bytes) -> dict[str, int]:
    """Return the numbers of wgmma products, of waits for them, and of stack accesses."""
    found = {"wgmma": 0, "wgmma_waits": 0, "stack_accesses": 0}
    for name, contents in sections(cubin):
        if name.startswith(".text."):
            for word, _ in struct.iter_unpack("<QQ", contents):
                opcode = word & _OPCODE
                found["wgmma"] += opcode in _WGMMA
                found["wgmma_waits"] += opcode == _WARPGROUP and bool(word & _IS_WAIT)
                found["stack_accesses"] += opcode in _LOCAL
    return found
