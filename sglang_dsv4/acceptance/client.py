"""HTTP requests to a server: JSON routes, chat answers whole or streamed, several at a time.

Temperature 0 and no thinking unless a request says otherwise: what is compared must not depend on a draw.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"


class Unreachable(ConnectionError):
    """No server answers at the URL, or the connection broke."""


class Refused(Exception):
    """A response whose status is not 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"{path} answered {status}: {text[:300]}")
        self.path, self.status, self.text = path, status, text

    @property
    def no_route(self) -> bool:
        """Whether the server lacks the route (a model that it does not serve is a 404, too, but says so)."""
        return self.status in (404, 405, 501) and "model" not in self.text.lower()


def switch(thinking: bool) -> dict[str, Any]:
    """The fields that switch thinking: SGLang's and vLLM's, and that of DeepSeek's API."""
    return {
        "chat_template_kwargs": {"thinking": thinking},
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }


@dataclass(frozen=True)
class Token:
    """An answer's token with its log-probability and the likeliest alternatives (text -> log-probability)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is the text that the server sent."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """A chat answer. Fields that a server does not report are None."""

    text: str
    calls: tuple[Call, ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    tokens: tuple[Token, ...] = ()


class Server:
    """The routes of one server.

    Args:
        url: `http://host:port`, with or without `/v1`.
        key: sent as a bearer token.
        timeout_s: seconds that a response may take.
        concurrency: the largest number of requests at a time.

    Raises:
        ValueError: the URL has no scheme or no host.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600, concurrency: int = 8) -> None:
        if not url.startswith(("http://", "https://")) or not url.split("://")[1].strip("/"):
            raise ValueError(f"expected a URL such as http://127.0.0.1:30000, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s, self.concurrency = timeout_s, concurrency
        self.model = ""
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            raise Refused(path, error.code, error.read().decode(errors="replace")) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise Unreachable(f"no answer from {self.url}{path}: {reason}") from error

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return a route's text.

        Raises:
            Unreachable, Refused
        """
        with self._open(path, body) as response:
            try:
                return response.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(f"{self.url}{path} broke off: {error}") from error

    def _json(self, path: str, body: dict[str, Any] | None) -> Any:
        text = self.text(path, body)
        try:
            return json.loads(text)
        except ValueError as error:
            raise Refused(path, 200, f"expected JSON, got {text[:100]!r}") from error

    def get(self, path: str) -> Any:
        """Return a route's JSON.

        Raises:
            Unreachable, Refused
        """
        return self._json(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return a route's JSON for a request.

        Raises:
            Unreachable, Refused
        """
        return self._json(path, body)

    def _chat_body(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 16}
        return {**body, **switch(False), **options}

    def chat(self, messages: list[dict[str, Any]] | str, **options: Any) -> Answer:
        """Return the answer to a conversation, or to one user turn.

        Args:
            messages: of the chat route.
            options: further fields of the request; by default temperature 0, max_tokens 16, and no thinking.

        Raises:
            Unreachable, Refused
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = self._chat_body(turns, {"return_meta_info": True, **options})
        return _answer(self.post(CHAT, body))

    def stream(self, messages: list[dict[str, Any]] | str, **options: Any) -> Answer:
        """Return the answer that the pieces of a stream make up; arguments as :meth:`chat`.

        Raises:
            Unreachable, Refused: also when the stream has no end.
        """
        return _joined(self.pieces(messages, **options))

    def pieces(self, messages: list[dict[str, Any]] | str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield a stream's chunks; leaving the iterator closes the connection, which aborts the request.

        Raises:
            Unreachable, Refused: also when the stream has no end.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = self._chat_body(turns, {"stream": True, "stream_options": {"include_usage": True}, **options})
        ended = False
        with self._open(CHAT, body) as response:
            try:
                for line in response:
                    data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                    if data == "[DONE]":
                        ended = True
                        break
                    if data.startswith("{"):
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise Refused(CHAT, 200, f"a stream with an error: {chunk['error']}")
                        yield chunk
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise Unreachable(f"a stream of {self.url} broke off: {error}") from error
        if not ended:
            raise Refused(CHAT, 200, "a stream ended without [DONE]")

    def together(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return `function` of each item, computed `concurrency` at a time; the first exception ends it.

        The threads are daemons, so that Ctrl-C does not wait for answers.
        """
        todo = list(items)
        results: list[Any] = [None] * len(todo)
        failures: list[BaseException] = []
        places = deque(range(len(todo)))

        def work() -> None:
            while places and not failures:
                try:
                    place = places.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    results[place] = function(todo[place])
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, len(todo)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            places.clear()
        if failures:
            raise failures[0]
        return results

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """Return the token ids of a `prompt` or of `messages`.

        Raises:
            Unreachable, Refused: the server has no such route, for example.
        """
        result = self.post("/tokenize", {"model": self.model, **body})
        ids = result.get("tokens") if isinstance(result, dict) else None
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise Refused("/tokenize", 200, f"expected a list of token ids as `tokens`, got {str(result)[:100]}")
        return ids


def _answer(body: Any) -> Answer:
    """The answer in a response of the chat route.

    Raises:
        Refused: the response has another form.
    """
    try:
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice["message"]
        calls = tuple(
            Call(call["function"]["name"], call["function"]["arguments"], call.get("id") or "")
            for call in message.get("tool_calls") or ()
        )
        ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
        return Answer(
            text=message.get("content") or "",
            calls=calls,
            finish=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=_cached(choice, usage),
            prompt_ids=None if ids is None else tuple(ids),
            tokens=_tokens(choice),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Refused(CHAT, 200, f"expected a chat completion, got {str(body)[:200]}") from error


def _cached(choice: dict[str, Any], usage: dict[str, Any]) -> int | None:
    """Prompt tokens that came from the prefix cache: SGLang's meta_info, OpenAI's usage, or DeepSeek's."""
    reported = (
        (choice.get("meta_info") or {}).get("cached_tokens"),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),
    )
    return next((count for count in reported if count is not None), None)


def _tokens(choice: dict[str, Any]) -> tuple[Token, ...]:
    entries = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(
        Token(
            entry["token"],
            entry["logprob"],
            tuple((top["token"], top["logprob"]) for top in entry.get("top_logprobs") or ()),
        )
        for entry in entries
    )


def _joined(chunks: Iterable[dict[str, Any]]) -> Answer:
    text, finish, usage = "", None, {}
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            finish = choice.get("finish_reason") or finish
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece.get("index") or 0, {"name": "", "arguments": "", "id": ""})
                function = piece.get("function") or {}
                call["id"] = piece.get("id") or call["id"]
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
    made = tuple(Call(call["name"], call["arguments"], call["id"]) for _, call in sorted(calls.items()))
    return Answer(text, made, finish, usage.get("prompt_tokens"), usage.get("completion_tokens"))
