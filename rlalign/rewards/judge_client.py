"""The connection of a judge to its server, which may send what it likes."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MOST_BYTES = 16 << 20
"""Longest reply that is read; one of 1024 tokens takes some thousands."""


def connect(base_url: str | None, key: str, time_limit: float) -> "AsyncOpenAI":
    """A client that talks to this server only: it follows no redirection, and reads no endless or packed reply.

    Args:
        base_url: Of the server, OpenAI's own by default.
        key: Sent to it.
        time_limit: Seconds to wait for each part of a reply.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http_client = DefaultAsyncHttpxClient(
        follow_redirects=False, headers={"Accept-Encoding": "identity"}, event_hooks={"response": [_bound]}
    )
    return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=time_limit, http_client=http_client)


def describe(error: BaseException, key: str) -> str:
    """What went wrong, in short, without the key, which a server may send back."""
    return (str(error.__cause__ or error) or repr(error))[:10_000].replace(key, "***")[:200]


async def _bound(response: Any) -> None:
    """Have a reply fail while it is read, once it is too long."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("the reply is compressed, which was not asked for")
    stream = response.stream

    class Bounded(type(stream)):  # type: ignore[misc]  # the client insists on a class of its own library's
        def __init__(self) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in stream:
                size += len(part)
                if size > MOST_BYTES:
                    raise ValueError(f"the reply is longer than {MOST_BYTES} bytes")
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = Bounded()
