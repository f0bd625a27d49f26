"""A checkpoint with a ``tokenizer.json`` needs nothing else; what its other files say of tokens is taken."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from specexport.checkpoint.source import Source
from specexport.checkpoint.tokenizer import TokenizerParts, _from_class, load_tokenizer
from specexport_runtime.errors import CheckpointError
from tests.support.models.tiny_models import make_tokenizer

TEXT = "héllo ☂\n</s><tool> x"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def _load(folder: Path) -> TokenizerParts:
    return load_tokenizer(Source("tiny", folder, None, ()))


def _ids(parts: TokenizerParts) -> list[int]:
    found: list[int] = Tokenizer.from_str(parts.json.decode()).encode(TEXT).ids
    return found


def _edit(path: Path, **changes: Any) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | changes))


@pytest.mark.parametrize("named", ["NoSuchTokenizer", "XLMTokenizer", "CpmAntTokenizer", "LlamaTokenizer"])
def test_the_class_that_a_checkpoint_names_is_not_asked(folder: Path, named: str) -> None:
    """Classes that do not exist, want packages that are not there, or split text in their own way."""
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    _edit(folder / "tokenizer_config.json", tokenizer_class=named)
    _edit(folder / "config.json", model_type="xlm", tokenizer_class=named)
    parts = _load(folder)
    assert _ids(parts) == wanted
    assert (parts.bos_token_id, parts.eos_token_id) == (1, 2)


def test_without_other_files_the_tokens_are_those_that_the_model_names_by_number(folder: Path) -> None:
    before = _load(folder)
    (folder / "tokenizer_config.json").unlink()
    _edit(folder / "config.json", bos_token_id=1, text_config={"pad_token_id": 0}, eos_token_id=9)
    _edit(folder / "generation_config.json", eos_token_id=[2, 9])
    parts = _load(folder)
    assert _ids(parts) == _ids(before)
    assert parts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert parts.chat_template is None


def test_a_token_that_no_vocabulary_has_is_left_out(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    _edit(folder / "config.json", bos_token_id=4000, eos_token_id=None)
    assert _load(folder).special_tokens == {}


def test_what_the_settings_leave_out_is_not_guessed(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", bos_token=None)
    _edit(folder / "config.json", bos_token_id=1)
    assert "bos_token" not in _load(folder).special_tokens


def test_the_map_of_special_tokens_and_the_template_are_read(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    _edit(folder / "special_tokens_map.json", eos_token={"content": "</s>", "lstrip": False, "normalized": False})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    parts = _load(folder)
    assert parts.special_tokens == {"eos_token": "</s>"}
    assert (parts.eos_token_id, parts.chat_template) == (2, "{{ messages[0].content }}")


def test_added_tokens_keep_their_numbers_wherever_they_stand(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.save(str(path))
    added = json.loads((folder / "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
    more = {"content": "<more>", "special": True, "normalized": False}
    shape = {"lstrip": False, "rstrip": False, "single_word": False}
    _edit(folder / "tokenizer_config.json", added_tokens_decoder=added | {"260": more | shape})
    found = Tokenizer.from_str(_load(folder).json.decode())
    assert [found.token_to_id(text) for text in ("<pad>", "<s>", "</s>", "<tool>", "<more>")] == [0, 1, 2, 259, 260]
    assert 259 in found.encode(TEXT).ids
    assert found.decode([259, 260, 2]) == "<tool>"  # the others are special


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[" * 9999, "[]", '"x"', "\xff"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"tiny: .*{name} cannot be read") as caught:
        _load(folder)
    assert caught.value.exit_code == 2
    assert name in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer.json", {"model": {"type": "nonsense"}}),
        ("tokenizer.json", {"added_tokens": [{"id": "x"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": 3}}),
        ("tokenizer_config.json", {"eos_token": 7}),
    ],
)
def test_a_file_that_says_what_cannot_be_is_named(folder: Path, name: str, changes: dict[str, Any]) -> None:
    _edit(folder / name, **changes)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        _load(folder)


CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
FILL = {
    "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip


@pytest.mark.parametrize("named", [None, "LlamaTokenizer"], ids=["json", "class"])
@pytest.mark.parametrize(
    "block", [{"truncation": CUT}, {"padding": FILL}, {"truncation": CUT, "padding": FILL}], ids=list
)
def test_a_text_is_neither_cut_nor_filled_up(folder: Path, block: dict[str, Any], named: str | None) -> None:
    wanted = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    _edit(folder / "tokenizer.json", **block)
    _edit(folder / "tokenizer_config.json", model_max_length=2, tokenizer_class=named or "PreTrainedTokenizerFast")
    source = Source("tiny", folder, None, ())
    parts = _from_class(source, trust_remote_code=False) if named else load_tokenizer(source)
    assert _ids(parts) == wanted
    assert len(wanted) > CUT["max_length"]


def test_no_merge_is_left_out_at_random(demo_pair: Path, tmp_path: Path) -> None:
    """Dropout is for training: it draws other ids each time, which no prompt can mean."""
    text = "def main():\n    return [1, 2, 3]\n" * 9
    data = json.loads((demo_pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    wanted = Tokenizer.from_str(json.dumps(data)).encode(text).ids
    data["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.from_str(json.dumps(data)).encode(text).ids != wanted
    assert Tokenizer.from_str(_load(tmp_path).json.decode()).encode(text).ids == wanted


def test_special_tokens_that_are_to_be_read_as_text_are_refused(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", split_special_tokens=True)
    with pytest.raises(CheckpointError, match="split_special_tokens"):
        _load(folder)
