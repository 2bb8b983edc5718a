"""A judge: any server that speaks OpenAI's protocol, asked for a score or for a comparison."""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from rlalign.rewards.base import BatchedReward, Unavailable
from rlalign.rewards.extract import final_answer
from rlalign.rewards.judge_cache import ReplyCache
from rlalign.rewards.judge_text import PATTERNS, SYSTEM, TEMPLATES, as_text, columns_of, compile_pattern

log = logging.getLogger(__name__)

_GIVE_UP = 4  # requests lost in a row
_RETRIED = (408, 409, 429)
_REFUSED = (400, 413, 422)
_WINS = {"first": (1.0, 0.0), "second": (0.0, 1.0), "tie": (0.5, 0.5)}

Ask = tuple[str, list[dict[str, str]]]
"""Key of a request in the cache, and its messages."""


class Judge(BatchedReward):
    """What a language model behind a server says of a response, in [0, 1].

    ``scalar``: the number that ``pattern`` finds in the reply, from ``scale`` to [0, 1]. ``pairwise``: whether the
    response is better than the one in the column ``reference``, asked in both orders: 1, 0, or one half for a tie or
    for two replies that favour the same place.

    The response is data. It is put between markers that hold a random number of this request, so that no text can close
    them, and only the reply is searched for a verdict: its last match outside of ``<think>`` counts. A reply without a
    verdict, or with one off the scale, gives ``None`` (``parse_failures``), as does a request that the server refuses
    as malformed or too long (``refused``). Time-outs, lost connections, unreadable replies and the states 408, 409, 429
    and 5xx are tried again; what remains, and every other state, is :class:`Unavailable` (``unreachable``). When that
    befalls as many requests in a row as run at a time, at least 4, the rest of the batch is not asked for.

    The same request is sent once: replies are kept in memory, and in ``cache_dir`` for later runs.

    Args:
        model: Name of the model, as the server knows it.
        base_url: Of the server, ``http://localhost:8000/v1``, say; OpenAI's own by default.
        api_key_env: Environment variable that holds the key; ``None`` for a server that wants none.
        mode: ``scalar`` or ``pairwise``.
        template: What is asked, with fields in braces: ``{prompt}``, ``{response}`` (``{first}`` and ``{second}`` in
            ``pairwise``), ``{low}`` and ``{high}``, and any column of the data, ``{answer}``, say.
        system_prompt: Put before it, with ``{nonce}``, the number of the markers; empty for none.
        pattern: Regular expression, its first group the score, or ``first``, ``second`` or ``tie``; case is ignored.
        scale: Worst and best score.
        reference: Column of the response to compare with.
        answer_only: Show the answer without the thinking; a response without an answer gets 0 unasked.
        temperature: Of the judge; ``None`` leaves it to the server.
        max_tokens: Longest reply; ``None`` leaves it to the server.
        request_options: Further arguments of the request, ``{seed: 0}`` or ``{extra_body: {...}}``, say.
        time_limit: Seconds for a request, and longest wait before another try.
        retries: Further tries of a request that failed.
        backoff: Seconds before the first of them, doubled each time, unless the server says (``Retry-After``).
        concurrency: Requests at a time, on each rank.
        cache_size: Replies kept in memory.
        cache_dir: Folder of JSON-lines files with all replies; any number of processes may share it.

    Attributes:
        counts: ``requests``, ``cache_hits``, ``retries``, ``parse_failures``, ``refused``, ``unreachable``.

    Raises:
        ImportError: If the package openai is not installed.
        ValueError: If an argument is out of range, or the environment has no key.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        mode: Literal["scalar", "pairwise"] = "scalar",
        template: str | None = None,
        system_prompt: str = SYSTEM,
        pattern: str | None = None,
        scale: tuple[float, float] = (1, 10),
        reference: str = "reference",
        answer_only: bool = False,
        temperature: float | None = 0.0,
        max_tokens: int | None = 1024,
        request_options: dict[str, Any] | None = None,
        time_limit: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 8,
        cache_size: int = 10_000,
        cache_dir: str | None = None,
    ) -> None:
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ImportError("Judge needs the extra 'judge': pip install 'rlalign[judge]'.") from error
        _check_numbers(time_limit, retries, backoff, concurrency, cache_size, scale)
        if mode not in TEMPLATES:
            raise ValueError(f"mode must be 'scalar' or 'pairwise', got '{mode}'.")
        if base_url is not None and not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, got '{base_url}'.")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(
                f"The environment variable {api_key_env} holds no key; set it, or api_key_env: null for a server that "
                "wants none."
            )
        self.model, self.base_url, self.api_key_env, self.mode = model, base_url, api_key_env, mode
        self.template, self.system_prompt = template or TEMPLATES[mode], system_prompt
        self.pattern = compile_pattern(pattern or PATTERNS[mode])
        self.low, self.high = scale
        self.reference, self.answer_only = reference, answer_only
        self.columns = columns_of(self.template, mode, reference)
        own = {"temperature": temperature, "max_tokens": max_tokens}
        self.request = {key: value for key, value in own.items() if value is not None}
        self.request |= _check_options(request_options or {})
        self.time_limit, self.retries, self.backoff, self.concurrency = time_limit, retries, backoff, concurrency
        self.counts: Counter[str] = Counter()
        self._cache = ReplyCache(cache_size, cache_dir)
        self._lock = threading.Lock()
        self._warned = False

    def __call__(
        self, examples: Sequence[Mapping[str, Any]], responses: Sequence[str]
    ) -> list[float | Exception | None]:
        """Score responses, ``responses[i]`` being one to ``examples[i]``.

        Raises:
            ValueError: If an example lacks a column that is asked for.
        """
        asks = [self._asks(example, response) for example, response in zip(examples, responses, strict=True)]
        replies: dict[str, str | Exception | None] = {}
        new: dict[str, list[dict[str, str]]] = {}
        for key, messages in (ask for of_sample in asks for ask in of_sample):
            known = self._cache.get(key)
            if known is not None:
                replies[key] = known
            if known is not None or key in new:
                self._count("cache_hits")
            else:
                new[key] = messages
        if new:
            with ThreadPoolExecutor(1) as pool:  # this thread may run a loop of its own (a notebook does)
                replies |= pool.submit(asyncio.run, self._send(new)).result()
        return [self._verdict([replies[key] for key, _ in of_sample]) for of_sample in asks]

    def _asks(self, example: Mapping[str, Any], response: str) -> list[Ask]:
        """The requests about a response: one, two for both orders, none if it has nothing to judge."""
        for column in self.columns:
            if column not in example:
                raise ValueError(f"The example has no column '{column}'; it has {', '.join(example)}.")
        text = final_answer(response) if self.answer_only else getattr(response, "prefill", "") + str(response)
        if self.answer_only and not text:
            return []
        values = {name: as_text(example[name]) for name in self.columns}
        values |= {"low": f"{self.low:g}", "high": f"{self.high:g}"}
        if self.mode == "scalar":
            return [self._ask(values, response=text)]
        other = as_text(example[self.reference])
        return [self._ask(values, first=text, second=other), self._ask(values, first=other, second=text)]

    def _ask(self, values: dict[str, str], **marked: str) -> Ask:
        def messages(nonce: str) -> list[dict[str, str]]:
            texts = {name: text.encode("utf-8", "replace").decode() for name, text in marked.items()}  # half characters
            between = {name: f"<{name}-{nonce}>\n{text}\n</{name}-{nonce}>" for name, text in texts.items()}
            asked = [{"role": "user", "content": self.template.format(**values, **between, nonce=nonce)}]
            if not self.system_prompt:
                return asked
            return [{"role": "system", "content": self.system_prompt.replace("{nonce}", nonce)}, *asked]

        what = [self.base_url, self.model, self.request, messages("NONCE")]
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return key, messages(secrets.token_hex(8))

    async def _send(self, asks: dict[str, list[dict[str, str]]]) -> dict[str, str | Exception | None]:
        from rlalign.rewards.judge_client import connect

        secret = "none" if self.api_key_env is None else os.environ.get(self.api_key_env, "none")
        places = asyncio.Semaphore(self.concurrency)
        lost_in_a_row = 0
        async with connect(self.base_url, secret, self.time_limit) as client:

            async def send(key: str, messages: list[dict[str, str]]) -> tuple[str, str | Exception | None]:
                nonlocal lost_in_a_row
                async with places:
                    if lost_in_a_row >= max(self.concurrency, _GIVE_UP):  # it would take hours to wait for each of them
                        self._count("unreachable")
                        return key, Unavailable(f"The judge '{self.model}' cannot be reached; this was not tried.")
                    reply = await self._reply(client, messages)
                lost_in_a_row = lost_in_a_row + 1 if isinstance(reply, Exception) else 0
                if isinstance(reply, str):
                    self._cache.put(key, reply)
                return key, reply

            return dict(await asyncio.gather(*(send(*ask) for ask in asks.items())))

    async def _reply(self, client: Any, messages: list[dict[str, str]]) -> str | Exception | None:
        """The reply to a request, ``None`` if the server refuses it."""
        import openai

        from rlalign.rewards.judge_client import describe

        problem, wait = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                self._count("retries")
                await asyncio.sleep(min(wait, self.time_limit))
            self._count("requests")
            wait = self.backoff * 2**attempt
            try:
                # The client's own limit is one for each part of a reply, which a slow server never exceeds.
                request = client.chat.completions.create(model=self.model, messages=messages, **self.request)
                completion = await asyncio.wait_for(request, self.time_limit)
                return str(completion.choices[0].message.content or "")
            except openai.APIStatusError as error:
                problem = f"state {error.status_code}: {describe(error, client.api_key)}"
                if error.status_code in _REFUSED:
                    self._count("refused")
                    self._warn("refuses a request", problem)
                    return None
                if error.status_code not in _RETRIED and error.status_code < 500:
                    break
                wait = _seconds(error.response.headers.get("retry-after"), wait)
            except TimeoutError:
                problem = f"no reply within {self.time_limit:g} s"
            except openai.OpenAIError as error:
                problem = describe(error, client.api_key)
            except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:  # no such protocol
                problem = f"unreadable reply: {describe(error, client.api_key)}"
        self._count("unreachable")
        self._warn("cannot be reached", problem)
        return Unavailable(f"The judge '{self.model}' cannot be reached, {problem}")

    def _verdict(self, replies: list[str | Exception | None]) -> float | Exception | None:
        """The score that replies add up to."""
        failure = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failure is not None or None in replies:
            return failure
        verdicts = [self._parse(str(reply)) for reply in replies]
        if None in verdicts:
            self._count("parse_failures")
            return None
        if self.mode == "scalar":
            return verdicts[0][0] if verdicts and verdicts[0] else 0.0
        # The response is the first of the first order and the second of the second one.
        wins = [verdict[place] for place, verdict in enumerate(verdicts) if verdict]
        return sum(wins) / 2

    def _parse(self, reply: str) -> tuple[float, float] | None:
        """What a reply gives the first response and the second; a score is the first."""
        before, closed, after = reply.rpartition("</think>")
        found = list(self.pattern.finditer(after if closed else before + after))
        if not found or (not closed and "<think>" in reply):
            return None
        if self.mode == "pairwise":
            return _WINS.get((found[-1][1] or "").lower())
        try:
            score = float(found[-1][1] or "")
        except ValueError:
            return None
        return ((score - self.low) / (self.high - self.low), 0.0) if self.low <= score <= self.high else None

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _warn(self, what: str, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("The judge '%s' %s (later failures are counted only): %s", self.model, what, problem)


def _check_numbers(
    time_limit: float, retries: int, backoff: float, concurrency: int, cache_size: int, scale: Sequence[float]
) -> None:
    if time_limit <= 0 or retries < 0 or backoff < 0 or concurrency < 1 or cache_size < 0:
        raise ValueError(
            f"time_limit={time_limit} must be above 0, concurrency={concurrency} at least 1, retries={retries}, "
            f"backoff={backoff} and cache_size={cache_size} at least 0."
        )
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError(f"scale must be the worst and the best score, [1, 10] say, got {list(scale)}.")


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in ("model", "messages", "stream", "n", "timeout"):
        if name in options:
            raise ValueError(f"request_options cannot have '{name}', which the judge sets itself.")
    return options


def _seconds(header: str | None, default: float) -> float:
    """The seconds that a server asks to wait."""
    try:
        seconds = float(header or "")
    except ValueError:
        return default
    return seconds if seconds >= 0 else default
