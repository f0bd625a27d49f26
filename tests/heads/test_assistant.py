"""Gemma-4 assistants: what ours draft is what transformers' own code drafts, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.checkpoint.source import resolve_source
from specexport.compile.pipeline import build_bundle
from specexport.heads import assistant
from specexport.heads.assistant import LentCache, lent_caches
from specexport.heads.assistant_gguf import is_assistant
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import open_head, read_config
from specexport.heads.loaded import TargetTables
from specexport.inspect import describe
from specexport.recipe import BuildRecipe
from specexport_runtime import SamplingParams
from specexport_runtime.abi import AFTER_NORM, LayerGeometry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.models import tiny_assistants
from tests.support.models.head_bundles import opened
from tests.support.models.loading import load_head, tables_of
from tests.support.models.tiny_assistants import (
    HIDDEN,
    LAYERS,
    ONE_KEY,
    ORDERED,
    OWN,
    SHARED,
    VOCAB,
    WINDOW,
    make_assistant,
    make_target,
    save_assistant,
    save_target,
)
from tests.support.models.tiny_gguf_gemma import gemma_file
from tests.support.models.tiny_models import make_llama
from tests.support.references.drafted import PROMPTS, check_drafts, check_text

FEW = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared-keys": (SHARED, {}),
    "ordered": (FEW | ONE_KEY, ORDERED | {"text": ONE_KEY}),
    "unified": (FEW | ONE_KEY | {"unified": True}, {"unified": True, "text": ONE_KEY}),
}
"""Name to (what the target has otherwise, and the assistant)."""
READS = (1, 2)
"""Layers of the target that are read. After them, layers of the first share their keys; the others have none, so that
they are exported in half the time."""


def build(target: Path, head: Path, output: Path, **settings: Any) -> Path:
    build_bundle(BuildRecipe(target=str(target), head=str(head), output=str(output), max_model_len=64, **settings))
    return output


@pytest.mark.whole
@pytest.mark.bundle
@pytest.mark.parametrize("pair", PAIRS)
def test_a_bundle_drafts_what_transformers_drafts(pair: str, tmp_path: Path) -> None:
    of_target, of_assistant = PAIRS[pair]
    target, assistant = make_target(**of_target), make_assistant(**of_assistant)
    folders = save_target(target, tmp_path / "target"), save_assistant(assistant, tmp_path / "head")
    bundle = build(*folders, tmp_path / "b", check=False)
    entry = load_manifest(bundle).models["head"]
    assert (entry.attention.target_layers, entry.draft_head.taps, entry.draft_head.guessed) == (
        READS,
        (AFTER_NORM,),
        None,
    )
    drafts = []

    def wanted(before: list[int], count: int, _: int) -> list[int]:
        drafts.append((len(before), count))
        return tiny_assistants.draft(target, assistant, before, count)

    check_drafts(bundle, wanted, lookahead=4)
    if pair == "ordered":  # prompts in pieces
        check_drafts(bundle, wanted, lookahead=3, max_num_batched_tokens=4)
    lengths = {length for length, _ in drafts}
    assert min(lengths) < WINDOW < 2 * WINDOW < max(lengths)


@pytest.mark.parametrize("text", [{}, ONE_KEY])
def test_an_assistant_of_a_gguf_file_is_that_of_the_folder(text: dict[str, Any], tmp_path: Path) -> None:
    target, assistant = make_target(**text), make_assistant(text=text)
    file = resolve_source(str(gemma_file(tmp_path / "a.gguf", assistant)), None)
    folder = resolve_source(str(save_assistant(assistant, tmp_path / "head")), None)
    assert is_assistant(file)
    assert not is_assistant(folder)
    facts = TargetFacts(LAYERS, HIDDEN, VOCAB, target.config)
    configs = [(files, read_config(files, facts)) for files in map(open_head, (file, folder))]
    found, wanted = (load_head(files, config, tables_of(target)) for files, config in configs)
    assert (found.config.shape, found.config.taps) == (wanted.config.shape, wanted.config.taps)
    assert found.config.target_layers == wanted.config.target_layers
    own, state = found.head.state_dict(), wanted.head.state_dict()
    assert own.keys() == state.keys()
    assert [name for name, value in state.items() if not torch.equal(own[name], value)] == []
    for key in ("layer_types", "sliding_window", "rope_parameters", "hidden_activation"):
        assert getattr(found.head.body.config, key) == getattr(wanted.head.body.config, key)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.sliding_window_pattern": 3}, r"a.gguf: its settings cannot be read \(TypeError"),
        ({"embedding_length_out": None}, "does not say gemma4-assistant.embedding_length_out"),
        ({"embedding_length_out": HIDDEN + 8}, "reads hidden states of 72 values, and the target's have 64"),
        ({"attention.key_length_swa": 24}, "its layer 0 reads 2 heads of 24 values"),
        ({"rope.scaling.type": "yarn"}, "gemma4-assistant with positions scaled by yarn are not read"),
    ],
)
def test_an_odd_gguf_file_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, facts = gemma_file(tmp_path / "a.gguf", make_assistant(), changed=changed), make_target().config

    def read() -> None:
        read_config(open_head(resolve_source(str(path), None)), TargetFacts(LAYERS, HIDDEN, VOCAB, facts))

    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        read()
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("pair")
    return save_target(make_target(**SHARED), place / "target"), save_assistant(make_assistant(), place / "head")


@pytest.mark.whole
@pytest.mark.bundle
def test_drafting_changes_nothing_in_the_targets_cache(folders: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = build(*folders, tmp_path / "b", check=False)
    params, drafts = SamplingParams(max_tokens=8, ignore_eos=True), []
    with opened(bundle) as engine:
        head, target = engine.head, engine.target
        assert not any("cache" in output.name for output in head._graph.session.get_outputs())
        assert head._lent["k_cache.1"] is target._caches["k_cache.2"]
        assert head.kv_bytes == 0
        assert any(window > 0 for window in load_manifest(bundle).models["target"].attention.windows)
        assert not target.recedes  # the head would read what the target's own windows never see again
        execute = head.execute

        def watched(*given: Any) -> Any:
            before = {name: cache.copy() for name, cache in target._caches.items()}
            found = execute(*given)
            drafts.append(all(np.array_equal(cache, target._caches[name]) for name, cache in before.items()))
            return found

        head.execute = watched
        engine.generate(PROMPTS, params, drafter="head", num_speculative_tokens=3)
    assert len(drafts) > 10
    assert all(drafts)


def knowing_pair(place: Path) -> tuple[Path, Path]:
    """A target that follows one token by another, and an assistant that knows which, and hands nothing on."""
    target, assistant = make_target(tie_word_embeddings=False), make_assistant(text={"hidden_size": HIDDEN})
    state, own = target.state_dict(), assistant.state_dict()
    for name, value in [*state.items(), *own.items()]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        if name.endswith("layer_scalar"):
            value.fill_(1.0)
    own["pre_projection.weight"].copy_(torch.eye(HIDDEN, 2 * HIDDEN))
    own["model.norm.weight"].copy_(state["model.norm.weight"])
    rows = state["model.embed_tokens.weight"] * state["model.norm.weight"]
    behind = torch.zeros(VOCAB, HIDDEN)
    for token in range(3, VOCAB):
        behind[3 + token % (VOCAB - 3)] = rows[token]
    state["lm_head.weight"].copy_(behind)
    own["lm_head.weight"].copy_(behind)
    assistant.lm_head.weight = torch.nn.Parameter(behind)
    return save_target(target, place / "target"), save_assistant(assistant, place / "head")


@pytest.mark.whole
@pytest.mark.bundle
def test_an_assistant_that_knows_its_target_is_accepted(tmp_path: Path) -> None:
    bundle = build(*knowing_pair(tmp_path), tmp_path / "b")
    manifest = load_manifest(bundle)
    entry = manifest.models["head"]
    assert (entry.draft_head.guessed, entry.draft_head.reading) == (1.0, None)
    told = "\n".join(describe(manifest))
    assert "KV cache: none; it reads that of layers 4, 5 of the target" in told
    assert "keep a window" not in told
    assert "2 caches to read (1x 2 KV heads, key 16, value 16; 1x 2 KV heads, key 32, value 32)" in told
    assert "first guess right at 100% of a text" in told
    with opened(bundle) as engine:
        for stats in check_text(engine, PROMPTS, SamplingParams(max_tokens=21, ignore_eos=True), (1, 4, 8)):
            assert all(each.accepted == each.drafted > 0 for each in stats)


@pytest.mark.whole
@pytest.mark.bundle
def test_an_assistant_at_chance_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"guesses .* of this target's tokens"):
        build(*folders, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_int8_caches_and_other_backends_are_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="reads the target's KV caches, and these hold int8"):
        build(*folders, tmp_path / "b", quantize="int8", kv_cache_dtype="int8", check=False)

    with pytest.raises(UnsupportedModelError, match="backend ort-cuda runs no assistant heads"):
        build(*folders, tmp_path / "b", backend="ort-cuda")


LENT = {
    "sliding_attention": LentCache(1, LayerGeometry(2, 16, 16)),
    "full_attention": LentCache(2, LayerGeometry(2, 32, 32)),
}


def read(folder: Path, lent: Any = LENT, **changes: Any) -> Any:
    files = open_head(resolve_source(str(folder), None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assistant, "lent_caches", lambda _: lent)
        return files, read_config(files, TargetFacts(LAYERS, HIDDEN, VOCAB, text="the target's")._replace(**changes))


def load(folder: Path) -> Any:
    files, config = read(folder)
    table = torch.zeros(VOCAB, HIDDEN)
    return load_head(files, config, TargetTables(table, table))


def test_an_assistant_for_another_target_is_refused_by_what_differs(folders: tuple[Path, Path]) -> None:
    _, head = folders
    assert read(head)[1].target_layers == (1, 2)
    with pytest.raises(CheckpointError, match="reads hidden states of 64 values, and the target's have 128"):
        read(head, hidden_size=128)
    with pytest.raises(CheckpointError, match="for a vocabulary of 259 tokens, and the target has 4096"):
        read(head, vocab_size=4096)
    with pytest.raises(
        CheckpointError, match="layers of kind sliding_attention, and the target has no kinds of layers"
    ):
        read(head, lent={})
    with pytest.raises(
        CheckpointError, match=r"of kind sliding_attention, and the target has layers of full_attention"
    ):
        read(head, lent={"full_attention": LENT["full_attention"]})
    wide = LENT | {"full_attention": LentCache(5, LayerGeometry(2, 64, 64))}
    with pytest.raises(CheckpointError, match=r"its layer 2 reads 2 heads of 32 values, and layer 5 .* has 2 of 64"):
        read(head, lent=wide)
    few = LENT | {"sliding_attention": LentCache(4, LayerGeometry(1, 16, 16))}
    with pytest.raises(CheckpointError, match=r"its layer 0 reads 2 heads of 16 values, and layer 4 .* has 1 of 16"):
        read(head, lent=few)


def test_lent_caches_are_the_last_that_a_target_fills() -> None:
    assert lent_caches(make_target(**SHARED).config) == LENT
    unified = lent_caches(make_target(unified=True, **ONE_KEY).config.get_text_config())
    assert unified["full_attention"] == LentCache(5, LayerGeometry(1, 32, 32))
    assert unified["sliding_attention"] == LentCache(4, LayerGeometry(2, 16, 16))
    assert lent_caches(make_llama().config) == {}


def edited(folder: Path, place: Path, values: Any = None, *, text: Any = None, drop: str = "", **tensors: Any) -> Path:
    place.mkdir()
    config = json.loads((folder / "config.json").read_text()) | (values or {})
    config["text_config"] = config["text_config"] | (text or {})
    (place / "config.json").write_text(json.dumps(config))
    stored = {name: value for name, value in load_file(folder / "model.safetensors").items() if name != drop}
    save_file(stored | tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("values", "text", "error", "words"),
    [
        ({"backbone_hidden_size": "wide"}, {}, CheckpointError, "'wide' for backbone_hidden_size, no size"),
        ({}, {"num_hidden_layers": 0}, CheckpointError, "0 for num_hidden_layers, no size"),
        ({}, {"num_hidden_layers": 4}, CheckpointError, "3 layer_types for 4 layers"),
        ({}, {"head_dim": "sixteen"}, CheckpointError, "text_config cannot be read"),
        ({}, {"model_type": "gemma9_text"}, UnsupportedModelError, "no layers of 'gemma9_text'"),
        ({}, {"enable_moe_block": True}, UnsupportedModelError, "sets enable_moe_block to True"),
        ({}, {"hidden_size_per_layer_input": 8}, UnsupportedModelError, "sets hidden_size_per_layer_input to 8"),
        ({"use_ordered_embeddings": True, "num_centroids": 8}, {}, CheckpointError, "8 groups, of which 32 are chosen"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_by_its_key(values, text, error, words, folders, tmp_path):
    with pytest.raises(error, match=words):
        read(edited(folders[1], tmp_path / "a", values, text=text))


def test_what_is_missing_or_misshapen_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, head = folders
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, for example post_projection.weight"):
        load(edited(head, tmp_path / "a", drop="post_projection.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, for example layers.1.layer_scalar"):
        load(edited(head, tmp_path / "b", drop="model.layers.1.layer_scalar"))
    wide = {"pre_projection.weight": torch.zeros(OWN, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"pre_projection.weight is \[32, 64\], .* it would be \[32, 128\]"):
        load(edited(head, tmp_path / "c", **wide))
    place = edited(head, tmp_path / "d")
    (place / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(CheckpointError, match="has no text_config"):
        read(place)
    ordered = {"use_ordered_embeddings": True, "num_centroids": 37, "centroid_intermediate_top_k": 3}
    groups = {
        "masked_embedding.centroids.weight": torch.zeros(37, OWN),
        "masked_embedding.token_ordering": torch.zeros(VOCAB, dtype=torch.int64),
    }
    with pytest.raises(CheckpointError, match="token_ordering does not name each of 259 tokens once"):
        load(edited(head, tmp_path / "e", ordered, **groups))
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors, for example masked_embedding.centroids.weight"):
        load(edited(head, tmp_path / "f", ordered))


def test_an_assistant_is_known_by_its_configuration_not_by_its_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, head = folders
    assert read(edited(head, tmp_path / "llama-eagle3"))[1].kind == "assistant"
    assert read(edited(head, tmp_path / "a", {"model_type": "other"}))[1].kind == "assistant"  # by architectures
    other = edited(head, tmp_path / "b", {"model_type": "other", "architectures": ["SomethingElse"]})
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        read(other)
