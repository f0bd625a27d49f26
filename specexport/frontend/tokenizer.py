"""What the runtime needs of a tokenizer: its JSON, chat template, special tokens and the ids that end a text."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from specexport.frontend.source import Source
from specexport_runtime.errors import CheckpointError


class TokenizerParts(NamedTuple):
    """The parts of a tokenizer that go into a bundle.

    Attributes:
        json: the tokenizer in the tokenizers library's own format.
        chat_template: Jinja template, or None.
        special_tokens: name to text.
        bos_token_id: or None.
        eos_token_id: or None.
        more_eos_ids: further ids that end a text.
    """

    json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_id: int | None
    more_eos_ids: tuple[int, ...] = ()


def load_tokenizer(source: Source, *, trust_remote_code: bool = False) -> TokenizerParts:
    """Load a checkpoint's fast tokenizer.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    named = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=trust_remote_code, **named
        )
    except Exception as error:  # transformers raises nearly anything on a damaged tokenizer
        raise CheckpointError(
            f"{source.name}: the tokenizer cannot be loaded ({type(error).__name__}: {error}).",
            "add tokenizer.json and tokenizer_config.json to the checkpoint.",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{source.name}: {type(tokenizer).__name__} has no fast tokenizer.", "add its tokenizer.json."
        )
    return TokenizerParts(
        json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=_chat_template(tokenizer),
        special_tokens={name: str(text) for name, text in tokenizer.special_tokens_map.items() if _is_text(text)},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _is_text(value: Any) -> bool:
    return value is not None and not isinstance(value, list | tuple | dict)


def _chat_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name: the default one speaks for the model
        template = template.get("default")
    return template if isinstance(template, str) else None


def collect_eos_ids(model: Any, tokenizer: TokenizerParts) -> tuple[int, ...]:
    """Every token id that ends a text: generation config (else model config), then the tokenizer's own."""
    generation = getattr(model, "generation_config", None)
    declared = getattr(generation, "eos_token_id", None)
    if declared is None:
        declared = model.config.get_text_config().eos_token_id
    ids = list(declared) if isinstance(declared, Iterable) else [declared]
    return tuple(
        dict.fromkeys(int(i) for i in (*ids, tokenizer.eos_token_id, *tokenizer.more_eos_ids) if i is not None)
    )
