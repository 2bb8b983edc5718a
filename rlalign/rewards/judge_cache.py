"""Replies of a judge, kept in memory and in files."""

import json
import os
import secrets
import threading
from collections import OrderedDict
from pathlib import Path


class ReplyCache:
    """The replies used last, in memory, and all of them in a folder if there is one.

    Each process appends to a file of its own there, so that any number may share the folder; a line that a killed
    process left half written is passed over.

    Args:
        size: Most replies in memory; 0 keeps none.
        folder: Made if it is not there; what it holds is read at once, the newest file last.
    """

    def __init__(self, size: int, folder: str | None = None) -> None:
        self.size = size
        self._replies: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._file: Path | None = None
        if folder is not None:
            path = Path(folder).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            for file in sorted(path.glob("*.jsonl"), key=lambda file: file.stat().st_mtime):
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    self._read(line)
            self._file = path / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl"

    def get(self, key: str) -> str | None:
        """The reply to a request, ``None`` if it is not known."""
        with self._lock:
            if key in self._replies:
                self._replies.move_to_end(key)
            return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        with self._lock:
            self._keep(key, reply)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "reply": reply}) + "\n")

    def _keep(self, key: str, reply: str) -> None:
        self._replies[key] = reply
        while len(self._replies) > self.size:
            self._replies.popitem(last=False)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
            self._keep(str(entry["key"]), str(entry["reply"]))
        except (ValueError, KeyError, TypeError):
            return
