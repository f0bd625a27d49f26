"""Builds whose draft has fewer layers: which go, what the bundle says of them, what is accepted, what is refused."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specexport.compile.command import format_summary, result_to_json
from specexport.compile.draft_cuts import NUM_PIECES, PIECE_LEN, cut_pieces
from specexport.compile.pipeline import BuildResult, build_bundle
from specexport.compile.plan import make_plan
from specexport.trace import prune
from specexport_runtime.bundle.entry import DroppedLayer
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import InvalidRequestError, RecipeError, UnsupportedModelError
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.refusals import RunCli
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import make_llama, make_tokenizer, save_checkpoint

IDLE, WEAK = 1, 2
KNOWN = 259  # tokens that the tokenizer has: no other is ever drafted
PROMPTS = ["abc", "Hello there", "0123456789", "def area(w, h):"]
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A target of three layers, and a draft with its weights and a layer more that does nothing; one does little."""
    made = TinyPair(tmp_path_factory.mktemp("layers"))
    target, draft = (make_llama(5, num_hidden_layers=layers, vocab_size=KNOWN) for layers in (3, 4))
    left = iter(target.model.layers)
    for i, layer in enumerate(draft.model.layers):
        if i != IDLE:
            own = next(left)
            if i == WEAK:
                own.self_attn.o_proj.weight.data *= 0.05
                own.mlp.down_proj.weight.data *= 0.05
            layer.load_state_dict(own.state_dict())
        else:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    for name in ("embed_tokens", "norm"):
        getattr(draft.model, name).load_state_dict(getattr(target.model, name).state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    save_checkpoint(target, made.target)
    save_checkpoint(draft, made.draft)
    return made


@pytest.fixture(scope="module")
def whole(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bundle(pair.recipe(tmp_path_factory.mktemp("whole") / "b", lookahead=4)).path


@pytest.fixture(scope="module")
def without_idle(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    return build_bundle(pair.recipe(tmp_path_factory.mktemp("three") / "b", lookahead=4, draft_layers=3))


@pytest.fixture(scope="module")
def lossy(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four layers. Its check passes only if the model that it is compared with lacks the others too."""
    return build_bundle(pair.recipe(tmp_path_factory.mktemp("two") / "b", lookahead=4, draft_layers=2)).path


def decode(bundle: Path) -> tuple[list[tuple[int, ...]], int, int]:
    with closing(SpecEngine.load(bundle, num_threads=1)) as engine:
        plain = engine.generate(PROMPTS, GREEDY, drafter="none")
        drafted = engine.generate(PROMPTS, GREEDY, drafter="draft-model", num_speculative_tokens=3)
    tokens = [tuple(each.token_ids) for each in drafted]
    assert tokens == [tuple(each.token_ids) for each in plain]
    return tokens, sum(each.stats.drafted for each in drafted), sum(each.stats.accepted for each in drafted)


@pytest.mark.whole
def test_layers_that_do_nothing_go_and_nothing_is_lost(without_idle: BuildResult, whole: Path, run_cli: RunCli) -> None:
    entries = load_manifest(without_idle.path).models
    assert entries["draft"].dropped_layers == ((IDLE, 1.0),)
    assert entries["draft"].kept_layers == (0, 2, 3)
    assert len(entries["draft"].attention.layers) == 3
    assert entries["target"].dropped_layers == ()
    assert entries["draft"].parameters.total == entries["target"].parameters.total
    before, after = decode(whole), decode(without_idle.path)
    assert after == before
    assert after[1] == after[2] > 0, "the draft has the target's weights"
    words = "3 of 4 layers, without 1 (similarity 1.000)"
    assert f"  draft: {words}, logits within" in format_summary(without_idle)
    assert result_to_json(without_idle)["dropped_layers"] == {"target": [], "draft": [(1, 1.0)]}
    assert f"\n  {words}\n" in run_cli("inspect", without_idle.path, "--all").output
    shown = json.loads(run_cli("inspect", without_idle.path, "--json").output)
    assert shown["models"]["draft"]["kept_layers"] == [0, 2, 3]


@pytest.mark.whole
def test_the_layers_that_do_least_cost_less_acceptance_than_those_that_do_most(
    pair: TinyPair, lossy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    entry = load_manifest(lossy).models["draft"]
    assert entry.kept_layers == (0, 3)
    tokens, drafted, accepted = decode(lossy)
    monkeypatch.setattr(prune, "choose_layers", lambda *_: [(layer, 0.0) for layer in (0, 3)])
    (tmp_path / "text").write_text("so that the cache has no such draft", encoding="utf-8")
    texts = str(tmp_path / "text")
    wrong = build_bundle(pair.recipe(tmp_path / "b", lookahead=4, draft_layers=2, draft_vocab_texts=texts))
    assert wrong.reused == ("target",)
    assert wrong.manifest.models["draft"].kept_layers == (IDLE, WEAK)
    wrong_tokens, wrong_drafted, wrong_accepted = decode(wrong.path)
    assert wrong_tokens == tokens
    record_property(
        "measured: acceptance of a draft with 2 of 4 layers, the right and the wrong ones",
        f"{accepted / drafted:.2f}, {wrong_accepted / wrong_drafted:.2f}",
    )
    assert 0.5 < accepted / drafted < 1.0
    assert wrong_accepted / wrong_drafted < 0.5 * accepted / drafted


@pytest.mark.whole
def test_verify_compares_with_the_layers_that_stayed(pair, lossy, tmp_path, run_cli):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh. Some text of words.", encoding="utf-8")
    args = ("--checkpoint", pair.target, "--draft-checkpoint", pair.draft, "--max-tokens", 8, "--no-record")
    args += ("--num-samples", 1000, "--text", text, "--json")
    result = run_cli("verify", lossy, *args)
    assert result.exit_code == 0, result.output
    parts = json.loads(result.stdout)["parts"]
    assert [each["role"] for each in parts["tensors"]["results"]] == ["target", "draft"]
    assert abs(parts["perplexity"]["results"][1]["change"]) < 1e-3


def test_a_reference_bundle_must_have_the_same_layers(tiny_bundle: Path, tmp_path: Path, run_cli: RunCli) -> None:
    other = Path(shutil.copytree(tiny_bundle, tmp_path / "other"))
    manifest = load_manifest(other)
    cut = replace(manifest.models["draft"], dropped_layers=(DroppedLayer(0, 1.0),))  # as if it had had two
    replace(manifest, models=manifest.models | {"draft": cut}).write(other)
    (tmp_path / "text.txt").write_text("abcdefgh. Some text of words.", encoding="utf-8")
    text = ("--text", tmp_path / "text.txt", "--no-record")
    result = run_cli("verify", other, "--reference", tiny_bundle, *text)
    assert result.exit_code == InvalidRequestError.exit_code == 2
    assert "its draft was built with other layers of its checkpoint" in result.stderr


def test_all_layers_and_all_tokens_are_no_cut(tiny_pair: TinyPair, tmp_path: Path) -> None:
    result = build_bundle(tiny_pair.recipe(tmp_path / "b", draft_layers=1, draft_vocab_size=300))
    draft = result.manifest.models["draft"]
    assert (draft.dropped_layers, draft.cut_lm_head) == ((), None)
    assert "lm-head-cut" not in dict(draft.passes)
    assert "layers, without" not in format_summary(result)


def test_bad_input_is_one_line(refuse_cli, tiny_pair, tmp_path, monkeypatch):
    pair = ("build", tiny_pair.target, "--draft", tiny_pair.draft, "-o", tmp_path / "out", "-q")
    assert "draft_layers is 2, and the draft has 1. Fix: give 1 to 1" in refuse_cli(*pair, "--draft-layers", 2)
    missing = refuse_cli(*pair, "--draft-layers", 1, "--draft-vocab-texts", tmp_path / "none")
    assert "draft_vocab_texts" in missing
    # a checkpoint whose config is no plain file, as in a GGUF one, says it when it is loaded
    monkeypatch.setattr("specexport.compile.pipeline.check_draft_sizes", lambda _: None)
    assert "draft_layers is 2, and the draft has 1" in refuse_cli(*pair, "--draft-layers", 2)


def test_number_and_texts_decide_the_drafts_engine_and_no_other(tiny_pair: TinyPair, tmp_path: Path) -> None:
    def keys(layers: int | None, texts: str | None = None, size: int | None = None) -> dict[str, str]:
        values: dict[str, object] = {"draft_layers": layers, "draft_vocab_size": size}
        if texts is not None:
            (tmp_path / "t.txt").write_text(texts, encoding="utf-8")
            values["draft_vocab_texts"] = str(tmp_path / "t.txt")
        recipe = tiny_pair.recipe(tmp_path / "out", **values)
        return dict(make_plan(recipe).engine_keys)

    found = [keys(None), keys(1), keys(2), keys(2, "aaa"), keys(2, "bbb"), keys(2, "aaa", 40), keys(None, "aaa", 40)]
    found += [keys(None, "bbb", 40), keys(None, "aaa", 41), keys(None, None, 40)]
    assert len({each["target"] for each in found}) == 1
    assert len({each["draft"] for each in found}) == len(found)
    assert keys(2, "aaa") == found[3]


def test_pieces_are_spread_over_the_texts(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    texts = [letter * 2 * PIECE_LEN for letter in "abcdefgh"]
    pieces = cut_pieces(texts, tokenizer, 320)
    assert [len(piece) for piece in pieces] == [PIECE_LEN] * NUM_PIECES
    assert len({int(piece[0]) for piece in pieces}) == NUM_PIECES
    assert (pieces[0] == pieces[0][0]).all(), "the first text"
    assert (pieces[-1] == pieces[-1][0]).all(), "the last one"
    (short,) = cut_pieces(["ab", "c"], tokenizer, 320)
    single = [int(cut_pieces([letter], tokenizer, 320)[0][0]) for letter in "abc"]
    assert short.tolist() == single
    assert [len(piece) for piece in cut_pieces(texts, tokenizer, 320, max_positions=9)] == [9] * NUM_PIECES
    without_c = int(short[2])
    assert all((piece < without_c).all() for piece in cut_pieces(texts, tokenizer, without_c))
    with pytest.raises(RecipeError, match="no token that it knows"):
        cut_pieces(["zz"], tokenizer, 5)


def test_a_piece_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    pieces = cut_pieces(["abc" * PIECE_LEN], tokenizer.to_str().encode(), 320)
    assert [len(piece) for piece in pieces] == [PIECE_LEN] * 3
    assert [int(np.flatnonzero(piece == 1)[0]) for piece in pieces] == [0] * 3
    assert all((piece == 1).sum() == 1 for piece in pieces)
    content = tokenizer.to_str().encode()
    assert all(len(piece) == 2 for piece in cut_pieces(["abc"], content, 320, max_positions=2))
    with pytest.raises(UnsupportedModelError, match="reads 1 tokens at most, of which 1 begin each text"):
        cut_pieces(["abc"], content, 320, max_positions=1)
