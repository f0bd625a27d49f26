"""Builds whose draft has an LM head of some tokens: which ones, what the bundle says of them, and what is refused."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.compile.draft_cuts import HeadCut, rank_head_ids, read_counting_texts
from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe, make_recipe
from specexport_runtime import engine_load
from specexport_runtime.bundle.arrays import CutHead, load_cut_head
from specexport_runtime.bundle.entry import ModelEntry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import BundleError, RecipeError
from specexport_runtime.requests.results import GenerationResult
from specexport_runtime.sampling.params import SamplingParams
from tests.support.cases.refusals import Refuse, RunCli
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_models import make_tokenizer

SIZE = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return (folder / "tokenizer.json").read_bytes()


def ids_of(tokenizer: bytes, text: str) -> set[int]:
    from tokenizers import Tokenizer

    return set(Tokenizer.from_buffer(tokenizer).encode(text, add_special_tokens=False).ids)


def kept_ids(cut: HeadCut, *args: Any, **kwargs: Any) -> Any:
    return np.sort(rank_head_ids(cut, *args, **kwargs)[: cut.size])


def test_the_likeliest_tokens_and_what_ends_a_text_stay(tokenizer: bytes) -> None:
    chosen = kept_ids(HeadCut(3, ("zzzzyyyx", "yx~")), tokenizer, 320)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == sorted(ids_of(tokenizer, "zyx"))
    seen = sorted(ids_of(tokenizer, "wvz"))  # ties, and what was never seen, come in the order of ids
    assert kept_ids(HeadCut(2, ("wvz", "zvw")), tokenizer, 320).tolist() == seen[:2]
    assert kept_ids(HeadCut(8, ("wvz",)), tokenizer, 320).tolist() == [0, 1, 2, 3, 4, *seen]
    cut = HeadCut(4, ("aaaabbbbccccdd",), ends=(300, 999))  # no row of 999 is there to keep
    chosen = kept_ids(cut, tokenizer, 320, keep=(2,), special_tokens=["<pad>", "no token"])
    assert chosen.tolist() == sorted({300, 2, 0} | ids_of(tokenizer, "a"))
    last = max(ids_of(tokenizer, "z"))  # the draft has no row for it
    assert kept_ids(HeadCut(1, ("zzzza",)), tokenizer, last).tolist() == list(ids_of(tokenizer, "a"))


def test_sizes_that_do_not_fit(tokenizer: bytes) -> None:
    with pytest.raises(RecipeError, match=r"draft_vocab_size is 301.* 300 rows"):
        kept_ids(HeadCut(301, ()), tokenizer, 300)
    with pytest.raises(RecipeError, match="draft_vocab_size is 2, and 3 special tokens must stay"):
        kept_ids(HeadCut(2, ("aaa",), ends=(2,)), tokenizer, 300, keep=(1, 2), special_tokens=["<pad>"])


def test_texts_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.jsonl").write_text(
        '{"prompt": "asked", "text": "written"}\n{"prompt": "a prompt", "reference": "a reference"}\n', encoding="utf-8"
    )
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / ".hidden").write_text("no", encoding="utf-8")
    assert read_counting_texts(str(tmp_path)) == ("first", "written", "a prompt", "a reference")
    assert read_counting_texts(str(tmp_path / "a.txt")) == ("first",)
    assert len(read_counting_texts(None)) >= 24, "the prompts of bench"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b" \n", "has no text"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b"", "has no prompts"),
        ("a.jsonl", b"{", "a.jsonl, line 1: this is not JSON"),
        ("a.jsonl", b'{"reference": "x"}', "line 1: there is no field `text` or `prompt`"),
        ("a.jsonl", b'{"text": 3}', "line 1: `text` is 3, which is no text"),
    ],
)
def test_texts_that_cannot_be_counted(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(RecipeError, match=r"draft_vocab_texts") as refused:
            read_counting_texts(str(place))
        assert said in refused.value.message
        assert refused.value.hint


def test_bad_input_is_one_line(refuse_cli: Refuse, tiny_pair: TinyPair, tmp_path: Path) -> None:
    pair = ("build", tiny_pair.target, "--draft", tiny_pair.draft, "-o", tmp_path / "out", "-q")
    beyond = refuse_cli(*pair, "--draft-vocab-size", 301)
    assert "draft_vocab_size is 301, a vocabulary size beyond the draft's: its LM head has 300 rows" in beyond
    assert "has no text" in refuse_cli(*pair, "--draft-vocab-texts", tmp_path), "forms are tried on them"
    assert "'most' is neither a whole number nor 'auto' nor 'all'" in refuse_cli(*pair, "--draft-vocab-size", "most")
    assert "does not exist" in refuse_cli(*pair, "--draft-vocab-size", 9, "--draft-vocab-texts", tmp_path / "none")


@pytest.mark.parametrize(("key", "value"), [("draft_vocab_size", 40), ("draft_layers", 3)])
def test_a_recipe_names_texts_beside_itself(key: str, value: int, tiny_pair: TinyPair, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'target = "{tiny_pair.target}"\ndraft = "{tiny_pair.draft}"\noutput = "o"\n'
        f'{key.replace("_", "-")} = {value}\ndraft-vocab-texts = "texts"\n',
        encoding="utf-8",
    )
    made = make_recipe({}, recipe)
    assert made.draft_vocab_texts == str(tmp_path / "texts")
    assert made.settings()[key] == value
    assert str(tmp_path) not in json.dumps(made.settings())


@pytest.fixture(scope="module")
def cut_bundle(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, its draft with 40 of 300 tokens."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "texts.txt").write_text("abcdefgh" * 3, encoding="utf-8")
    build_bundle(
        tiny_pair.recipe(folder / "b", draft_vocab_size=SIZE, draft_vocab_texts=str(folder / "texts.txt"), lookahead=4)
    )
    return folder / "b"


def test_the_bundle_says_what_its_draft_has(cut_bundle: Path, run_cli: RunCli) -> None:
    entry = load_manifest(cut_bundle).models["draft"]
    assert (entry.vocab_size, entry.cut_lm_head.num_rows, entry.lm_head_rows) == (300, SIZE, SIZE)
    ids = np.load(cut_bundle / str(entry.cut_lm_head.ids_path), allow_pickle=False)
    tokenizer = (cut_bundle / "tokenizer.json").read_bytes()
    assert {0, 1, 2} | ids_of(tokenizer, "abcdefgh") <= set(ids.tolist())
    target = load_manifest(cut_bundle).models["target"]
    assert target.cut_lm_head is None
    # Embeddings are only looked up, and what was cut from the LM head multiplies nothing.
    assert target.parameters.total - target.parameters.step == target.vocab_size * 64
    assert entry.parameters.total - entry.parameters.step == 300 * 32 + (300 - SIZE) * 32
    assert f"LM head: {SIZE} of 300 tokens" in run_cli("inspect", cut_bundle, "--all").output


def test_verify_compares_the_kept_rows_and_the_distribution(
    cut_bundle: Path, tiny_pair: TinyPair, run_cli: RunCli
) -> None:
    (cut_bundle.parent / "text.txt").write_text("abcdefgh. Some text of words.", encoding="utf-8")
    args = ("--checkpoint", tiny_pair.target, "--draft-checkpoint", tiny_pair.draft, "--max-tokens", 8, "--no-record")
    args += ("--num-samples", 1000, "--text", cut_bundle.parent / "text.txt", "--json")
    result = run_cli("verify", cut_bundle, *args)
    assert result.exit_code == 0, result.output
    parts = json.loads(result.stdout)["parts"]
    assert [each["role"] for each in parts["tensors"]["results"]] == ["target", "draft"]
    assert [each["role"] for each in parts["perplexity"]["results"]] == ["target", "draft"]
    target, draft = parts["perplexity"]["results"]
    assert abs(draft["change"]) < 1e-3
    assert draft["num_tokens"] < target["num_tokens"], "only what the head has is predicted"


def test_a_map_that_was_changed_is_refused(cut_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cut_bundle, tmp_path / "b"))
    path = copy / "draft" / "lm_head_ids.npy"
    np.save(path, np.load(path)[::-1].copy())
    with pytest.raises(BundleError, match=r"head_ids\.npy was altered"):
        SpecEngine.load(copy)


NUM_PROMPTS, HALF = 6, 2048
GREEDY = SamplingParams(max_tokens=64)


def acceptance(results: list[GenerationResult]) -> float:
    return sum(each.stats.accepted for each in results) / sum(each.stats.drafted for each in results)


@pytest.mark.whole
def test_the_right_half_of_the_vocabulary_is_enough_and_a_wrong_one_is_not(
    demo_bundle: Path, demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (demo_pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    prompts = [json.loads(line)["prompt"] for line in lines]
    with closing(SpecEngine.load(demo_bundle, num_threads=1)) as engine:
        plain = engine.generate(prompts, GREEDY, drafter="none")
        whole = acceptance(engine.generate(prompts, GREEDY, drafter="draft-model"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": each.text}) + "\n" for each in plain), encoding="utf-8")
    models = {"target": str(demo_pair / "target"), "draft": str(demo_pair / "draft")}
    recipe = BuildRecipe(
        **models,
        output=str(tmp_path / "b"),
        draft_vocab_size=HALF,
        draft_vocab_texts=str(texts),
        self_draft=True,  # as the demo bundle's target
    )
    result = build_bundle(recipe)
    assert result.reused == ("target",), "only the draft depends on what is counted"
    with closing(SpecEngine.load(result.path, num_threads=1)) as engine:
        cut = engine.generate(prompts, GREEDY, drafter="draft-model")
    assert [each.token_ids for each in cut] == [each.token_ids for each in plain]
    assert acceptance(cut) >= 0.95 * whole

    def shifted(folder: Path, entry: ModelEntry) -> CutHead | None:
        head = load_cut_head(folder, entry)
        return None if head is None else head._replace(ids=np.roll(head.ids, 1))

    monkeypatch.setattr(engine_load, "load_cut_head", shifted)
    with closing(SpecEngine.load(result.path, num_threads=1)) as engine:
        wrong = engine.generate(prompts, GREEDY, drafter="draft-model")
    assert [each.token_ids for each in wrong] == [each.token_ids for each in plain]
    assert acceptance(wrong) < 0.5 * whole
