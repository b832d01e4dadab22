"""The benchmarks' HTTP client: errors of a server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from lib.http_client import new_session, require_ok


async def ask(status: int) -> None:
    """Require an answer of this status to be 200."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="too long" + "x" * 1000)

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
        async with new_session() as session, session.post(url) as response:
            await require_ok(response)
    finally:
        await runner.cleanup()


def test_an_error_names_the_route_and_has_the_beginning_of_the_answer() -> None:
    asyncio.run(ask(200))
    with pytest.raises(RuntimeError, match=r"^/generate answered 400: too longx{492}$"):
        asyncio.run(ask(400))
