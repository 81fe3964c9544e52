"""What was raised in a process, as others are told of it: in words, since its class may be known there alone."""

import json
import socket
import traceback
from dataclasses import asdict, dataclass
from typing import Any, final

from braidax.errors import CallFailed

_MAX_ESCAPED = 12  # characters of JSON for one of a text


@final
@dataclass(frozen=True)
class Raised:
    """An error on its way to another process.

    **Fields:** `words`: its type and message. `host`: of the process. `traceback`: as Python shows it.
    """

    words: str
    host: str = ""
    traceback: str = ""

    @staticmethod
    def of(error: BaseException, *, words: str | None = None) -> "Raised":
        """Returns an error of this process. **Arguments:** `words`: what is said of it, if not its type and message."""
        told = _words_of(error) if words is None else words
        return Raised(told, socket.gethostname(), "".join(traceback.format_exception(error)))

    def to_text(self, *, max_characters: int | None = None) -> str:
        """Returns this in characters that all encodings have.

        **Arguments:** `max_characters`: of the text; the beginning of the traceback is left out first, then the end of
        the words.
        """
        words, told, text = self.words, self.traceback, json.dumps(asdict(self))
        while max_characters is not None and (excess := len(text) - max_characters) > 0 and (words or told):
            num_cut = excess // _MAX_ESCAPED + 1
            if told:
                told = told[num_cut:]
            else:
                words = words[:-num_cut]
            shown = words if words == self.words else words + "…"
            text = json.dumps({"words": shown, "host": self.host, "traceback": told and "…" + told})
        return text

    @staticmethod
    def from_text(text: str) -> "Raised":
        """Returns what `to_text` was made of; what is no such text is taken for the words."""
        try:
            found: Any = json.loads(text)
        except ValueError:
            return Raised(text)
        if not isinstance(found, dict) or [type(found.get(name)) for name in asdict(Raised(""))] != [str] * 3:  # pyright: ignore[reportUnknownMemberType]
            return Raised(text)
        return Raised(found["words"], found["host"], found["traceback"])

    def error(self, message: str, rank: int) -> CallFailed:
        """Returns the error to raise here. **Arguments:** as of `CallFailed`."""
        return CallFailed(message, rank, self.host, self.traceback)


def _words_of(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (a user's own kind may fail in any way)
        return f"{kind} (its message cannot be shown)"
    return f"{kind}: {text}" if text else kind
