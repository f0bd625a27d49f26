"""Incremental detokenization and stop strings of one sequence."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specexport_runtime.requests.token_bytes import build_unsettled_pattern, decoder_steps, decodes_in_windows
from specexport_runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"  # what decoders show for bytes that are not (yet) a character
_WINDOW = 24  # tokens decoded again at every step, at most, before the window moves on
_CONTEXT = 6  # tokens that stay in the window as context
_SETTLED = 4  # characters of context: by then no token before it is part of a character, or loses a first space


class TextStream:
    """The text of one sequence, piece by piece.

    ``take()`` and ``finish()`` joined are what ``tokenizer.decode`` of prompt and tokens has after its longest
    beginning shared with the prompt's, cut at the first stop string.

    Decoders are not additive (they strip the first space, join bytes), so a window of recent tokens is decoded; it only
    moves when its shortened form decodes to the same ending.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        params: SamplingParams,
        # Ids without text, in place of all special tokens, the prompt's too; None goes by ``skip_special_tokens``.
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),  # token ids that the text follows; not copied
    ) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._params = params
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._held, self._read = 0, 0  # what was held back of the text of so many characters
        self._prompt: Sequence[int] | None = prompt  # None: its end is in the window
        self._before: str | None = None  # text of the prompt in the window, while it is not known what becomes of it
        self._ids: list[int] = []  # the window, then tokens not decoded yet
        self._decoded = 0  # tokens of the window that have been decoded
        self._window_text = 0  # characters of the window's text that are in _text, or of the prompt
        steps = decoder_steps(tokenizer)
        self._has_windows = decodes_in_windows(steps)
        self._unsettled = build_unsettled_pattern(steps) if self._has_windows else None
        self._in_run = not self._has_windows  # inside a run of byte tokens or the like, whose text is not decided
        self._text = ""  # decided text: no later token can change it
        self._tentative = ""  # after it: may still change, but is right if generation ends here
        self._taken = 0
        self._done = False
        self.replaced = 0  # last characters of the prompt's text that became others with the tokens after them

    @property
    def text(self) -> str:
        """All text up to now, cut at the stop string; without a last character that is still incomplete."""
        if not self._done:
            self._decode()
        return self._text + self._tentative

    @property
    def length(self) -> int:
        """Characters of :attr:`text` when it, or a piece of it, was last asked for."""
        return len(self._text) + len(self._tentative)

    def append(self, token: int) -> bool:
        """Add a token; True when a stop string completed with it (append no more then: ValueError)."""
        if self._done:
            raise ValueError("the text is finished: no token can follow")
        self._ids.append(token)
        if not self._stops.strings:
            return False
        self._decode()
        return self._done

    def take(self) -> str:
        """New text that no later token can change: no half characters, no possible start of a stop string."""
        if self._done:
            return self._take_until(len(self._text))
        self._decode()
        most = self._held + len(self._text) - self._read  # without the new characters, it was one before them
        self._held, self._read = self._stops.find_partial_stop_length(self._text, most), len(self._text)
        return self._take_until(len(self._text) - self._held)

    def finish(self) -> str:
        """The rest of the text, as no token follows."""
        if not self._done:
            self._decode(final=True)
            self._close(self._text + self._tentative)
        return self._take_until(len(self._text))

    def open_end(self) -> int:
        """How many of the last characters of the prompt's text may change; to be asked before the first token."""
        self._begin()
        return len(self._before or "") if self._in_run else int((self._before or "").endswith(_UNFINISHED))

    def _take_until(self, end: int) -> str:
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _close(self, text: str) -> None:
        self._text, self._tentative, self._done = text, "", True

    def _begin(self) -> None:
        """Put as much of the prompt's end into the window as what follows depends on."""
        prompt, self._prompt = self._prompt, None
        if not prompt:
            return
        size = _CONTEXT if self._has_windows else len(prompt)
        while True:
            context = list(prompt[-size:])
            self._before = self._decode_ids(context)
            is_run = self._track_run(context)
            if size >= len(prompt) or (len(self._before) >= _SETTLED and not is_run):
                break
            size *= 2
        self._ids[:0], self._decoded = context, len(context)

    def _decode(self, *, final: bool = False) -> None:
        """Bring the text up to date; look for stop strings in what is new."""
        if self._prompt is not None:
            self._begin()
        if self._decoded == len(self._ids) and not final:
            return
        window = self._decode_ids(self._ids)
        if not final:
            self._track_run(self._ids[self._decoded :])
        if final:
            shown = decided = window
        elif self._in_run:
            shown, decided = window.rstrip(_UNFINISHED), window[: self._window_text]
        else:
            # The last character may be the first bytes of a real one; the next token, or the end, decides it.
            shown = decided = window.removesuffix(_UNFINISHED)
        begin, seen = self._window_text, len(self._text)
        if self._before is not None:
            begin = max(begin, self._find_text_start(window, len(decided)))
        self._text += decided[begin:]
        self._window_text = max(self._window_text, len(decided))
        self._tentative = "" if shown is decided else shown[max(begin, self._window_text) :]
        self._decoded = len(self._ids)
        end = self._stops.find(self._text + self._tentative, seen)
        if end is not None:
            self._close((self._text + self._tentative)[:end])
        elif (
            len(self._ids) > _WINDOW
            and self._before is None
            and len(decided) == len(window)
            and not (final or self._in_run)
        ):
            self._move_window(window)

    def _find_text_start(self, window: str, decided: int) -> int:
        """Where the text begins in the window: after what the prompt's text and it have in common."""
        before = self._before or ""
        border = common_prefix_length(window, before)
        self.replaced = len(before) - border
        if decided > border or decided == len(before):
            self._before = None
        return border

    def _decode_ids(self, ids: list[int]) -> str:
        skip = self._params.skip_special_tokens
        if self._hidden is not None:
            ids, skip = [token for token in ids if token not in self._hidden], False
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text

    def _track_run(self, ids: list[int]) -> bool:
        """Note whether others may change the last token with text; a run of byte tokens is text only if it is UTF-8."""
        if self._unsettled is None:
            return False
        is_last = True
        for token in reversed(ids):
            name = self._tokenizer.id_to_token(token) or ""
            is_open = self._unsettled.fullmatch(name) is not None
            if not is_open and not self._decode_ids([token]):
                continue  # a token without text (a skipped special one) neither starts nor ends a run
            if is_last:
                self._in_run, is_last = is_open, False
            if not is_open:
                return False
        return not is_last

    def _move_window(self, window: str) -> None:
        ids = self._ids[-_CONTEXT:]
        text = self._decode_ids(ids)
        # Text must follow something, and from a character border, for the shorter window to go on alike.
        if text and window.endswith(text):
            self._ids, self._decoded, self._window_text = ids, len(ids), len(text)


def common_prefix_length(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def decode_continuation(tokenizer: "Tokenizer", prompt: Sequence[int], tokens: Iterable[int]) -> str:
    """What tokens add to the text of a prompt, special ones included."""
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False), prompt=prompt)
    for token in tokens:
        stream.append(token)
    return stream.finish()


class StopStrings:
    """Finds stop strings, none of them empty, in growing text; ``include``: the text keeps the stop string."""

    def __init__(self, strings: tuple[str, ...], *, include: bool) -> None:
        self.strings = strings
        self._include = include
        self._longest = max(map(len, strings), default=0)

    def find(self, text: str, seen: int) -> int | None:
        """Where to cut ``text`` after ``seen`` clean characters, by the stop text that ends first; None if nowhere."""
        start = max(0, seen - self._longest + 1)
        matches = [(at + len(s), at) for s in self.strings if (at := text.find(s, start)) >= 0]
        if not matches:
            return None
        end, begin = min(matches)
        return end if self._include else begin

    def find_partial_stop_length(self, text: str, most: int) -> int:
        """Length of the longest end of ``text``, of at most ``most``, that is the beginning of a stop string."""
        lengths = range(min(most, len(text), self._longest - 1), 0, -1)
        return next((n for n in lengths if any(each.startswith(text[-n:]) for each in self.strings)), 0)
