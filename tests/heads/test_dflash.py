"""DFlash heads, made on the spot: what our engines draft is what the published equations draft."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.heads import dflash
from specexport.heads.dflash import KIND, block_states
from specexport.heads.kinds import trace_head
from specexport.heads.loaded import TargetTables
from specexport.heads.probe import check_probe, probe_head
from specexport.inspect import describe
from specexport.passes.quantize_ort_cpu import is_lookup
from specexport.trace.layers import record_taps
from specexport.verify.logit_tree import HeadTree
from specexport_runtime import SamplingParams
from specexport_runtime.abi import OP_NAME
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models.head_bundles import build, opened
from tests.support.models.loading import config_of, load, load_head
from tests.support.models.tiny_dflash import DIALECTS, MASK, zlab
from tests.support.models.tiny_heads import HIDDEN, LAYERS, VOCAB, edit
from tests.support.models.tiny_models import make_llama, save_checkpoint
from tests.support.references.drafted import PROMPTS, check_drafts
from tests.support.references.reference_dflash import context_of, draft, forward


@pytest.mark.one_of_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_computes_the_published_equations(dialect: str, target: Any, tmp_path: Path) -> None:
    spec = DIALECTS[dialect](tmp_path, target)
    loaded = load(tmp_path, target)
    config = loaded.config
    assert (config.taps, config.block_size) == (spec.taps, spec.block_size)
    assert (config.mask_token_id, config.shape) == (spec.mask, tuple(spec.causal))
    states = [torch.randn(9, HIDDEN) for _ in spec.taps]
    context = loaded.projection(states)
    torch.testing.assert_close(context, context_of(spec, states), rtol=0, atol=1e-5)
    blocks = torch.tensor([[5, MASK, MASK], [7, MASK, MASK], [200, 9, 8]])
    starts = torch.tensor([9, 4, 1])  # blocks after a part of the context see no more than it
    found = block_states(loaded.head, context, starts, blocks)
    for start, block, state in zip(starts.tolist(), blocks, found, strict=True):
        wanted_logits, wanted = forward(spec, context[:start], block.tolist())
        torch.testing.assert_close(state, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded.head.read(state)[0], wanted_logits, rtol=0, atol=1e-5)
    assert (None if loaded.ids is None else loaded.ids.tolist()) == spec.ids


@pytest.mark.whole
def test_a_trace_says_which_layers_look_ahead_and_keeps_its_lookup(target: Any, tmp_path: Path) -> None:
    spec = DIALECTS["sliding"](tmp_path, target)
    nodes = list(trace_head(load(tmp_path, target).head).ir_model.graph)
    attention = [node.attributes for node in nodes if node.op_type == OP_NAME]
    assert [bool(found["causal"].as_int()) for found in attention] == list(spec.causal)
    assert [found["window"].as_int() for found in attention] == [6, 6, -1]
    assert sum(map(is_lookup, nodes)) == 1  # so that its table is quantized like any other


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("dialect", ["z-lab", "sliding"])  # what is read, see above
def test_a_bundle_drafts_what_the_published_equations_draft(dialect, target, target_folder, tmp_path):
    spec = DIALECTS[dialect](tmp_path / "head", target)
    bundle = build(target_folder, tmp_path, check=False)
    manifest = load_manifest(bundle)
    assert manifest.models["head"].draft_head.block_size == spec.block_size
    assert f"draft head: dflash with blocks of {spec.block_size}" in "\n".join(describe(manifest))
    longest = check_drafts(bundle, partial(draft, spec, target), lookahead=4, max_num_batched_tokens=4)  # in pieces
    assert longest == min(4, spec.block_size - 1)
    with opened(bundle, 1) as engine:  # a tree drafts as the drafter does
        tree = HeadTree(engine.target, engine.head, PROMPTS[2], mask=engine.mask, places=3)
        rows = [int(tree(path).argmax()) for path in ((), (1,), (5, 6))]
        assert rows == draft(spec, target, PROMPTS[2], 3, VOCAB)
        assert np.array_equal(tree((9, 9)), tree((5, 6)))


@pytest.mark.whole
def test_only_the_block_goes_through_what_comes_behind_attention(target: Any, tmp_path: Path) -> None:
    zlab(tmp_path, target)
    head, seen = load(tmp_path, target).head, []
    for layer in head.body.layers:
        layer.mlp.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, result: seen.append(result.shape[1]))
    features = torch.randn(9, HIDDEN)
    block_states(head, features, torch.tensor([9]), torch.tensor([[5, MASK, MASK, MASK]]))
    assert seen == [4] * 2 * len(head.body.layers)


@pytest.mark.whole
@pytest.mark.bundle
def test_drafts_that_are_right_are_accepted_to_the_last(tmp_path: Path) -> None:
    """A target that writes one token whatever it reads, and a head that shares its tables."""
    target = make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    with torch.no_grad():
        target.get_input_embeddings().weight[:, 0] = 60.0
        target.get_output_embeddings().weight[7] = torch.eye(HIDDEN)[0] * 40
    folder = save_checkpoint(target, tmp_path / "target")
    zlab(tmp_path / "head", target)
    bundle = build(folder, tmp_path, check=False, quantize="int8")
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    with opened(bundle, 2) as engine:
        for result in engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=5):
            assert list(result.token_ids) == [7] * 25
            assert result.stats.accepted == result.stats.drafted > 0


@pytest.mark.whole
def test_the_probe_takes_the_hidden_states_that_are_meant(target: Any, tmp_path: Path) -> None:
    zlab(tmp_path, target)
    loaded = load(tmp_path, target)
    changes = [reading.change for reading in KIND.readings(loaded.config, LAYERS)]
    assert changes == [
        "", "hidden states [0, 2, 4] in the place of [1, 3, 5]", "hidden states [2, 4, 6] in the place of [1, 3, 5]",
        "hidden states in the order [5, 3, 1]",
    ]  # fmt: skip
    pieces = [np.array([5, 9, 200, 17, 8, 3, 77, 250, 12, 13, 14, 15]), np.array([9, 8, 7, 6, 100, 101])]
    for right in ((1, 3, 5), (2, 4, 6), (5, 3, 1), None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dflash, "first_guesses", oracle(target, loaded, right))
            probe = probe_head(target, loaded, pieces, LAYERS)
        if right is None:
            with pytest.raises(CheckpointError, match="was made for another target"):
                check_probe(probe, "h")
        else:
            check_probe(probe, "h")
            assert (probe.reading.config.taps, probe.rate) == (right, 1.0)


def oracle(target: Any, loaded: Any, right: tuple[int, ...] | None) -> Any:
    """Guesses what the target says where the features are of the right hidden states, and nothing elsewhere."""

    def guess(_: Any, tokens: Any, features: Any, *, step: int, rows: int) -> Any:
        assert rows == 5
        taps = right or (0,)
        with record_taps(target, taps) as states:
            logits = target(tokens[None]).logits[0, 1::step]
        if right is not None:
            wanted = loaded.projection([states[tap][0, :-1] for tap in taps])
            if torch.allclose(wanted, features, atol=1e-5):
                return logits
        return torch.zeros_like(logits)

    return guess


def test_causal_blocks_and_windows_are_read_as_their_writers_mean_them(target: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    DIALECTS["sliding"](folder, target)
    for change, wanted in (
        ({"is_causal": True}, (True, True, True)),
        ({"is_causal": False}, (False, False, False)),
        ({"is_causal": None, "sliding_window_non_causal": True}, (False, False, False)),
        ({"sliding_window_non_causal": False}, (True, True, False)),
    ):
        edit(folder, **change)
        assert config_of(folder)[1].shape == wanted
    windows = [layer.self_attn.sliding_window for layer in load(folder, target).head.body.layers]
    assert windows == [6, 6, None]
    edit(folder, use_sliding_window=False)  # what transformers makes of it, and so what z-lab trained
    assert [layer.self_attn.sliding_window for layer in load(folder, target).head.body.layers] == [None] * 3
    edit(folder, use_sliding_window=True, layer_types=None)
    with pytest.raises(UnsupportedModelError, match="no layer_types that say"):
        config_of(folder)


def test_a_head_of_another_width_needs_tables_of_its_own(target: Any, tmp_path: Path) -> None:
    zlab(tmp_path, target)
    files, config = config_of(tmp_path)
    tables = TargetTables(torch.zeros(VOCAB, 32), torch.zeros(VOCAB, 32))
    with pytest.raises(CheckpointError, match="it has 32 values a token, and the head 64"):
        load_head(files, config, tables)
