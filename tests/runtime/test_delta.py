"""Files stored as their difference from another: what comes back is the file, or an error."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.backends.engine_delta import find_copies, store_as_delta
from specexport_runtime.bundle.delta import MAGIC, apply_delta, delta_size
from specexport_runtime.errors import BundleError
from tests.support.chance import examples

NOISE = np.random.default_rng(5).bytes(300_000)


def store(folder, base, whole):
    (folder / "base").write_bytes(base)
    (folder / "whole").write_bytes(whole)
    return store_as_delta(folder / "whole", folder / "base", folder / "delta"), folder / "delta", folder / "base"


@pytest.mark.parametrize(
    ("whole", "most"),
    [
        (NOISE, 100),
        (b"kernels" + NOISE[200_000:] + b"more" * 100 + NOISE[:200_000], 40_000),  # moved, and by odd distances
        (NOISE + NOISE, 20_000),
        (NOISE[:150_000] + bytes(50_000) + NOISE[150_000:], 70_000),
    ],
)
def test_what_both_files_hold_is_stored_once(tmp_path, whole, most):
    kept, delta, base = store(tmp_path, NOISE, whole)
    assert kept
    assert not (tmp_path / "whole").exists()
    assert delta.stat().st_size < most < len(whole)
    assert delta_size(delta) == len(whole)
    assert apply_delta(delta, base) == whole


@pytest.mark.parametrize("base", [b"", b"short", NOISE[::-1]])
def test_files_that_have_little_in_common_stay_whole(tmp_path, base):
    kept, delta, _ = store(tmp_path, base, NOISE)
    assert not kept
    assert (tmp_path / "whole").read_bytes() == NOISE
    assert not delta.exists()


@pytest.mark.fuzz
@examples(50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), max_size=8), st.binary(max_size=40))
def test_copies_are_what_they_say(tmp_path_factory, parts, extra):
    base = NOISE[:60_000] + bytes(10_000) + NOISE[60_000:80_000]
    whole = extra + b"".join(base[i * 9000 : i * 9000 + 100 * n] for i, n in parts)
    given_, wanted = (np.frombuffer(data, np.uint8) for data in (base, whole))
    end = 0
    for at, offset, length in find_copies(given_, wanted).tolist():
        assert at >= end
        assert whole[at : at + length] == base[offset : offset + length]
        end = at + length


def damaged(delta, kind):
    head, rest = delta[:32], delta[32:]
    base_size, size, count = struct.unpack("<3q", head[8:])
    if kind == "cut":
        return delta[:-1]
    if kind == "longer":
        return delta + b"x"
    if kind == "no head":
        return delta[:20]
    if kind == "another file":
        return b"ONNX" + delta[4:]
    if kind == "huge":
        return MAGIC + struct.pack("<3q", base_size, 1 << 60, count) + rest
    if kind == "more copies":
        return MAGIC + struct.pack("<3q", base_size, size, 1 << 40) + rest
    at, offset, length = struct.unpack("<3q", rest[:24])
    moved = {"behind the base": (at, base_size, length), "negative": (at, -1, length), "wider": (at, offset, 1 << 62)}
    return head + struct.pack("<3q", *moved[kind]) + rest[24:]


@pytest.mark.parametrize(
    "kind",
    ["cut", "longer", "no head", "another file", "huge", "more copies", "behind the base", "negative", "wider"],
)
def test_a_damaged_delta_is_refused_before_memory_is_taken(tmp_path, kind):
    _, delta, base = store(tmp_path, NOISE, b"k" * 9 + NOISE)
    delta.write_bytes(damaged(delta.read_bytes(), kind))
    with pytest.raises(BundleError, match="delta") as caught:
        apply_delta(delta, base)
    assert "build it again" in caught.value.hint


def test_another_base_is_refused(tmp_path):
    _, delta, base = store(tmp_path, NOISE, NOISE + b"k")
    base.write_bytes(NOISE[:-1])
    with pytest.raises(BundleError, match=r"made from 300000 bytes, and .*base has 299999"):
        apply_delta(delta, base)
