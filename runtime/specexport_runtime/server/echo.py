"""The text of a prompt before that of its answer."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from specexport_runtime.engine import SpecEngine
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.text import TextStream


class Echo(NamedTuple):
    """What a prompt shows."""

    text: str  # the prompt's tokens, decoded
    open_end: int  # characters at its end that may change with tokens of the answer: first bytes of one, say

    @property
    def settled(self) -> str:
        """What stays whatever follows."""
        return self.before(self.open_end)

    def before(self, replaced: int) -> str:
        """What stays when the answer has replaced some characters at the end."""
        return self.text[: len(self.text) - replaced]


NO_ECHO = Echo("", 0)


def echo_of(engine: SpecEngine, prompt: Seq[int], *, skip_special_tokens: bool) -> Echo:
    """The echo of a prompt; ids that are no tokens are left out."""
    known = [token for token in prompt if token < engine.target.vocab_size]
    text = str(engine.tokenizer.decode(known, skip_special_tokens=skip_special_tokens))
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    return Echo(text, TextStream(engine.tokenizer, params, prompt=known).open_end())
