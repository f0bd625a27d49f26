"""A trace as a table on the terminal: what was drafted, what became of it, and what it cost."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specexport.explain.summary import DrafterSummary, Summary
from specexport.report import Column, format_number, terminal_table
from specexport_runtime.cli.output import format_rounds
from specexport_runtime.requests.records import RoundTrace

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from specexport_runtime.requests.layer_choice import LayerChoice

FEW_TESTS = 10
NARROW = 100
Decode = Callable[[Sequence[int]], str]
_REASONS = {
    "fixed": "as asked",
    "goodput": "most expected tokens/s",
    "probe": "a cheap test of a bypassed drafter",
    "bypass": "drafting does not pay",
    "room": "the text ends soon",
}
_ENDS = {
    "lookahead": "K reached",
    "exit": "not sure any more",
    "text": "nothing more to copy",
    "none": "no draft",
}
_VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


class Pieces:
    """Text of single tokens of a sequence, spaces included; ``before`` is the token before the first round's."""

    def __init__(self, decode: Decode, before: int) -> None:
        self._decode = decode
        self._before = before

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token, for tokens that follow what was passed to :meth:`advance`."""
        texts, before = [], self._before
        for token in tokens:
            # Many decoders drop a space at the beginning, so a token is decoded after another.
            texts.append(self._decode([before, token])[len(self._decode([before])) :].translate(_VISIBLE))
            before = token
        return texts

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        self._before = tokens[-1] if tokens else self._before


def make_table(trace: Sequence[RoundTrace], pieces: Pieces, *, whole: bool = False) -> "Table":
    """One row a round; what was weighed only if ``whole``, else it fits ``NARROW`` columns.

    Draft tokens: accepted ones in green, a bar, rejected ones in red, ``→`` the target's own.
    Where branches were tested, ``┬`` and the accepted tokens of one stand after the rejected ones that it replaces.
    """
    promises, beside = whole and any(r.promised for r in trace), any(r.branches for r in trace)
    columns: list[Column[tuple[int, RoundTrace]]] = [
        Column("round", lambda row: row[0]),
        Column("drafter", lambda row: row[1].drafter or "-", left=True),
        Column("K", lambda row: row[1].allowed.lookahead if row[1].allowed else None),
        Column("why", lambda row: row[1].allowed.reason if row[1].allowed else "plain", left=True,
               shown=whole),
        Column(f"drafted │ rejected{beside * ' ┬ branch'} → target's own", lambda row: show_draft(row[1], pieces),
               left=True, fold=True),
        Column("accepted", lambda row: f"{row[1].accepted}/{row[1].num_tested}" if row[1].drafted else "-"),
        Column("branches", lambda row: len(row[1].branches), shown=whole and beside),
        Column("draft ended", lambda row: row[1].end, left=True),
        Column("gamma", lambda row: row[1].gamma, ".3f",
               shown=whole and any(r.gamma is not None for r in trace)),
        Column("promised tokens/s", lambda row: row[1].taken and row[1].taken.tokens_per_second, ".1f", shown=promises),
        Column("turned down", lambda row: ", ".join(each.describe() for each in row[1].turned_down) or "-", left=True,
               shown=promises),
        Column("ms", lambda row: row[1].milliseconds, ".2f"),
        Column("saved ms", lambda row: row[1].saved_milliseconds, "+.2f"),
    ]  # fmt: skip

    def rounds() -> Iterator[tuple[int, RoundTrace]]:
        for number, r in enumerate(trace, start=1):
            yield number, r
            pieces.advance(r.emitted)  # its row is made

    return terminal_table(columns, rounds())


def show_draft(r: RoundTrace, pieces: Pieces) -> "Text":
    """The draft of a round with what became of it."""
    from rich.text import Text

    drafted, emitted, on_chain = pieces.of(r.drafted), pieces.of(r.emitted), r.on_chain
    text = Text("".join(drafted[:on_chain]), style="green")
    if on_chain < len(drafted):
        text.append("│")
        text.append("".join(drafted[on_chain:]), style="red")
    if r.accepted > on_chain:
        text.append("┬")
        text.append("".join(emitted[on_chain : r.accepted]), style="green")
    if len(emitted) > r.accepted:
        text.append(" → ", style="dim")
        text.append("".join(emitted[r.accepted :]), style="cyan" if r.is_fully_accepted else "")
    return text


def verdict_line(summary: Summary, first: tuple[int, int] = (0, 0)) -> str:
    """What drafting came to, in words. ``first`` are draft tokens of the prompt's round, tested and accepted."""
    if not summary.drafted and first[0]:
        return f"All drafts were in the round that read the prompt: {first[1]} of {first[0]} tokens were accepted."
    if not summary.drafted:
        return "Nothing was drafted: this text was decoded plainly."
    if summary.plain_milliseconds is None or not summary.milliseconds:
        return f"{summary.accepted} of {summary.drafted} draft tokens were accepted; what that saved is not known."
    own, plain = (1000 * summary.tokens / ms for ms in (summary.milliseconds, summary.plain_milliseconds))
    share = 100 * (1 - summary.milliseconds / summary.plain_milliseconds)
    what = f"saved {share:.0f} % of the time" if share >= 0 else f"took {-share:.0f} % more time"
    return f"Drafting {what}: {own:.1f} tokens/s, against {plain:.1f} plain."


def end_line(finish_reason: str, tokens: int, most: int) -> list[str]:
    """Why a text has fewer tokens than it might have; nothing where it has them all."""
    if tokens >= most:
        return []
    why = "at its end token, or a stop" if finish_reason == "stop" else "because there was no more room"
    return [f"The text ended after {tokens} of at most {most} tokens, {why}."]


def short_lines(summary: Summary) -> list[str]:
    """The trace in a few sentences, after the verdict."""
    ways = [_way_line(way) for way in summary.ways] if len(summary.ways) > 1 else []
    return [_count_line(summary), *ways]


def summary_lines(summary: Summary, layers: "LayerChoice | None" = None) -> list[str]:
    """What the trace adds up to, in sentences."""
    lines = [
        _count_line(summary),
        _time_line(summary),
        "K was chosen as: " + _format_counts(summary.reasons, _REASONS) + ".",
        "Drafts ended because: " + _format_counts(summary.ends, _ENDS) + ".",
    ]
    if layers is not None:
        removed = (layers.removed_attention, layers.removed_recurrences, layers.removed_mlp)
        attention, recurrences, mlp = (", ".join(map(str, each)) or "none" for each in removed)
        states = f", recurrences of layers {recurrences}" if layers.removed_recurrences else ""
        lines.append(f"The draft leaves out attention of layers {attention}{states} and MLPs of layers {mlp}.")
    if len(summary.ways) > 1:
        lines += [_way_line(way) for way in summary.ways]
    for name, found in summary.positions.items():
        shares = ", ".join(f"{i}: {p.rate:.2f} ({p.accepted}/{p.tested})" for i, p in enumerate(found, start=1))
        lines.append(f"Acceptance by position, {name}: {shares}.")
    for verdict in summary.verdicts:
        curve = ", ".join(f"{k}: {speedup:.2f}×" for k, speedup in enumerate(verdict.speedups))
        best = f"K={verdict.best}" if verdict.best else "plain decoding (K=0)"
        tested = summary.positions[verdict.drafter][0].tested
        few = "" if tested >= FEW_TESTS else f" Drafts tested: only {tested}."
        lines.append(f"Verdict, {verdict.drafter}: by what steps cost {best} would have been best ({curve}).{few}")
    return lines


def _count_line(summary: Summary) -> str:
    rate = f" ({summary.accepted / summary.drafted:.3f})" if summary.drafted else ""
    beside = f", {summary.accepted_branches} of {summary.branches} on branches" if summary.branches else ""
    return (
        f"{summary.tokens} tokens in {summary.rounds} rounds after the prompt's; {summary.accepted} of "
        f"{summary.drafted} draft tokens accepted{rate}{beside}."
    )


def _way_line(way: DrafterSummary) -> str:
    """How often a way was taken and turned down, in tokens a second."""
    line = f"{way.drafter or 'Plain decoding'}: taken in {format_rounds(way.taken)}"
    if way.real is not None:
        real = f"{way.real:.1f} tokens/s"
        line += f" ({real})" if way.promised is None else f" ({way.promised:.1f} tokens/s promised, {real} real)"
    if way.turned_down:
        instead = "" if way.instead is None else f", {way.instead:.1f} by what was taken"
        declined = f"{format_number(way.declined, '.1f')} tokens/s promised{instead}"
        line += f"; turned down in {format_rounds(way.turned_down)} ({declined})"
    return line + "."


def _time_line(summary: Summary) -> str:
    line = f"The rounds took {summary.milliseconds:.1f} ms"
    saved = summary.saved_milliseconds
    if saved is None or summary.plain_milliseconds is None or not summary.rounds:
        return f"{line}."
    what = f"{saved:.1f} ms saved" if saved >= 0 else f"{-saved:.1f} ms lost"
    ratio = summary.plain_milliseconds / summary.milliseconds
    return f"{line}, plain decoding {summary.plain_milliseconds:.1f} ms: {what} ({ratio:.2f}×)."


def _format_counts(counts: dict[str, int], words: dict[str, str]) -> str:
    return ", ".join(f"{words.get(name, name)} ({count})" for name, count in counts.items()) or "nothing"
