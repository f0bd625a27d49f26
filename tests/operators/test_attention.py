"""``UnpaddedAttention`` of the library of operators: what it computes, and that its bits know nothing of neighbours."""

import ctypes
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cases import chance
from tests.support.cases.attention_cases import Array, Case, Operator, draw, expected

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "runtime" / "operators" / "build.py"
ISAS = ("portable", "avx2", "avx512vnni")
ROWS = ((3, 5), (17, 1), (0, 3), (4, 0), (70, 12))
OPTIONS: dict[str, list[Any]] = {
    "group": [1, 3],
    "k_dim": [8, 20, 64, 72, 256],
    "v_dim": [0, 5, 80],  # 0: the same
    "window": [-1, 1, 9],
    "softcap": [0.0, 1.5],
    "sinks": [False, True],
    "slopes": [False, True],
    "rotary": ["", "half", "interleaved"],
    "form": ["", "packed", "shared", "whole", "padded"],
    "int8": [False, True],
}


def load(library: Path, folder: Path, isa: str) -> Path:
    """A copy of the library that runs one instruction set: it chooses when it is loaded, and stays loaded."""
    path = folder / f"{isa}{library.suffix}"
    shutil.copy(library, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXPORT_CPU_KERNELS", isa)
        loaded = ctypes.CDLL(str(path))
    loaded.specexport_kernels.restype = ctypes.c_char_p
    if loaded.specexport_kernels().decode() != isa:
        pytest.skip(f"no {isa} here")
    return path


@pytest.fixture(scope="module", params=ISAS)
def chosen(library: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return load(library, tmp_path_factory.mktemp("library"), request.param)


def make(options: dict[str, Any]) -> Case:
    """A case of some options; those that exclude each other are left out."""
    form, k_dim, int8 = options["form"], options["k_dim"], options["int8"]
    turned = "" if form in ("shared", "padded", "whole") else options["rotary"]
    return Case(
        rows=((5, 3), (70, 2), (4, 0), (600, 12)) if form == "shared" else ROWS,
        heads=2 * options["group"],
        k_dim=k_dim,
        v_dim=options["v_dim"] or k_dim,
        rotary=(turned, k_dim // 4 * 2),
        packed=form == "packed",
        appends=form != "shared",
        causal=int(form != "whole"),
        padded=form == "padded",
        int8=int8 and form != "padded",
        scale=k_dim**-0.5,
        **{name: options[name] for name in ("window", "softcap", "sinks", "slopes")},
    )


def pairwise() -> Iterator[Case]:
    """Cases in which each value of an option meets each value of every other one."""
    rng = np.random.default_rng(5)

    def pairs_of(options: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(options.items(), 2))

    names = list(OPTIONS)
    left = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]
    }  # fmt: skip
    while left:
        drawn = [{name: values[rng.integers(len(values))] for name, values in OPTIONS.items()} for _ in range(40)]
        best = max(drawn, key=lambda options: len(pairs_of(options) & left))
        if covered := pairs_of(best) & left:
            left -= covered
            yield make(best)


def assert_agrees(case: Case, chosen: Path, seed: int = 0) -> None:
    """Compare with the reference, copied and in place."""
    given = draw(case, seed)
    before = {name: array.copy() for name, array in given.items()}
    output, *caches = (wanted := expected(case, given))
    operator = Operator(case, given, chosen)
    found, *kept = operator.copied(given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])  # never written
    lens, counts = given["kv_lens"][:, 0], np.diff(given["cu_new_tokens"])
    np.testing.assert_allclose(found, output, rtol=2e-5, atol=2e-5, err_msg=str(case))
    for one, other in zip(kept, caches, strict=case.appends):
        for row, end in enumerate(lens + counts):
            new = one[row, ..., lens[row] : end, :], other[row, ..., lens[row] : end, :]
            np.testing.assert_allclose(*new, rtol=1e-6, atol=case.int8 or 1e-6)  # a code may round to its neighbour
    assert wanted[0].shape == found.shape
    np.testing.assert_array_equal(operator.in_place(given), found)
    for name, one in zip(("k_cache", "v_cache"), kept, strict=case.appends):
        np.testing.assert_array_equal(given[name], one)


def test_every_kind_agrees_with_the_reference(chosen: Path) -> None:
    for case in pairwise():
        assert_agrees(case, chosen)


@pytest.mark.parametrize(
    "case",
    [
        Case(((1500, 5), (511, 1), (512, 2), (0, 600), (63, 66)), heads=6, window=700),
        Case(((1100, 40),), heads=8, kv_heads=1, k_dim=128, v_dim=128, scale=0.1, sinks=True),
        Case(((2100, 3), (600, 7)), kv_heads=4, int8=True),
        Case(((0, 0), (1030, 4)), causal=0, k_dim=33, v_dim=33),
        Case(((1030, 4), (9, 4)), padded=True, window=600, slopes=True),
        Case(((700, 2),), heads=71, kv_heads=1, k_dim=64, v_dim=64),
    ],
    ids=lambda case: str(case.rows),
)
def test_long_rows_agree_with_the_reference(chosen: Path, case: Case) -> None:
    assert_agrees(case, chosen)


@pytest.mark.parametrize("change", [{"scale": 0.126}, {"window": 9}, {"softcap": 30.0}, {"causal": 0}], ids=str)
def test_the_comparison_finds_what_differs(
    library: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, right = Case(ROWS, scale=0.125), expected
    monkeypatch.setattr(sys.modules[__name__], "expected", lambda _, given: right(replace(case, **change), given))
    with pytest.raises(AssertionError, match="Case"):
        assert_agrees(case, library)


@pytest.mark.parametrize("rows", [(), ((3, 0), (0, 0))])
def test_a_step_without_tokens(library: Path, rows: tuple[tuple[int, int], ...]) -> None:
    given = draw(Case(rows))
    output, keys, _ = Operator(Case(rows), given, library).copied(given)
    assert output.shape == (0, 64)
    np.testing.assert_array_equal(keys, given["k_cache"])


@pytest.mark.fuzz
def test_drawn_steps_agree_with_the_reference(chosen: Path) -> None:
    rng = np.random.default_rng(chance.seed(3))
    for seed in range(chance.many(10)):
        options = {name: values[rng.integers(len(values))] for name, values in OPTIONS.items()}
        options |= {"k_dim": int(rng.integers(2, 140)), "v_dim": int(rng.integers(0, 140))}
        rows = tuple((int(rng.choice((0, 60, 530))) + int(past), int(new)) for past, new in rng.integers(0, 9, (4, 2)))
        case = make(options)
        assert_agrees(replace(case, rows=tuple((p + n * (not case.appends), n) for p, n in rows)), chosen, seed)


BITS = [
    Case(heads=6, k_dim=64, v_dim=64, scale=0.125, packed=True, rotary=("half", 64)),
    Case(heads=4, kv_heads=4, k_dim=20, v_dim=36, window=40, softcap=3.0, sinks=True, slopes=True),
    Case(heads=2, kv_heads=1, k_dim=128, v_dim=128, int8=True, rotary=("interleaved", 32)),
]


@pytest.mark.parametrize("case", BITS, ids=["packed", "everything", "int8"])
@pytest.mark.parametrize("past", [0, 55, 505])
def test_bits_know_no_width_batch_cut_or_thread(chosen: Path, case: Case, past: int) -> None:
    """One text of 24 tokens after ``past`` others, in steps of every kind."""
    text = draw(replace(case, rows=((past, 24),), capacity=past + 30), 1)
    tokens = ("q",) if case.packed else ("q", "k", "v")
    sessions: dict[tuple[int, int], Operator] = {}

    def run(widths: list[int], batch: int, threads: int) -> Array:
        """The outputs of the text as the row in the middle of ``batch``, cut into steps of ``widths``."""
        middle = batch // 2
        rng = np.random.default_rng(batch)
        caches = {
            name: np.concatenate(
                [text[name] if row == middle else text[name][..., ::-1].copy() for row in range(batch)]
            )
            for name in ("k_cache", "v_cache")
        }
        for cache in caches.values():
            cache[middle, ..., past:, :] = 77 if case.int8 else np.nan
            for row in set(range(batch)) - {middle}:
                cache[row] = np.nan_to_num(cache[row], nan=0.5)
        outputs, at = [], 0
        for width in widths:
            news = [int(rng.integers(0, 4)) for _ in range(batch)]
            news[middle] = width
            lens = [int(rng.integers(0, past + 1)) for _ in range(batch)]
            lens[middle] = past + at
            start = sum(news[:middle])
            given = {name: array for name, array in text.items() if name not in tokens} | caches
            for name in tokens:
                mixed = rng.standard_normal((sum(news), text[name].shape[1])).astype(np.float32)
                mixed[start : start + width] = text[name][at : at + width]
                given[name] = mixed
            given["kv_lens"] = np.array(lens, np.int32)[:, None]
            given["cu_new_tokens"] = np.cumsum([0, *news]).astype(np.int32)
            if (batch, threads) not in sessions:
                sessions[batch, threads] = Operator(case, given, chosen, threads)
            outputs.append(sessions[batch, threads].in_place(given)[start : start + width])
            at += width
        return np.concatenate(
            [*outputs, *(caches[n][middle, 0, :, past : past + 24].ravel() for n in caches)], axis=None
        )

    wanted = run([1] * 24, 1, 1)
    assert np.isfinite(wanted).all()
    for widths in ([24], [5, 5, 5, 5, 4], [16, 8], [2, 3, 7, 11, 1], [23, 1]):
        for batch, threads in ((1, 1), (1, 2), (3, 2), (8, 1)):
            np.testing.assert_array_equal(run(widths, batch, threads), wanted, err_msg=f"{widths} {batch} {threads}")


def test_bits_of_a_prompt_know_no_cut(chosen: Path) -> None:
    """Long enough that the whole prompt is computed in blocks, and its pieces in parts of rows."""
    case = Case(((0, 700),), heads=4, kv_heads=2, k_dim=32, v_dim=32, window=600, scale=0.2)
    text = draw(case, 2)
    whole = Operator(case, text, chosen, 2).copied(text)
    for width in (1, 97, 300):
        given = {name: array.copy() for name, array in text.items()}
        operator, outputs = Operator(case, given, chosen, 2), []
        for at in range(0 if width > 1 else 690, 700, width):
            cut = {name: text[name][at : at + width] for name in "qkv"}
            sizes = {"kv_lens": [[at]], "cu_new_tokens": [0, len(cut["q"])]}
            step = given | cut | {name: np.array(size, np.int32) for name, size in sizes.items()}
            if width == 1:
                step |= {"k_cache": whole[1], "v_cache": whole[2]}
            outputs.append(operator.in_place(step))
        np.testing.assert_array_equal(np.concatenate(outputs), whole[0][-sum(map(len, outputs)) :])


def test_what_a_token_may_not_see_is_not_read(chosen: Path) -> None:
    """Entries that a window has left behind, and one token of NaN among others."""
    case = Case(((300, 5), (20, 2)), heads=6, window=50)
    given = draw(case)
    operator = Operator(case, given, chosen)
    wanted = operator.copied(given)[0]
    for name in ("k_cache", "v_cache"):
        given[name][0, ..., :251, :] = np.nan
        given[name][1, ..., 22:, :] = np.inf
    np.testing.assert_array_equal(operator.copied(given)[0], wanted)
    given["v"][3] = np.nan
    found = operator.copied(given)[0]
    np.testing.assert_array_equal(found[[0, 1, 2, 5, 6]], wanted[[0, 1, 2, 5, 6]])
    assert np.isnan(found[3:5]).all()
    given["q"][6] = np.nan
    assert np.isnan(operator.copied(given)[0][6]).all()


TREES = {
    "chain": [1, 1, 1, 1, 1, 1],
    "siblings after a chain": [1, 1, 1, 2, 1, 4, 5, 6],
    "twigs": [1, 1, 1, 2, 1, 4, 1, 7, 8, 1, 1, 9],
    "roots": [1, 2, 3, 1],
}
"""Of each token, how far before it its parent stands."""


def path_of(parents: list[int], token: int) -> list[int]:
    """The tokens of a row up to one."""
    return [*(path_of(parents, token - parents[token]) if token >= parents[token] else []), token]


@pytest.mark.parametrize("past", [0, 3, 61, 508])
@pytest.mark.parametrize("case", BITS, ids=["packed", "everything", "int8"])
def test_a_branch_has_the_bits_of_its_text(chosen: Path, case: Case, past: int) -> None:
    """Each token of a tree, beside other rows, against the same tokens as a chain in a step of their own."""
    tokens, window = ("q",) if case.packed else ("q", "k", "v"), case.window if past else min(case.window, 3)
    case = replace(case, window=window)
    trees = list(TREES.values())
    sizes = [len(tree) for tree in trees]
    given = draw(replace(case, rows=tuple((past, size) for size in sizes), capacity=past + 16), 3)
    given["parents"] = np.concatenate([np.array(tree, np.int64) for tree in trees])
    caches = {name: given[name].copy() for name in ("k_cache", "v_cache")}
    found = Operator(case, given, chosen, 2).in_place(given)
    alone = {name: given[name] for name in given if name not in (*tokens, *caches, "parents")}
    for row, (tree, start) in enumerate(zip(trees, np.cumsum([0, *sizes]), strict=False)):
        for token in range(len(tree)):
            path = path_of(tree, token)
            text = alone | {name: given[name][start + np.array(path)] for name in tokens}
            text |= {name: cache[row : row + 1].copy() for name, cache in caches.items()}
            text |= {"kv_lens": np.array([[past]], np.int32), "cu_new_tokens": np.array([0, len(path)], np.int32)}
            wanted = Operator(case, text, chosen).in_place(text)
            np.testing.assert_array_equal(found[start + token], wanted[-1], err_msg=f"{tree} {path}")
            for name in caches:  # what a path keeps, when it is moved together, is what a chain would have left
                kept = given[name][row, ..., past + np.array(path), :]
                np.testing.assert_array_equal(kept, text[name][0, ..., past + np.arange(len(path)), :])


def _set(name: str, value: Any) -> Any:
    return lambda given: given.update({name: np.asarray(value, given[name].dtype)})


def _drop(name: str) -> Any:
    return lambda given: given.pop(name)


def _cut(name: str) -> Any:
    return lambda given: given.update({name: given[name][..., :-1].copy()})


BAD = {
    "row beyond its cache": (Case(), _set("kv_lens", [[3], [17], [0], [80]]), "do not fit its cache"),
    "negative length": (Case(), _set("kv_lens", [[3], [-1], [0], [70]]), "length is not that of a cache row"),
    "counts": (Case(), _set("cu_new_tokens", [0, 5, 6, 9, 20]), "are not those of the step"),
    "falling counts": (Case(), _set("cu_new_tokens", [0, 5, 4, 9, 21]), "fewer than no new tokens"),
    "rows": (Case(), _set("kv_lens", [[3], [17]]), "do not fit the caches' rows"),
    "queries": (Case(), _cut("q"), "not as wide"),
    "keys": (Case(), _cut("k"), "do not fit the queries and caches"),
    "values alone": (Case(), _drop("k"), "given both"),
    "caches": (Case(), lambda given: given.update(k_cache=given["k_cache"][:, :, :1].copy()), "shapes do not fit"),
    "rank": (Case(), lambda given: given.update(k_cache=given["k_cache"][:, 0].copy()), "caches are"),
    "table": (
        Case(rotary=("half", 16)),
        lambda given: given.update({name: given[name][:80] for name in ("cos_table", "sin_table")}),
        "beyond the rotary tables",
    ),
    "wide table": (Case(rotary=("half", 18)), lambda given: None, "at most half a head"),
    "no table": (Case(rotary=("half", 16)), _drop("sin_table"), "tables of cosines"),
    "scales": (Case(int8=True), _cut("k_scale"), "a scale for each channel"),
    "no scales": (Case(int8=True), _drop("v_scale"), "a scale for each channel"),
    "sinks": (Case(sinks=True), _cut("sinks"), "one a head"),
    "parents": (
        Case(((3, 4),)),
        lambda given: given.update(parents=np.array([1, 1, 4, 1])),
        "parent is no token before it",
    ),
    "a token as its parent": (Case(((3, 2),)), lambda given: given.update(parents=np.array([1, 0])), "no token before"),
    "parents of padding": (
        Case(padded=True),
        lambda given: given.update(parents=np.ones(21, np.int64)),
        "come with their keys",
    ),
    "positions": (Case(padded=True), _drop("positions"), "go together"),
    "few positions": (
        Case(padded=True),
        lambda given: given.update(kv_positions=given["kv_positions"][..., :50].copy()),
        "entries without positions",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_an_error_in_one_line(library: Path, name: str) -> None:
    case, spoil, message = BAD[name]
    given = draw(case)
    spoil(given)
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        Operator(case, given, library).copied(given)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(("change", "message"), [({"rotary": ("full", 8)}, "rotary is"), ({"heads": 5}, "no multiple")])
def test_a_bad_attribute_is_refused_at_load(library: Path, change: dict[str, Any], message: str) -> None:
    case = replace(Case(), **change)
    with pytest.raises(Exception, match=message):
        Operator(case, draw(Case()), library)
