"""DFlash 2 and DSpark heads, made on the spot: what our engines draft is what the published equations draft."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.heads import dflash2, dspark
from specexport.heads.dflash import block_states
from specexport.heads.probe import check_probe, probe_head
from specexport.inspect import describe
from specexport_runtime import SamplingParams
from specexport_runtime.bundle.arrays import CorrectionTables, MaskInput
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.drafters.correction import make_corrector
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from specexport_runtime.requests.draft_exit import DraftExitParams
from tests.support.models.head_bundles import Watch, build, opened
from tests.support.models.loading import config_of, load
from tests.support.models.tiny_corrected import DIALECTS, deepspec, zlab2
from tests.support.models.tiny_dflash import MASK
from tests.support.models.tiny_heads import HIDDEN, IDS, LAYERS, VOCAB
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.references.drafted import PROMPTS, check_drafts_of
from tests.support.references.reference_corrected import Walk, context_of, draft, logits_of, states_of, target_context


def mask_of(loaded: Any) -> MaskInput:
    """What the drafter of a loaded head reads, as a bundle gives it."""
    config, made = loaded.config, loaded.correction
    tables = CorrectionTables(made.rule, dict(made.tables), made.most)
    return MaskInput(config.mask_token_id, np.zeros(HIDDEN, np.float32), config.block_size, config.from_anchor, tables)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_computes_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    spec = DIALECTS[dialect](tmp_path, target)
    block, loaded = spec.block, load(tmp_path, target)
    config = loaded.config
    assert (config.taps, config.block_size, config.mask_token_id) == (block.taps, block.block_size, block.mask)
    assert (config.from_anchor, config.shape.causal) == (spec.from_anchor, tuple(block.causal))
    features = [torch.randn(9, HIDDEN) for _ in block.taps]
    context = loaded.projection(features)
    torch.testing.assert_close(context, context_of(block, features), rtol=0, atol=1e-5)
    blocks = torch.tensor([[5, MASK, MASK, MASK], [7, MASK, MASK, MASK], [200, 9, 8, 11]])
    starts = torch.tensor([9, 4, 1])  # blocks after a part of the context see no more than it
    found = block_states(loaded.head, context, starts, blocks)
    order = slice(None) if block.ids is None else np.argsort(block.ids)
    for start, ids, state in zip(starts.tolist(), blocks, found, strict=True):
        wanted = states_of(spec, context[:start], ids.tolist())
        logits, normed = loaded.head.read(state)
        torch.testing.assert_close(normed, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, logits_of(spec, wanted)[:, order], rtol=0, atol=2e-5)


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_corrected_by_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    """Whatever the tokens in front are: those that were likely, and others."""
    spec = DIALECTS[dialect](tmp_path, target)
    loaded = load(tmp_path, target)
    ids, count = loaded.ids, spec.block.block_size - (not spec.from_anchor)
    corrector = make_corrector(mask_of(loaded))
    context, generator, changed = torch.randn(6, HIDDEN), np.random.default_rng(5), 0
    for likely in (0.0, 0.5, 1.0):
        walk = Walk(spec, context, 17, count)
        rows = walk.logits if ids is None else walk.logits[:, np.argsort(spec.block.ids)]
        correction = corrector.begin(rows.numpy(), walk.states.numpy(), 17)
        drafted: list[int] = []
        for place in range(count):
            before = drafted[-1] if drafted else 17
            if spec.confidence:
                assert correction.confidence(drafted) == pytest.approx(walk.confidence(before), abs=1e-6)
            wanted = walk(before).numpy()
            wanted = wanted if ids is None else wanted[ids]
            found = correction.logits(drafted)
            assert (np.isfinite(found) == np.isfinite(wanted)).all()
            np.testing.assert_allclose(found[np.isfinite(found)], wanted[np.isfinite(wanted)], rtol=0, atol=2e-5)
            changed += int(found.argmax() != rows[place].argmax())
            best = int(found.argmax()) if generator.random() < likely else int(generator.integers(len(found)))
            drafted.append(best if ids is None else int(ids[best]))
        again = correction.logits(drafted[:2]).copy()  # places may be looked at again
        np.testing.assert_array_equal(again, correction.logits(drafted[:2]))
    assert changed > count  # the tables matter


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        ("z-lab 2", "blocks of 8 and a selector over 16 tokens"),
        ("rnn", "blocks of 7 and a markov over 320 tokens"),
        ("speculators spark", f"blocks of 5 and a markov over {len(IDS)} tokens"),
    ],
)  # what is read, see above
def test_a_bundle_drafts_what_the_published_equations_draft(dialect, said, target, target_folder, tmp_path):
    spec = DIALECTS[dialect](tmp_path / "head", target)
    bundle = build(target_folder, tmp_path, check=False)
    manifest = load_manifest(bundle)
    assert said in "\n".join(describe(manifest))
    with opened(bundle, max_num_batched_tokens=4) as engine:
        for _ in range(2):  # the second time, rows keep what the first ones read
            longest = check_drafts_of(engine, partial(draft, spec, target), 8, manifest.vocabulary.size)
            assert longest == spec.block.block_size - (not spec.from_anchor)


@pytest.mark.whole
@pytest.mark.bundle
def test_a_draft_ends_by_the_heads_own_confidence(target: Any, target_folder: Path, tmp_path: Path) -> None:
    """It ends with the first token of whose place the head is not sure, and that token is kept."""
    spec, count = DIALECTS["deepspec"](tmp_path / "head", target), 20
    watch, lengths = Watch(), set()
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    options = {"drafter": "head", "num_speculative_tokens": 6}
    with opened(build(target_folder, tmp_path, check=False)) as engine:
        engine.add_observer(watch)
        engine.generate(PROMPTS, params, draft_exit=DraftExitParams(gamma=0.5, epsilon=0.0), **options)
    for before, drafted in watch.rounds:
        with torch.no_grad():
            walk, sure = Walk(spec, target_context(spec, target, before), before[-1], 6), []
            for token in [before[-1], *drafted][: len(drafted)]:
                sure.append(walk.confidence(token))
                walk(token)
        assert all(each >= 0.5 for each in sure[:-1])
        begun = max(len(prompt) for prompt in PROMPTS if before[: len(prompt)] == list(prompt))
        if drafted and len(before) - begun < count - 7:  # what the round has room for ends others
            assert sure[-1] < 0.5 or len(drafted) == 6
        lengths.add(len(drafted))
    assert len(lengths) > 2


KNOWN = 259
"""Ids of the tokenizer: no other is drafted."""


def knowing(folder: Path, *, roll: int = 0, noisy_mask: bool = False, **changes: Any) -> Any:
    """A target whose token depends on the newest one alone, and a head whose tables know on which; gives the target.

    ``roll`` moves the rows of the table of tokens in front; ``noisy_mask`` makes the mask's places sure of one token.
    """
    from safetensors.torch import load_file, save_file

    target = make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    generator = torch.Generator().manual_seed(8)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    embedding = embedding / embedding.norm(dim=1, keepdim=True)
    follows = torch.randperm(KNOWN, generator=generator)
    head = torch.zeros(VOCAB, HIDDEN)
    head[follows] = embedding[:KNOWN]
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.norm.weight.fill_(1.0)
        target.get_input_embeddings().weight.copy_(embedding)
        target.get_output_embeddings().weight.copy_(head)
    deepspec(folder, target, markov_rank=HIDDEN, confidence_head_with_markov=False, **changes)
    path = folder / "model.safetensors"
    own = load_file(path)
    own |= {name: torch.zeros_like(own[name]) for name in own if "o_proj" in name or "down_proj" in name}
    own["norm.weight"] = torch.ones(HIDDEN)
    own["markov_head.markov_w1.weight"] = (embedding.roll(roll, 0) * 60.0).contiguous()
    own |= {"markov_head.markov_w2.weight": head.clone(), "confidence_head.proj.weight": torch.zeros(1, HIDDEN)}
    blank = torch.ones(VOCAB, HIDDEN)
    blank[:, 0] = 0.0
    own |= {"embed_tokens.weight": blank, "lm_head.weight": head * 0.01}
    if noisy_mask:
        own["embed_tokens.weight"][MASK] = torch.eye(HIDDEN)[0]
        own["lm_head.weight"][5] = torch.eye(HIDDEN)[0] * 100
    save_file(own, path)
    return target


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_that_are_right_are_accepted_to_the_last(temperature: float, tmp_path: Path) -> None:
    target = knowing(tmp_path / "head")
    bundle = build(save_checkpoint(target, tmp_path / "target"), tmp_path, check=True)
    assert load_manifest(bundle).models["head"].draft_head.guessed == 1.0
    params = SamplingParams(
        max_tokens=25, ignore_eos=True, temperature=temperature, top_k=20 if temperature else 0, seed=4
    )
    with opened(bundle, 2) as engine:
        results = engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=6)
    drafted, accepted = (sum(getattr(result.stats, name) for result in results) for name in ("drafted", "accepted"))
    assert drafted > 0
    assert accepted == drafted if not temperature else accepted > 0.3 * drafted


@pytest.mark.whole
def test_the_probe_refuses_tables_that_are_read_wrongly(tmp_path: Path) -> None:
    pieces = [np.random.default_rng(1).integers(0, KNOWN, 40)]
    right = knowing(tmp_path / "right")
    probe = probe_head(right, load(tmp_path / "right", right), pieces, LAYERS)
    check_probe(probe, "h")
    assert (probe.reading.change, probe.rates[""]) == ("", (1.0, 1.0))
    wrong = knowing(tmp_path / "wrong", roll=1)
    probe = probe_head(wrong, load(tmp_path / "wrong", wrong), pieces, LAYERS)
    assert max(max(rates) for rates in probe.rates.values()) < 0.05
    with pytest.raises(CheckpointError, match="was made for another target"):
        check_probe(probe, "h")


@pytest.mark.whole
def test_the_probe_finds_which_place_guesses_first(tmp_path: Path) -> None:
    target = knowing(tmp_path, noisy_mask=True, sample_from_anchor=False)
    pieces = [np.random.default_rng(1).integers(0, KNOWN, 40)]
    probe = probe_head(target, load(tmp_path, target), pieces, LAYERS)
    assert (probe.reading.change, probe.rate) == ("from_anchor true", 1.0)
    assert max(probe.rates[""]) < 0.05


def test_readings_and_defaults(target: Any, tmp_path: Path) -> None:
    zlab2(tmp_path / "a", target)
    config = config_of(tmp_path / "a")[1]
    assert "from_anchor" not in str([reading.change for reading in dflash2.KIND.readings(config, LAYERS)])
    deepspec(tmp_path / "b", target)
    config = config_of(tmp_path / "b")[1]
    assert dspark.KIND.readings(config, LAYERS)[-1].change == "from_anchor false"
    DIALECTS["speculators spark"](tmp_path / "c", target)
    assert not config_of(tmp_path / "c")[1].from_anchor


def test_backends_without_a_form_of_it_refuse_it(target: Any, target_folder: Path, tmp_path: Path) -> None:
    zlab2(tmp_path / "head", target)
    with pytest.raises(
        UnsupportedModelError, match="is a head of kind dflash2: backend ort-cuda runs no dflash2 heads"
    ):
        build(target_folder, tmp_path, check=False, backend="ort-cuda")
