"""Caches the source locations of a CuTe DSL kernel's operations.

The DSL walks up the stack and builds a location for every operation that it traces, even for a line that it has traced
a thousand times: a third of the tracing time. The cache is keyed by code object and instruction; locations that MLIR
owns are kept for the current context only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_framework: dict[CodeType, bool] = {}
_infos: dict[tuple[CodeType, int], inspect.Traceback] = {}


class _OfContext:
    """The locations of the latest context."""

    def __init__(self) -> None:
        self.context: Any = None
        self.locations: dict[int, Any] = {}

    def forget(self) -> None:
        self.context, self.locations = None, {}


_of_context = _OfContext()


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(module, name, replacement) for the DSL's functions."""
    from cutlass._mlir import ir
    from cutlass._mlir_helpers import op

    build = op._get_location_from_frame_info

    def caller_frame_info() -> inspect.Traceback | None:
        start = frame = sys._getframe(1).f_back
        if not op._INCLUDE_LIB_FRAME:
            while frame is not None:
                code = frame.f_code
                framework = _framework.get(code)
                if framework is None:
                    framework = _framework[code] = op._is_framework_stack_frame(frame)
                if not framework:
                    break
                frame = frame.f_back
        frame = frame or start
        if frame is None:
            return None
        key = (frame.f_code, frame.f_lasti)
        info = _infos.get(key)
        if info is None:
            info = _infos[key] = op._fast_frameinfo(frame)
        return info

    def location(info: inspect.Traceback) -> Any:
        context = ir.Context.current
        if _of_context.context is not context:
            _of_context.context, _of_context.locations = context, {}
        found = _of_context.locations.get(id(info))  # `_infos` keeps it alive
        if found is None:
            found = _of_context.locations[id(info)] = build(info)
        return found

    yield op, "_get_caller_frame_info", caller_frame_info
    yield op, "_get_location_from_frame_info", location


def forget_context() -> None:
    """Releases the latest context."""
    _of_context.forget()
