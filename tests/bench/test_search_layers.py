"""``specexport bench --search-layers`` on real engines, and what drafts do with what it kept."""

import copy
import itertools
import json
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from specexport.bench import search_layers
from specexport.bench.search_layers import LayerSelection, choose_parts
from specexport.cli import main
from specexport.compile.bundle import write_bundle_json
from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.bundle.draft_layers import DRAFT_LAYERS_NAME, DraftLayers, load_draft_layers
from specexport_runtime.bundle.entry import Gates
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import BundleError
from specexport_runtime.packing.batch import ModelRunner, RowWork
from specexport_runtime.requests.layer_choice import LayerRules
from tests.support.cases.entries import changed
from tests.support.cases.refusals import content_of, line_of
from tests.support.models.tiny_models import make_llama, save_checkpoint

LAYERS = 5
VOCAB = 259  # that of the tokenizer: only such ids are drafted
USELESS = ((1, 4), (0, 2, 4))
"""Layers whose attention, and whose MLP, add nothing to the stream."""
PROMPTS = ["def add(a, b):", "once", "The sum of 12 and 30 is", "x = [1, 2, 3]", "for i in", "abc abc"]


def without(model, mixers, mlps):
    import torch

    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            if i in mixers:
                layer.self_attn.o_proj.weight.zero_()
            if i in mlps:
                layer.mlp.down_proj.weight.zero_()
    return model


def build(folder, model, *, self_draft=True):
    recipe = BuildRecipe(
        target=str(save_checkpoint(model, folder / "model")), output=str(folder / "out"), max_model_len=96,
        check=False, self_draft=self_draft,
    )  # fmt: skip
    build_bundle(recipe, use_cache=False)
    return folder / "out"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny targets: one with useless parts, one whose last layers are useless; their models and bundles."""
    made = {}
    for name, parts in (("parts", USELESS), ("exit", (range(2, LAYERS),) * 2)):
        model = without(make_llama(seed=3, num_hidden_layers=LAYERS, vocab_size=VOCAB), *parts)
        made[name] = (model, build(tmp_path_factory.mktemp(name), model))
    return made


@pytest.fixture
def bundle(models, tmp_path):
    return shutil.copytree(models["parts"][1], tmp_path / "bundle")


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch):
    """Tiny steps take no time that could be told from chance."""

    ratios = {}

    def step_seconds(_curves, learned, drafter, _context, layers):
        found = learned.extra_ratio(1), learned.draft_ratio(drafter, 1)
        assert ratios.setdefault(id(learned), (learned, found))[1] == found, "all choices are judged by the same costs"
        step = 1 - 0.06 * layers.mixers.count(False) - 0.1 * layers.mlps_off
        return lambda k: 1 + 0.05 * k, lambda k: k * max(step, 0.05)

    monkeypatch.setattr(search_layers, "step_seconds", step_seconds)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def search(bundle, prompts, *arguments):
    given = ["bench", bundle, "--search-layers", "--prompts", prompts, "--max-tokens", "24", "--ignore-eos", *arguments]
    return CliRunner().invoke(main, list(map(str, [*given, "--threads", 1, "--no-spin", "-q"])))


def found_in(bundle):
    return load_draft_layers(bundle, load_manifest(bundle))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_parts_that_add_nothing_are_found_and_kept(bundle, prompts, tmp_path, temperature):
    file = tmp_path / "found.json"
    ended = search(bundle, prompts, "--temperature", temperature, "--json", file)
    assert ended.exit_code == 0, ended.output
    layers = found_in(bundle)
    assert set(layers.mixers) >= set(USELESS[0])
    assert set(layers.mlps) >= set(USELESS[1])
    assert layers.speedup > 1.2
    assert json.loads(file.read_text())["found"] == json.loads(json.dumps(layers._asdict()))
    assert "early exit" in ended.stdout
    inspected = CliRunner().invoke(main, ["inspect", str(bundle), "--check-files"])
    assert "its own drafts go without the mixers of layers 1, " in inspected.stdout.replace("layers 0, 1", "layers 1")
    shown = json.loads(CliRunner().invoke(main, ["inspect", str(bundle), "--json"]).stdout)
    assert shown["draft_layers"]["lookahead"] == layers.lookahead
    before = (bundle / DRAFT_LAYERS_NAME).read_bytes()
    assert search(bundle, prompts, "--temperature", temperature).exit_code == 0
    assert (bundle / DRAFT_LAYERS_NAME).read_bytes() == before, "the same search finds the same"


def test_an_early_exit_is_found_where_the_last_layers_add_nothing(models, prompts, tmp_path):
    bundle = shutil.copytree(models["exit"][1], tmp_path / "bundle")
    file = tmp_path / "found.json"
    assert search(bundle, prompts, "--json", file).exit_code == 0
    data = json.loads(file.read_text())
    assert sum(data["rivals"]["early exit"]["mask"]) == 2 * 2
    layers = found_in(bundle)
    assert set(layers.mixers) >= {2, 3, 4}
    assert set(layers.mlps) >= {2, 3, 4}
    assert layers.tokens_a_round > 0.9 * (1 + layers.lookahead)


def keep(bundle, *, mixers=USELESS[0], mlps=USELESS[1], num_layers=LAYERS, **changes):
    layers = DraftLayers(num_layers, tuple(mixers), tuple(mlps), 3, 3.5, 1.4, 100)
    write_bundle_json(bundle, load_manifest(bundle), DRAFT_LAYERS_NAME, layers._asdict() | changes)


def test_drafts_leave_out_what_was_kept_unless_a_request_says_otherwise(bundle):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with closing(SpecEngine.load(bundle, num_threads=1, spin=False)) as engine:
        plain = engine.generate(PROMPTS, params, speculation=False)
        by_rules = engine.generate(PROMPTS, params, drafter="self")
    assert by_rules[0].stats.layer_choice.removed_mlp != USELESS[1]
    keep(bundle)
    with closing(SpecEngine.load(bundle, num_threads=1, spin=False)) as engine:
        kept = engine.generate(PROMPTS, params, drafter="self")
        own = engine.generate(PROMPTS, params, drafter="self", layer_rules=LayerRules(period=2, keep_last=1))
        auto = engine.generate(PROMPTS, params)
    for results in (by_rules, kept, own, auto):
        assert [each.token_ids for each in results] == [each.token_ids for each in plain]
    for result in kept:
        choice = result.stats.layer_choice
        assert (choice.removed_attention, choice.removed_mlp) == USELESS
        assert result.stats.accepted == result.stats.drafted > 0, "what adds nothing is not missed"
    assert own[0].stats.layer_choice.removed_mlp == (1, 3)


def test_drafts_are_those_of_a_reference_and_accepted_as_promised(models, bundle, prompts):
    """A model in torch reads the text with all layers, then the drafts without some, over the same keys and values."""
    import torch

    mixers, mlps = (1, 3), (0, 4)
    whole = models["parts"][0]
    thin = without(copy.deepcopy(whole), mixers, mlps)
    keep(bundle, mixers=mixers, mlps=mlps)
    with closing(SpecEngine.load(bundle, num_threads=1, spin=False)) as engine:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        results = engine.generate(PROMPTS, params, drafter="self", num_speculative_tokens=3, trace=True)
        ids = [engine.encode(prompt) for prompt in PROMPTS]
        runner = ModelRunner(engine.target)
        mask = np.ones(2 * LAYERS, np.bool_)
        mask[[2 * i for i in mixers]] = mask[[2 * i + 1 for i in mlps]] = False
        drafted = 0
        for prompt, result in zip(ids, results, strict=True):
            text = list(prompt)
            for each in result.trace:
                with torch.no_grad():
                    cache = whole(torch.tensor([text[:-1]]), use_cache=True).past_key_values
                    logits, wanted, token = None, [], text[-1]
                    for _ in each.drafted:
                        logits = thin(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
                        token = int(logits.argmax())
                        wanted.append(token)
                assert list(each.drafted) == wanted
                drafted += len(wanted)
                text += each.emitted
            with torch.no_grad():
                cache = whole(torch.tensor([text[:-1]]), use_cache=True).past_key_values
                logits = thin(torch.tensor([text[-1:]]), past_key_values=cache).logits[0, -1].numpy()
            runner.reset()
            runner.prefill(0, text[:-1])
            engine.target.set_layers(mask)
            ours = runner.step(0, [RowWork(text[-1:], 1)])[0].copy()
            engine.target.set_layers(None)
            np.testing.assert_allclose(ours, logits, atol=1e-5 * np.abs(logits).max())
        runner.reset()
    assert drafted > 50
    rounds = [each for result in results for each in result.trace if len(each.drafted) == 3]
    assert 1 + np.mean([each.accepted for each in rounds]) > 1.05, "some are accepted"


KINDS = ("attention", "MLP") * 4 + ("attention", "")


def additive(seed):
    """A judge by which each part has its price and its loss, and the losses of neighbours add up to more."""
    random = np.random.default_rng(seed)
    loss, price = random.uniform(0, 0.3, len(KINDS)) ** 2, random.uniform(0.5, 1.5, len(KINDS)) / len(KINDS)

    def judge(mask):
        off = np.flatnonzero(~mask & np.array([bool(kind) for kind in KINDS]))
        rate, step = np.exp(-4 * loss[off].sum() - 0.1 * (np.diff(off) == 1).sum()), 1 - price[off].sum()
        speeds = {k: sum(rate**i for i in range(k + 1)) / (1 + 0.05 * k + k * step) for k in range(1, 5)}
        best = max(speeds, key=speeds.__getitem__)
        return LayerSelection(mask, speeds[best], best, 1.0)

    return judge


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_nearly_the_best_of_all_choices(seed):
    judge, tried = additive(seed), []
    rivals = choose_parts(KINDS, lambda mask: tried.append(mask) or judge(mask))
    found = max(rivals.values(), key=lambda each: each.speedup)
    every = [np.array([*bits, False]) for bits in itertools.product((False, True), repeat=9)][1:-1]
    assert found.speedup >= 0.93 * max(judge(mask).speedup for mask in every)
    assert found.mask.any()
    assert not found.mask[-1], "what is not there is not on"
    assert len(tried) <= 4 + 2 * 9
    assert all(0 < mask.sum() < 9 for mask in tried), "nothing and everything are no choices"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_layers": 7}, "5 parts of a target of 7 layers, and this one has 10 parts in 5 layers"),
        ({"mixers": (9,)}, "it leaves out 4 parts of a target of 5 layers"),
        ({"mlps": (5,)}, "it leaves out 3 parts"),
        ({"mixers": range(LAYERS), "mlps": range(LAYERS)}, "it leaves out 10 parts"),
        ({"mixers": (), "mlps": ()}, "it leaves out 0 parts"),
        ({"speedup": "fast"}, "speedup is 'fast', not a number"),
        ({"more": 1}, "'more' is not known"),
    ],
)
def test_layers_of_another_model_are_refused(bundle, changes, why):
    keep(bundle, **changes)
    with pytest.raises(BundleError, match=why) as caught:
        SpecEngine.load(bundle, num_threads=1)
    assert "--search-layers" in caught.value.hint
    assert why in line_of(CliRunner().invoke(main, ["inspect", str(bundle)]))


def test_layers_of_no_gates_and_altered_and_broken_files_are_refused(bundle):
    keep(bundle)
    manifest = load_manifest(bundle)
    closed = replace(manifest, models={"target": changed(manifest.models["target"], gates=Gates())})
    with pytest.raises(BundleError, match="0 parts in 0 layers that can be left out"):
        load_draft_layers(bundle, closed)
    path = bundle / DRAFT_LAYERS_NAME
    path.write_text(path.read_text().replace("100", "101"))
    with pytest.raises(BundleError, match=r"draft_layers\.json was altered"):
        SpecEngine.load(bundle)
    path.write_text("{")
    with pytest.raises(BundleError, match=r"draft_layers\.json cannot be read"):
        load_draft_layers(bundle, manifest)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--methods", "self"], "--search-layers takes no --methods."),
        (["--temperature", "0,0.5"], "--search-layers takes one --temperature."),
        (["--seed", "-1"], "the seed is -1."),
        (["--max-tokens", "95"], "prompt 'prompts/1'"),
        (["--max-tokens", "2"], "the texts are too short for a draft."),
    ],
)
def test_searches_that_cannot_be_are_refused(bundle, prompts, arguments, why):
    before = content_of(bundle)
    if arguments == ["--max-tokens", "95"]:
        prompts.write_text(json.dumps({"prompt": "x" * 200}) + "\n")
    assert why in line_of(search(bundle, prompts, *arguments))
    assert content_of(bundle) == before


def test_several_bundles_and_targets_without_gates_are_refused(bundle, prompts, tmp_path):
    assert "takes one bundle, not 2" in line_of(search(bundle, prompts, bundle))
    assert "--self-draft" in line_of(search(build(tmp_path, make_llama(), self_draft=False), prompts))


def test_a_bundle_that_was_rebuilt_meanwhile_keeps_nothing(bundle, prompts, monkeypatch):
    import specexport.bench.search_layers as command

    first = load_manifest(bundle)
    seen = iter([first])
    monkeypatch.setattr(command, "load_manifest", lambda _: next(seen, replace(first, build_key="other")))
    assert "was rebuilt during the search" in line_of(search(bundle, prompts))
    assert not (bundle / DRAFT_LAYERS_NAME).exists()
