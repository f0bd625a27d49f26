"""An engine over fake executors."""

from tokenizers import Tokenizer, models, pre_tokenizers

from specexport_runtime import SpecEngine
from tests.support.fakes.engine_of import engine_of
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB, make_draft, make_target

WORDS = [f"w{i}" for i in range(VOCAB)]


def make_tokenizer(size: int = VOCAB, letter: str = "w") -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"{letter}{i}": i for i in range(size)}, unk_token=f"{letter}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def make_engine(kind: str | None = "good", **options) -> SpecEngine:
    draft = make_draft(kind) if kind else None
    return engine_of(make_target(), make_tokenizer(), draft=draft, max_model_len=MAX_MODEL_LEN, **options)
