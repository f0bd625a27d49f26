"""A build chooses the form of its draft: by what, what it says of it, and when it leaves everything as it was."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from specexport.compile import draft_guesses, draft_trial, plan
from specexport.compile.built import BuiltModel
from specexport.compile.draft_cuts import read_counting_texts
from specexport.compile.draft_guesses import Text, measure_guesses, split_held_out, write_texts
from specexport.compile.draft_promise import MARGIN, PricedForm, is_sure, pick, promised_speed
from specexport.compile.draft_trial import ChosenForm, DraftForm, DraftTrial, FormChoice, HeadSizes
from specexport.compile.pipeline import BuildResult, build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime.bundle.arrays import LM_HEAD_IDS_NAME
from specexport_runtime.bundle.entry import ModelEntry, TriedForm
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.costs.curves import StepCost
from specexport_runtime.costs.prior import prior_costs
from specexport_runtime.engine import SpecEngine
from specexport_runtime.errors import SpecexportError
from specexport_runtime.sampling.params import SamplingParams
from tests.support.models.pairs import TinyPair
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import GROUPED, make_model

TARGET = StepCost(reading=10.0, token=0.0)
SIMPLEST_FILES = ["model.onnx", "model.onnx.data", "model.padded.onnx"]


@pytest.mark.parametrize(("accepted", "step", "found"), [(1.0, 0.0, 5.0), (0.0, 0.1, 1.0), (0.5, 5.0, 1.0)])
def test_what_a_form_promises(accepted: float, step: float, found: float) -> None:
    assert promised_speed(accepted, TARGET, StepCost(reading=step, token=0.0), 4) == pytest.approx(found)
    each = [sum(0.8**i for i in range(k + 1)) * 10 / (10 + 4 * k) for k in range(9)]
    for longest, best in ((8, max(each)), (1, each[1])):  # the best lookahead counts
        assert promised_speed(0.8, TARGET, StepCost(reading=4.0, token=0.0), longest) == pytest.approx(best)


def _cut(draft: ModelEntry) -> int | None:
    return None if draft.cut_lm_head is None else draft.cut_lm_head.num_rows


@pytest.mark.parametrize(
    ("speeds", "best"), [((1.0, 1.02, 1.029), 0), ((1.0, 1.04, 1.06), 1), ((1.0, 1.04, 1.08), 2), ((1.5, 1.0, 1.54), 0)]
)
def test_what_is_not_clearly_better_than_what_is_simpler_is_not_chosen(speeds: tuple[float, ...], best: int) -> None:
    tried = [TriedForm("int8", 100 - at, 0.5, 0.3, speed) for at, speed in enumerate(speeds)]
    assert pick(tried) is tried[best]


@pytest.mark.parametrize(
    ("kept", "others"), [(None, ("int8", "int4")), (1.06, ("int4",)), (0.77, ()), (2.0, ("int8", "int4"))]
)
def test_only_what_is_smaller_is_tried(kept: float | None, others: tuple[str, ...]) -> None:
    assert DraftTrial(True, True, (), False, 8).others(kept, "ort-cpu") == others
    assert DraftTrial(False, True, (), False, 8).others(kept, "ort-cpu") == ()


def test_no_prompt_is_among_the_texts_that_are_counted() -> None:
    texts = [f"{at} " * 400 for at in range(40)]
    counted, prompts = split_held_out(texts)
    assert 6 <= len(prompts) <= 12
    assert not any(prompt in text for prompt in prompts for text in counted)
    assert split_held_out(texts[:3]) == (tuple(texts[:3]), ())


def _built(bundle: Path, role: str) -> BuiltModel:
    manifest = load_manifest(bundle)
    vocabulary, tokenizer = manifest.vocabulary, (bundle / "tokenizer.json").read_bytes()
    ends = tuple(vocabulary.eos_token_ids)
    return BuiltModel(manifest.models[role], {}, None, tokenizer, None, {}, vocabulary.bos_token_id, ends)


def test_what_the_target_writes_and_who_guesses_it(tiny_bundle: Path) -> None:
    target, prompts = _built(tiny_bundle, "target"), ["abc def", "one", "two", "a b c", "0 1 2 3", "zzz"]
    texts = write_texts(tiny_bundle, target, prompts, num_ids=320)
    with closing(SpecEngine.load(tiny_bundle)) as engine:
        wanted = engine.generate(prompts, SamplingParams(max_tokens=draft_guesses.NUM_TOKENS), drafter="none")
    assert [text.written for text in texts] == [result.token_ids for result in wanted]
    known = [text for text in texts if max(text.written) < 300]
    assert 0 < len(known) < len(texts)
    assert write_texts(tiny_bundle, target, prompts, num_ids=300) == known
    with pytest.raises(SpecexportError, match="tokens that the draft has not"):
        write_texts(tiny_bundle, target, prompts, num_ids=1)
    count = sum(len(text.written) for text in texts)
    head = np.arange(0, 320, 2, dtype=np.int32)
    inside = sum(token % 2 == 0 for text in texts for token in text.written)
    right = measure_guesses(tiny_bundle, target.entry, texts, None, [None, head])
    assert right.sum(axis=1).tolist() == [count, inside]
    wrong = [Text(text.prompt, [(token + 1) % 320 for token in text.written[:1]]) for text in texts]
    assert not measure_guesses(tiny_bundle, target.entry, wrong, None, [None]).any()


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(plan, "MIN_BYTES", 0)
    monkeypatch.setattr(draft_trial, "HEAD_SIZES", (150, 40))
    monkeypatch.setattr(draft_trial, "MARGIN", -1.0)  # other weights are tried however little they promise
    return monkeypatch


def _sized(entry: ModelEntry, step: float) -> ModelEntry:
    """The entry of a model whose steps multiply with so many float parameters."""
    engine = replace(entry.engine, packed_bytes=None)
    return replace(entry, engine=engine, parameters=entry.parameters._replace(step=int(step)))


def test_few_texts_choose_as_well_as_all(tiny_bundle: Path) -> None:
    """Of drafts that are made up: how much slower than the best form the chosen one is."""
    draws, models = np.random.default_rng(1), load_manifest(tiny_bundle).models
    target = _sized(models["target"], 1.5e9)
    lost: dict[str, list[float]] = {"few": [], "all": []}
    num_sure = 0
    for _ in range(400):
        step, head = 1.5e9 * np.exp(draws.uniform(np.log(0.05), np.log(0.6))), draws.uniform(0.1, 0.5)
        sizes = (65536, 28000, 14000, 7000, 3500)
        parameters = [step * (1 - head * (1 - size / 65536)) for size in sizes]
        forms = [
            PricedForm(_sized(models["draft"], each), size, target, 8)
            for size, each in zip(sizes, parameters, strict=True)
        ]
        accepted = draws.uniform(0.4, 0.92)
        kept = 1 - np.cumsum([0, *draws.uniform(0, 0.08, 4) * draws.uniform(0, 1.5)])
        speeds = {form.size: form.speed(accepted * share) for form, share in zip(forms, kept, strict=True)}

        def guess(count: int, accepted: float = accepted, kept: Any = kept) -> Any:
            return (draws.random(count) < accepted) & (draws.random(count) < kept[:, None])

        few, every = guess(72), guess(384)
        sure = is_sure(forms, few)
        num_sure += sure
        for name, right in (("few", few if sure else every), ("all", every)):
            chosen = pick([form.tried(own) for form, own in zip(forms, right, strict=True)])
            lost[name].append(max(speeds.values()) / speeds[chosen.lm_head_rows] - 1)
    most = {name: np.mean(np.array(each) > MARGIN) for name, each in lost.items()}
    assert num_sure > 200
    assert most["few"] < most["all"] + 0.02 < 0.1
    assert np.mean(lost["few"]) < 0.01


SHARES = {None: 0.6, 150: 0.6, 40: 0.4, "int8": 0.3}
"""Of the tokens that are guessed: with each LM head, and with 8 bits."""


@pytest.mark.parametrize(
    ("step", "few", "every", "chosen", "looks"),
    [
        (3e8, SHARES, {}, (None, 150), [True]),
        (3e8, SHARES | {40: 0.55}, SHARES, (None, 150), [True, False]),  # heads leave a doubt
        (3e8, SHARES | {"int8": 0.4}, SHARES | {"int8": 0.6}, ("int8", 150), [True, False]),
        # Then another head is the best, of which no engine was built.
        (3e8, SHARES | {"int8": 0.4}, SHARES | {150: 0.4, 40: 0.6}, (None, 40), [True, False]),
        (3e6, SHARES, {}, (None, None), [True]),  # nothing makes these steps much shorter
    ],
    ids=["sure", "heads", "int8", "last", "short"],
)
def test_when_more_texts_are_written(step, few, every, chosen, looks, tiny_bundle, tmp_path, monkeypatch):
    wrote, made, target = list[bool](), list[Any](), _built(tiny_bundle, "target")
    target = replace(target, entry=_sized(target.entry, 1.5e9))
    entry = _sized(load_manifest(tiny_bundle).models["draft"], step)
    sizes = HeadSizes(int(step), 2, 320, int(step) // 640, tied=False, kept_bytes=None)

    def write(*_: Any, few: bool = False, **__: Any) -> list[Text]:
        wrote.append(few)
        return [Text([1], [2] * (72 if few else 384))]

    def guess(_: Path, entry: ModelEntry, texts: list[Text], __: Any, heads: Any, ___: Any) -> Any:
        count, shares = len(texts[0].written), few if wrote[-1] else every
        names = [entry.quantize or (None if head is None else len(head)) for head in heads]
        return np.array([np.arange(count) < shares[name] * count for name in names])

    def make(form: DraftForm, place: Path, _: Any, *, last: bool) -> ModelEntry:
        made.append((form.quantize, None if form.head_ids is None else len(form.head_ids), last))
        place.mkdir()
        built = entry if form.head_ids is None else sizes.cut(entry, len(form.head_ids))
        packed = None if form.quantize else built.engine.packed_bytes
        return replace(built, quantize=form.quantize, engine=replace(built.engine, packed_bytes=packed))

    for name, value in (("HEAD_SIZES", (150, 40)), ("write_texts", write), ("measure_guesses", guess)):
        monkeypatch.setattr(draft_trial, name, value)
    trial = DraftTrial(True, True, ("a",), False, 8, target, tiny_bundle)
    choice = FormChoice(trial, ["int8"], sizes, lambda _: np.arange(320, dtype=np.int32))
    form, found = choice.settle(ChosenForm(DraftForm(None, None), entry), tmp_path, make)
    assert (form.quantize, None if form.head_ids is None else len(form.head_ids)) == chosen
    assert wrote == looks
    assert found.trial is not None
    assert found.trial.num_tokens == (384 if False in looks else 72)
    tried = [] if step < 1e7 else [("int8", 150)]
    assert [each[:2] for each in found.trial.forms] == [(None, 300), (None, 150), (None, 40), *tried]
    assert made == [(*each, False) for each in tried] + [(*chosen, True)] * (chosen not in [(None, None), *tried])
    assert (found.trial.obstacle or "").partition(": ")[0] == ("" if tried else "int8")


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("at", "form"), [(-1, ("int4", 40)), (1, (None, 150)), (0, (None, None)), (None, None)], ids=["-1", "1", "0", "own"]
)
def test_the_draft_has_the_form_that_promises_most(at, form, tiny_pair, tmp_path, trying, run_cli):
    if at is not None:
        trying.setattr(draft_trial, "pick", lambda tried: tried[at])
    recipe = tiny_pair.recipe(tmp_path / "b")
    result = build_bundle(recipe, use_cache=False)
    draft = load_manifest(tmp_path / "b").models["draft"]
    trial = draft.trial
    assert trial is not None
    assert trial.obstacle is None
    own = [(tried.quantize, tried.lm_head_rows) for tried in trial.forms]
    assert own[:3] == [(None, 300), (None, 150), (None, 40)]
    assert [name for name, _ in own[3:]] == ["int8", "int4"]
    if at is None:
        best = pick(trial.forms)
        form = best.quantize, None if best.lm_head_rows == 300 else best.lm_head_rows
    assert (draft.quantize, _cut(draft)) == form
    assert (result.manifest.recipe["draft_quantize"], result.manifest.recipe["draft_vocab_size"]) == form
    assert_priced(result, form)
    assert not [place for place in (tmp_path / "b" / "draft").iterdir() if place.is_dir()]
    shown = run_cli("inspect", tmp_path / "b", "--all").stdout
    assert f"form chosen on {trial.num_tokens} tokens of the target: {form[0] or 'float'} with" in shown
    assert shown.count("  tried: ") == len(own) - 1
    assert build_bundle(recipe).up_to_date
    with closing(SpecEngine.load(tmp_path / "b")) as engine:
        params = SamplingParams(max_tokens=24)
        plain, drafted = (engine.generate(["abc"], params, drafter=name)[0] for name in ("none", "draft-model"))
    assert plain.token_ids == drafted.token_ids


def _entry(result: BuildResult) -> Any:
    return result.manifest.models["draft"]


def assert_priced(result: BuildResult, form: Any) -> None:
    """What the form was to cost before it was built is what it costs."""
    costs = prior_costs(result.manifest.models, kernels="avx512vnni")
    step = costs.drafters["draft-model"].seconds(1, 1) / costs.target.seconds(1, 1)
    (chosen,) = (tried for tried in _entry(result).trial.forms if tried[:2] == (form[0], form[1] or 300))
    assert chosen.step == pytest.approx(step, rel=1e-3)


@pytest.mark.whole
@pytest.mark.parametrize(("kinds", "tied"), [({"": "Q8_0"}, True), ({"output.weight": "Q8_0", "": "Q4_0"}, False)])
def test_a_chosen_draft_is_accepted_as_often_as_the_trial_said(kinds, tied, tmp_path, trying):
    trying.setattr(draft_trial, "pick", lambda tried: tried[1])
    trying.setattr(draft_trial, "is_sure", lambda *_: False)  # all texts are read
    for role in ("target", "draft"):
        model = make_model("Llama", GROUPED | {"num_hidden_layers": 1, "tie_word_embeddings": tied})
        write_gguf(model, tmp_path / f"{role}.gguf", architecture="llama", kinds=kinds, seed=0)
    (tmp_path / "texts.txt").write_text(" ".join(map(str, range(9000))), encoding="utf-8")
    recipe = BuildRecipe(
        **{role: str(tmp_path / f"{role}.gguf") for role in ("target", "draft")},
        output=str(tmp_path / "out"),
        draft_vocab_texts=str(tmp_path / "texts.txt"),
    )
    result = build_bundle(recipe, use_cache=False)
    tried = _entry(result).trial.forms
    assert [form.quantize for form in tried] == ["keep"] * 3 + (["int4"] if kinds[""] == "Q8_0" else [])
    assert_priced(result, ("keep", 150))
    assert tried[0].accepted == 1, "both are one model"
    _, own_prompts = split_held_out(read_counting_texts(str(tmp_path / "texts.txt")))
    tokenizer = Tokenizer.from_file(str(result.path / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids[-draft_guesses.PROMPT_LEN :] for prompt in own_prompts]
    params = SamplingParams(max_tokens=draft_guesses.NUM_TOKENS)
    with closing(SpecEngine.load(result.path)) as engine:
        plain = engine.generate(prompts, params, drafter="none")
        drafted = engine.generate(prompts, params, drafter="draft-model", num_speculative_tokens=1)
    head = set(np.load(result.path / "draft" / LM_HEAD_IDS_NAME).tolist())
    written = [token in head for each in plain for token in each.token_ids]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert _entry(result).trial.num_tokens == len(written)
    assert tried[1].accepted == sum(written) / len(written) < 1
    for each in drafted:
        at, tries, right = 1, 0, 0  # the first token comes with the prompt
        while at < len(each.token_ids) - 1:
            found = each.token_ids[at] in head
            at, tries, right = at + 1 + found, tries + 1, right + found
        assert (each.stats.accepted, each.stats.drafted) == (right, tries)


@pytest.mark.whole
def test_a_trial_is_done_once_and_always_ends_the_same(tiny_pair, tmp_path, trying):
    trying.setenv("SPECEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    first, anew = (build_bundle(tiny_pair.recipe(tmp_path / name), use_cache=name == "one") for name in ("one", "two"))
    assert anew.reused == ()
    assert anew.manifest.files == first.manifest.files
    assert _entry(anew) == _entry(first)
    trying.setattr(draft_trial, "pick", lambda tried: tried[1])
    again = build_bundle(tiny_pair.recipe(tmp_path / "three"))
    assert again.reused == ("target", "draft")
    assert _entry(again).trial == _entry(first).trial
    other = build_bundle(tiny_pair.recipe(tmp_path / "four", quantize="int8"))
    assert "draft" not in other.reused, "another target writes other texts"


@pytest.mark.one_of_kind
@pytest.mark.parametrize(
    ("work", "least", "why"),
    [(1.0, 0, "too large"), (6e12, 1 << 20, "its weights take 0."), (6e12, 0, "the draft breaks")],
)
def test_a_draft_that_cannot_be_tried_is_what_it_was(work, least, why, tiny_pair, tmp_path, trying, run_cli):
    def guess(*_: Any) -> Any:
        raise SpecexportError("the draft breaks.")

    trying.setattr(plan, "MIN_BYTES", least)
    trying.setattr(draft_guesses, "_MAX_WORK", work)
    trying.setattr(draft_trial, "measure_guesses", guess)
    draft = _entry(build_bundle(tiny_pair.recipe(tmp_path / "b"), use_cache=False))
    assert (draft.quantize, _cut(draft)) == (None, None)
    assert draft.trial.forms == ()
    assert why in draft.trial.obstacle
    assert f"no forms were tried: {draft.trial.obstacle}" in run_cli("inspect", tmp_path / "b", "--all").stdout
    assert sorted(place.name for place in (tmp_path / "b" / "draft").iterdir()) == SIMPLEST_FILES


def test_a_form_that_cannot_be_had_leaves_the_others(tiny_pair, tmp_path, trying, run_cli):
    def guess(folder: Path, entry: ModelEntry, *args: Any) -> Any:
        if entry.quantize == "int8":
            raise SpecexportError("the draft breaks with int8.")
        return measure_guesses(folder, entry, *args)

    trying.setattr(draft_trial, "measure_guesses", guess)
    trying.setattr(draft_trial, "pick", lambda tried: tried[1])
    draft = _entry(build_bundle(tiny_pair.recipe(tmp_path / "b"), use_cache=False))
    assert (draft.quantize, _cut(draft)) == (None, 150)
    assert [(form.quantize, form.lm_head_rows) for form in draft.trial.forms[3:]] == [("int4", 150)]
    assert "  not tried: the draft breaks with int8." in run_cli("inspect", tmp_path / "b", "--all").stdout
    assert sorted(place.name for place in (tmp_path / "b" / "draft").iterdir()) == [LM_HEAD_IDS_NAME, *SIMPLEST_FILES]


def test_what_is_asked_for_is_not_tried(tiny_pair: TinyPair, tmp_path: Path, trying: pytest.MonkeyPatch) -> None:
    trying.setattr(draft_trial, "pick", lambda tried: tried[-1])
    whole = _entry(build_bundle(tiny_pair.recipe(tmp_path / "b", draft_quantize="none", draft_vocab_size="all")))
    assert (whole.trial, whole.quantize, whole.cut_lm_head) == (None, None, None)
    sized = _entry(build_bundle(tiny_pair.recipe(tmp_path / "c", draft_vocab_size=40)))
    assert [form[:2] for form in sized.trial.forms] == [(None, 40), ("int8", 40), ("int4", 40)]
    assert (sized.quantize, _cut(sized)) == ("int4", 40)
