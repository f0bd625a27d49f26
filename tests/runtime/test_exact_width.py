"""Steps leave each token on the side of every border where plain decoding has it."""

from dataclasses import replace
from pathlib import Path

import pytest

from specexport_runtime.abi import LayerGeometry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.decoding.decoder import Decoder
from specexport_runtime.drafters.chain import ChainDrafter
from specexport_runtime.errors import IncompatibleError
from specexport_runtime.executors import ort_graph
from specexport_runtime.executors.exact_width import chunk_bounds, least_first_chunk, room_within, sum_borders
from specexport_runtime.executors.fake import FakeExecutor
from specexport_runtime.packing.batch import ModelRunner
from specexport_runtime.sampling.params import SamplingParams
from specexport_runtime.sequences.sequence import Sequence

BORDERS = (16, 32, 64)
LONG_HEADS = (LayerGeometry(1, 256, 256),)


def entries_seen_plainly(position: int, prompt: int) -> int:
    """Entries that plain decoding's step sees when it reads the token at ``position``: itself twice, or the prompt."""
    return prompt if position < prompt else position + 2


def side(entries: int, borders: tuple[int, ...]) -> int:
    """Borders below a number of entries."""
    return sum(entries > border for border in borders)


@pytest.mark.parametrize("borders", [BORDERS[-1:], BORDERS[-2:], BORDERS])
@pytest.mark.parametrize("prompt", range(1, 70, 3))
def test_every_token_stays_on_its_side_of_every_border(prompt: int, borders: tuple[int, ...]) -> None:
    for length in range(prompt, 72):
        reads_prompt = length == prompt
        first = 0 if reads_prompt else length - 1
        most = room_within(borders, length, reads_prompt=reads_prompt)
        for drafts in range(9):
            # What the step sees; one token of its own runs twice.
            seen = length + drafts + (not reads_prompt and not drafts)
            plain = {side(entries_seen_plainly(at, prompt), borders) for at in range(first, seen)}
            exact = drafts == 0 or plain == {side(seen, borders)}
            assert exact == (most is None or drafts <= most), (length, drafts)


@pytest.mark.parametrize("borders", [BORDERS[-1:], BORDERS[-2:], BORDERS])
@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 65, 70])
def test_what_is_read_again_stays_on_its_side_of_every_border(prompt: int, borders: tuple[int, ...]) -> None:
    """However it is cut within the bounds; and a prompt that is read for the first time too."""
    for end in range(prompt, 72):
        # What a kept text has is gone on from anywhere but before the last token of a prompt that ends on a border.
        for start in range(end):
            if start == prompt - 1 > 0 and prompt in borders:
                continue
            least, most = chunk_bounds(borders, prompt, start, end)
            assert 1 <= least <= most <= end - start
            for count in range(least, most + 1):
                seen = start + count + (count == 1)
                plain = {side(entries_seen_plainly(at, prompt), borders) for at in range(start, start + count)}
                assert plain == {side(seen, borders)}, (start, count, end)
    assert chunk_bounds((), prompt, 0, 80) == (1, 80)


def test_only_quantized_models_with_long_heads_have_borders(demo_bundle: Path) -> None:
    entry = load_manifest(demo_bundle).models["target"]
    assert sum_borders(replace(entry, quantize="int8", layers=LONG_HEADS)) == (64,)
    mixed = (*LONG_HEADS, LayerGeometry(1, 512, 512))
    assert sum_borders(replace(entry, quantize="int8", layers=mixed)) == (32, 64)
    assert sum_borders(replace(entry, quantize="int8", layers=(LayerGeometry(1, 640, 640),))) == (16, 32, 64)
    assert sum_borders(replace(entry, quantize="int8", layers=(LayerGeometry(1, 128, 128),))) == ()
    assert sum_borders(replace(entry, quantize="int8", layers=LONG_HEADS, kv_dtype="int8")) == ()
    assert sum_borders(replace(entry, layers=LONG_HEADS)) == ()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_models_with_borders_do_without_flash_attention(
    quantize: str | None, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = {}

    class Session:
        def get_inputs(self) -> list[object]:
            return []

    def note(*_args: object, **options: object) -> Session:
        opened.update(options)
        return Session()

    monkeypatch.setattr(ort_graph, "open_session", note)
    entry = replace(load_manifest(demo_bundle).models["target"], quantize=quantize, layers=LONG_HEADS)
    with pytest.raises(IncompatibleError):  # a session without inputs
        ort_graph.open_graph(demo_bundle, entry, (), num_threads=1, spin=False, engine_hash=None)
    assert opened["flash"] == (quantize is None)


def test_the_decoder_keeps_drafts_within_the_border() -> None:
    target = FakeExecutor(vocab_size=12, num_rows=1, kv_capacity=100)
    target.sum_borders = (64,)
    decoder = Decoder(ModelRunner(target), ChainDrafter())
    seq = Sequence(0, [1] * 60, SamplingParams(max_tokens=30), vocab_size=12, max_model_len=95)
    assert decoder._room(seq) == 3
    seq.commit([1])
    assert decoder._room(seq) == 2
    seq.commit([1, 1])
    assert decoder._room(seq) == 0
    seq.commit([1])
    assert decoder._room(seq) == seq.room_for_drafts > 8


def test_the_decoder_cuts_no_prompt_at_a_border() -> None:
    assert least_first_chunk(()) == 1
    target = FakeExecutor(vocab_size=12, num_rows=4, kv_capacity=200)
    target.sum_borders = (64,)
    decoder = Decoder(ModelRunner(target), ChainDrafter(), max_num_batched_tokens=100)
    params = SamplingParams(max_tokens=9)
    for index, length in enumerate((90, 40, 120)):
        decoder.add(Sequence(index, [1] * length, params, vocab_size=12, max_model_len=195))
    seen = []
    for _ in range(3):
        decoder.step()
        seen.append([decoder.target.kv.kv_len(row) for row in range(3)])
    # The first step has room for ten more tokens, the second for 59.
    assert seen == [[90, 0, 0], [91, 40, 0], [92, 41, 98]]
