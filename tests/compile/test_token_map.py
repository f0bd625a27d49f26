"""What two vocabularies share, how one spells the other, and bundles of a target and a draft that differ in them."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.checkpoint.vocabulary import read_vocabulary
from specexport.compile import draft_trial, plan
from specexport.compile import token_map as module
from specexport.compile.pipeline import build_bundle
from specexport.compile.plan import make_plan
from specexport.compile.token_map import MAX_PIECES, VocabularySide, check_shared, find_shared
from specexport.compile.vocabulary import check_vocabularies, draftable_size
from specexport.recipe import BuildRecipe
from specexport.verify.options import VerifyOptions
from specexport.verify.run import verify_bundle
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.token_map import MAP_NAME, NOT_SHARED, TokenMap, load_token_map
from specexport_runtime.drafters import other_tokens
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import BundleError, CheckpointError, VocabularyMismatchError
from specexport_runtime.requests.token_bytes import token_bytes
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sampling.structured import StructuredOutputs
from tests.support.cases.refusals import RunCli
from tests.support.models.two_vocabularies import draft_tokenizer, save_pair, sides, target_tokenizer

PROMPTS = [
    "def area(width, height):", "The old lighthouse stood at the end", "1 + 2 = 3, and 4 + 5 =", "naïve 日本 😀",
    "for item in items:\n        print(item)", "a",
    "Write a Python function that returns the longest word of a sentence.", "x = [1, 2, 3]",
]  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
K = 4


@pytest.fixture(scope="module")
def shared() -> Any:
    return find_shared(*sides())


def _bytes() -> list[list[bytes]]:
    return [token_bytes(own, own.get_vocab_size()) for own in (target_tokenizer(), draft_tokenizer())]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-vocabularies")
    save_pair(folder)
    build_bundle(_recipe(folder, folder / "bundle"))
    return folder


def _recipe(folder: Path, output: Path, **values: Any) -> BuildRecipe:
    given = {"target": str(folder / "target"), "draft": str(folder / "draft"), "output": str(output)}
    return BuildRecipe(**(given | {"lookahead": K} | values))


@pytest.fixture(scope="module")
def engine(pair: Path) -> Iterator[SpecEngine]:
    """A bundle's; no text is too long in the draft's tokens."""
    with pytest.MonkeyPatch.context() as patch, closing(SpecEngine.load(pair / "bundle", num_threads=1)) as engine:
        patch.setattr(other_tokens, "STRETCH", 4.0)
        yield engine


def test_shared_tokens_have_equal_bytes_and_strings_would_find_fewer(shared: Any) -> None:
    target, draft = _bytes()
    ids = shared.tokens.target_ids
    own = np.flatnonzero(ids != NOT_SHARED)
    assert len(set(ids[own].tolist())) == len(own) == shared.entry.num_shared
    special = {2, 3, 4}
    assert all(target[ids[token]] == draft[token] for token in own if token not in special)
    # Every ordinary token of both is found, whichever twin.
    common = set(target[4:]) & set(draft[5:])
    assert len(own) == len(common) + len(special)
    names = set(target_tokenizer().get_vocab()) & set(draft_tokenizer().get_vocab())
    assert len(names) < 0.6 * len(own)
    assert shared.entry.of_draft == len(own) / len(draft)
    assert shared.entry.of_target == len(own) / len(target)
    assert 0.5 < shared.entry.of_text < 1


def test_special_tokens_go_by_name_and_by_what_they_end(shared: Any) -> None:
    # <tool> is in both; then what ends a turn, and a text; no text of the target begins with a token.
    assert shared.tokens.target_ids[:5].tolist() == [NOT_SHARED, NOT_SHARED, 1, 2, 3]
    assert shared.tokens.lead.tolist() == [1]
    assert shared.tokens.first == NOT_SHARED
    target, draft = sides()
    parts = json.loads(target.tokenizer_json)
    vocab = parts["model"]["vocab"]
    parts["model"]["vocab"] = {("<bos>" if name == "!" else name): token for name, token in vocab.items()}
    found = find_shared(target._replace(tokenizer_json=json.dumps(parts).encode()), draft)
    assert found is not None
    assert found.tokens.target_ids[1] == NOT_SHARED, "a token of text is no special one of the same name"
    assert find_shared(target, target) is None, "equal ones have no map"
    assert find_shared(draft, draft._replace(vocab_size=600)) is None


def test_beginnings_are_each_others() -> None:
    target, draft = sides()
    other = draft._replace(tokenizer_json=draft.tokenizer_json.replace(b"<bos>", b"<s>"))
    found = find_shared(draft, other._replace(tokenizer_json=other.tokenizer_json.replace(b'"<0x41>"', b'"<0x4l>"')))
    assert found is not None
    assert found.tokens.target_ids[1] == 1
    assert found.tokens.first == 1
    assert found.tokens.get_lead([1, 9]) == []
    assert found.tokens.spell([1])[0] == [1]
    # A draft without a beginning reads the target's as what ends a text.
    turned = find_shared(draft, target)
    assert turned is not None
    assert turned.tokens.spell([1])[0] == [1]


def test_every_token_is_spelled_in_its_bytes(shared: Any) -> None:
    target, draft = _bytes()
    for token, data in enumerate(target):
        ids, counts = shared.tokens.spell([token])
        assert counts == [len(ids)]
        if token >= 4:
            assert b"".join(draft[piece] for piece in ids) == data
        back = np.flatnonzero(shared.tokens.target_ids == token)
        assert not len(back) or ids == back.tolist()
    text = [300, 2, 9, 319]
    each = [shared.tokens.spell([token])[0] for token in text]
    assert shared.tokens.spell(text) == ([piece for pieces in each for piece in pieces], [*map(len, each)])
    assert shared.tokens.spell([]) == ([], [])
    assert shared.tokens.most <= MAX_PIECES


def test_vocabularies_that_share_too_little_or_cannot_be_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import decoders

    target, draft = sides()
    tokenizer = draft_tokenizer()
    tokenizer.decoder = decoders.CTC()  # its tokens depend on each other
    with pytest.raises(VocabularyMismatchError, match="that of draft cannot be compared"):
        check_shared(target, draft._replace(tokenizer_json=tokenizer.to_str().encode()))
    parts = json.loads(draft.tokenizer_json)
    few = {name: token for name, token in parts["model"]["vocab"].items() if token < 5 or name in ("a", "b", "<0x41>")}
    parts["model"] |= {"vocab": {name: at for at, name in enumerate(few)}, "merges": []}
    poor = VocabularySide("poor", json.dumps(parts).encode(), len(few))
    with pytest.raises(VocabularyMismatchError, match=r"4 tokens, 50\.0% of the draft's and 1\.2% of") as found:
        check_shared(target, poor)
    assert found.value.hint
    monkeypatch.setattr(module, "MIN_SHARE", 0.0)
    check_shared(target, poor)


def test_a_bundle_says_what_is_shared(pair: Path, run_cli: RunCli, shared: Any) -> None:
    entry = load_manifest(pair / "bundle").models["draft"]
    assert entry.token_map == shared.entry._replace(path=f"draft/{MAP_NAME}")
    assert entry.lm_head_rows == shared.entry.num_shared
    words = f"another vocabulary than the target's: they share {shared.entry.num_shared} tokens"
    assert words in run_cli("inspect", pair / "bundle", "--all").output
    again = run_cli("build", pair / "target", "--draft", pair / "draft", "-o", pair / "again", "--lookahead", K)
    assert words in again.output
    assert "engine from the cache" in again.output
    explained = run_cli("explain", pair / "bundle", "def area(", "--max-tokens", 8, "--drafter", "draft-model")
    assert f"it can say {shared.entry.num_shared} tokens of the target's" in explained.output


@pytest.mark.parametrize("step", ["prefill", "verify"])
def test_the_drafts_layers_are_looked_at_in_its_own_tokens(step: str, pair: Path, run_cli: RunCli) -> None:
    found = run_cli(
        "debug", pair / "bundle", "日本 and some text", "--role", "draft", "--step", step, "--graph", "padded"
    )
    assert found.exit_code == 0, found.output


def test_a_draft_is_another_engine_beside_a_target_with_another_vocabulary(pair: Path, tmp_path: Path) -> None:
    def key(**values: str) -> str:
        recipe = _recipe(pair, tmp_path / "b", **values)
        return make_plan(recipe).engine_keys["draft"]

    assert key() == key() != key(target=str(pair / "draft"))


def test_fewer_tokens_of_those_that_are_shared(pair: Path, tmp_path: Path, shared: Any) -> None:
    result = build_bundle(_recipe(pair, tmp_path / "b", draft_vocab_size=60))
    assert result.manifest.models["draft"].lm_head_rows == 60
    kept = np.load(result.path / "draft" / "lm_head_ids.npy")
    assert (shared.tokens.target_ids[kept] != NOT_SHARED).all()
    with closing(SpecEngine.load(result.path, num_threads=1)) as engine:
        plain = engine.generate(PROMPTS, GREEDY, drafter="none")
        found = engine.generate(PROMPTS, GREEDY, drafter="draft-model")
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(each.stats.accepted for each in found) > 0


def _eager(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids])).logits[0].float().numpy()
    return found


def simulate(draft: Any, shared: Any, prompt: list[int], output: list[int]) -> tuple[int, int]:
    """Drafted and accepted tokens of greedy rounds: TLI as defined, in torch, without a cache, K drafts a round."""
    tokens = shared.tokens
    spelled = {
        token: tokens.pieces[tokens.starts[token] : tokens.starts[token + 1]].tolist()
        for token in range(len(tokens.starts) - 1)
    }
    mask = np.where(tokens.target_ids == NOT_SHARED, -np.inf, 0.0)
    drafted = accepted = 0
    done = 1  # the round that reads the prompt has no draft
    while done < len(output):
        text = [*prompt, *output[:done]]
        read = [*tokens.lead.tolist(), *(piece for token in text for piece in spelled[token])]
        guesses = []
        for _ in range(min(K, len(output) - done - 1)):
            best = int((_logits(draft, read)[-1] + mask).argmax())
            read.append(best)
            guesses.append(int(tokens.target_ids[best]))
        right = 0
        while right < len(guesses) and guesses[right] == output[done + right]:
            right += 1
        drafted, accepted, done = drafted + len(guesses), accepted + right, done + right + 1
    return drafted, accepted


def test_greedy_text_is_plain_and_acceptance_is_that_of_the_definition(engine, pair, shared):
    plain = engine.generate(PROMPTS, GREEDY, drafter="none")
    ragged = engine.generate(PROMPTS, GREEDY, drafter="draft-model", num_speculative_tokens=K)
    alone = [engine.generate(prompt, GREEDY, drafter="draft-model", num_speculative_tokens=K)[0] for prompt in PROMPTS]
    for found in (ragged, alone):
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    draft = _eager(pair / "draft")
    wanted = [
        simulate(draft, shared, engine.tokenizer.encode(each).ids, own.token_ids)
        for each, own in zip(PROMPTS, plain, strict=True)
    ]
    assert [(each.stats.drafted, each.stats.accepted) for each in alone] == wanted
    assert [(each.stats.drafted, each.stats.accepted) for each in ragged] == wanted
    assert sum(accepted for _, accepted in wanted) > 30


def test_penalties_bias_grammars_and_stop_strings(engine: SpecEngine) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}
    cases = [
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"logit_bias": {300: 3.0, 40: -5.0}},
        {"stop": ("e",)},
        {"structured_outputs": StructuredOutputs(json=schema)},
        {"structured_outputs": StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2,9} (the|then) end")},
    ]
    for case in cases:
        params = replace(GREEDY, ignore_eos=False, **case)
        plain = engine.generate(PROMPTS, params, drafter="none")
        found = engine.generate(PROMPTS, params, drafter="draft-model")
        assert [(each.token_ids, each.text) for each in found] == [(each.token_ids, each.text) for each in plain], case
        assert sum(each.stats.drafted for each in found) > 0, case


def test_what_a_row_has_of_an_earlier_text_is_used_again(pair: Path) -> None:
    long = "naïve 日本 words, and then some: " * 4
    with closing(SpecEngine.load(pair / "bundle", num_threads=1, max_num_seqs=2)) as engine:
        texts = [long + "one", long + "two", long + "one"]
        plain = [engine.generate(text, GREEDY, drafter="none")[0] for text in texts]
        first, *found = [engine.generate(text, GREEDY, drafter="draft-model")[0] for text in texts]
        assert [each.token_ids for each in (first, *found)] == [each.token_ids for each in plain]
        assert all((each.stats.cached_tokens or 0) > 16 for each in found)
        assert (found[-1].stats.drafted, found[-1].stats.accepted) == (first.stats.drafted, first.stats.accepted)


def test_what_a_file_has_of_an_earlier_text_is_used_again(pair: Path, tmp_path: Path) -> None:
    text, found = "naïve 日本 words, and then some: " * 4, []
    for _ in range(2):
        with closing(SpecEngine.load(pair / "bundle", num_threads=1, prefix_cache_dir=tmp_path / "kept")) as engine:
            found += engine.generate(text, GREEDY, drafter="draft-model")
            plain = engine.generate(text, GREEDY, drafter="none", remember=False)[0]
    first, again = found
    assert (first.token_ids, again.token_ids) == (plain.token_ids, plain.token_ids)
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, len(engine.encode(text)) - 1)
    assert again.stats.accepted_lengths == first.stats.accepted_lengths


def test_a_budget_holds_what_the_draft_may_come_to_need(pair: Path) -> None:
    with closing(
        SpecEngine.load(pair / "bundle", num_threads=1, max_model_len=128, kv_cache_memory_bytes=1 << 20)
    ) as engine:
        plain = engine.generate(PROMPTS, GREEDY, drafter="none")
        found = engine.generate(PROMPTS, GREEDY, drafter="draft-model")
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        engine.check()


def test_verify_finds_the_distribution_of_the_target(pair: Path) -> None:
    """Greedy for each K; sampled, chi-square at 0.8 and 1.0, on recorded logits and through the engine."""
    report = verify_bundle(pair / "bundle", VerifyOptions(max_tokens=24, num_samples=1000, num_threads=1))
    assert {part.name: part.status for part in report.parts} == dict.fromkeys(
        ("tensors", "neighbours", "greedy", "sampling"), "passed"
    )


def test_a_quantized_draft_is_scored_on_texts_in_its_own_tokens(pair: Path, tmp_path: Path) -> None:
    result = build_bundle(_recipe(pair, tmp_path / "b", draft_quantize="int8"))
    given = {role: str(pair / role) for role in ("target", "draft")}
    options = VerifyOptions(checkpoints=given, max_tokens=4, max_prompts=2, num_samples=1000, num_threads=1)
    report = verify_bundle(result.path, options)
    (part,) = [part for part in report.parts if part.name == "perplexity"]
    (found,) = part.results
    assert (part.status, found.role) == ("passed", "draft")
    assert found.num_tokens > 100


def test_a_draft_whose_form_is_tried_reads_texts_in_its_own_tokens(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "MIN_BYTES", 0)
    monkeypatch.setattr(draft_trial, "HEAD_SIZES", (100,))
    result = build_bundle(_recipe(pair, tmp_path / "b"))
    trial = result.manifest.models["draft"].trial
    assert trial is not None
    whole, *others = trial.forms
    assert [each.lm_head_rows for each in others[:1]] == [100]
    assert whole.accepted > 0.1


def _changed(ids: np.ndarray, token: int) -> np.ndarray:
    return np.where(ids == 3, token, ids).astype(np.int32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m._replace(target_ids=m.target_ids[:-1]), "of other vocabularies"),
        (lambda m: m._replace(target_ids=_changed(m.target_ids, 2)), "one token of"),
        (lambda m: m._replace(target_ids=_changed(m.target_ids, 9999)), "not there"),
        (lambda m: m._replace(starts=np.roll(m.starts, 1)), "without a spelling"),
        (lambda m: m._replace(pieces=np.full_like(m.pieces, 520)), "unknown tokens"),
        (lambda m: m._replace(lead=np.array([-1], np.int32)), "unknown tokens"),
        (lambda m: m._replace(pieces=m.pieces.astype(np.int64)), "other types"),
        (b"", "cannot be read"),
        (b"no archive", "cannot be read"),
        (b"PK\x03\x04", "cannot be read"),
    ],
    ids=["short", "twice", "beyond", "starts", "pieces", "lead", "type", "empty", "text", "cut off"],
)
def test_a_damaged_map_is_refused(change: Any, said: str, pair: Path, shared: Any, tmp_path: Path) -> None:
    models = load_manifest(pair / "bundle").models
    path = tmp_path / "draft" / MAP_NAME
    path.parent.mkdir()
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        change(shared.tokens).save(path)
    with pytest.raises(BundleError, match=said):
        load_token_map(tmp_path, models["draft"], models["target"])
    assert isinstance(load_token_map(pair / "bundle", models["draft"], models["target"]), TokenMap)
    assert load_token_map(tmp_path, models["target"], models["target"]) is None


def test_added_tokens_and_both_vocabulary_forms_are_read() -> None:
    added = [{"id": 2, "content": "<eos>"}]
    bpe = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}).encode()
    unigram = json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}).encode()
    assert read_vocabulary(bpe, where="x") == read_vocabulary(unigram, where="x") == {0: "a", 1: "b", 2: "<eos>"}
    for data in (b"", b"{}", b'{"model": {"vocab": 3}}', b"\xff\xfe"):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json of mymodel"):
            read_vocabulary(data, where="mymodel")


def test_tokens_at_the_end_of_one_side_are_padding() -> None:
    words = {0: "a", 1: "b", 2: "c", 3: "<eos>"}
    check_vocabularies(words | {4: "<pad>"}, words, num_shared_rows=4)
    check_vocabularies(words, words | {4: "<pad>"}, num_shared_rows=None)
    # beyond the shared LM head rows nothing can be drafted, so nothing is compared
    check_vocabularies(words, words | {3: "x"}, num_shared_rows=3)
    assert [draftable_size([words, words], rows) for rows in ([4, 4], [8, 6], [3, 6])] == [4, 4, 3]


FORTY = {i: f"t{i}" for i in range(40)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({3: "x"}, "token id 3 is 't3' in the target and 'x' in the draft; 1 of 40 ids differ."),
        (dict.fromkeys((3, 4, 5, 9), "x"), "4 of 40 ids differ (3-5, 9)."),
        (dict.fromkeys(range(1, 40, 2), "x"), "20 of 40 ids differ (1, 3, 5, 7, 9 and more)."),
        ({1: None}, "token id 1 is 't1' in the target and unused in the draft"),
        (dict.fromkeys(range(40)), "share no token"),
    ],
)
def test_the_ids_that_differ_are_named(changes: dict[int, str | None], words: str) -> None:
    draft = {token: name for token, name in (FORTY | changes).items() if name is not None}
    with pytest.raises(VocabularyMismatchError) as raised:
        check_vocabularies(FORTY, draft, num_shared_rows=40)
    assert words in raised.value.message
