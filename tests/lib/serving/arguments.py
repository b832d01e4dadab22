"""A server's arguments without a server."""

from types import SimpleNamespace
from typing import Any


def arguments(**fields: Any) -> SimpleNamespace:
    """SGLang's defaults for a server on a CPU, and the fields."""
    from sglang.srt.server_args import ServerArgs

    unset = ServerArgs(model_path="none", device="cpu")
    return SimpleNamespace(**{**{name: getattr(unset, name) for name in unset.__struct_fields__}, **fields})
