"""An asynchronous client's connections to a running server."""

from __future__ import annotations

import asyncio

import aiohttp

TIMEOUT_S = 900
"""Longest time of one request."""
FLUSH_FOR_S = 12.0
"""How long a refused `/flush_cache` is repeated: a server that has just answered refuses it for a moment."""
_PAUSE_S = 0.02


class HttpClient:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def flush(self) -> None:
        """Empty the prefix cache.

        Raises:
            RuntimeError: the server refused it for `FLUSH_FOR_S`.
        """
        for _ in range(int(FLUSH_FOR_S / _PAUSE_S)):
            async with self.session.post(f"{self.url}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(_PAUSE_S)
        raise RuntimeError(f"/flush_cache was refused for {FLUSH_FOR_S} s")


async def require_ok(response: aiohttp.ClientResponse) -> None:
    """Check an answer's status.

    Raises:
        RuntimeError: it is not 200; names the route, and has the beginning of the answer.
    """
    if response.status != 200:
        raise RuntimeError(f"{response.url.path} answered {response.status}: {(await response.text())[:500]}")


def new_session() -> aiohttp.ClientSession:
    """Return a session without a limit of connections, for `async with`.

    SGLang's server closes a connection that was idle for five seconds, and a request sent at that moment fails: so idle
    connections are closed here before.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector, read_bufsize=2**22
    )
