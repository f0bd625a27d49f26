"""Arrays beside an engine that do not fit it, or unpack to more than they may: refused when the bundle is loaded."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport_runtime.bundle.arrays import load_mask, read_array
from specexport_runtime.bundle.entry import CorrectionEntry, TokenMapEntry
from specexport_runtime.bundle.token_map import TokenMap, load_token_map
from specexport_runtime.errors import BundleError
from tests.support.cases.entries import make_entry

N, E, R = 17, 6, 4
TABLES: dict[str, dict[str, tuple[int, ...]]] = {
    "selector": {"predecessors": (30, R), "successors": (N, R), "projection": (R, E)},
    "markov": {
        **{"w1": (30, R), "w2": (N + 3, R), "gate": (R, E + R), "gate_bias": (R,), "joint": (3 * R, 2 * R + E)},
        **{"joint_bias": (3 * R,), "confidence": (1, E + R), "confidence_bias": (1,)},
    },
}


def load_tables(folder: Path, rule: str, sizes: dict[str, tuple[int, ...]]) -> Any:
    for name, size in sizes.items():
        np.save(folder / f"{name}.npy", np.ones(size, np.float32))
    correction = CorrectionEntry(rule, tuple(f"{name}.npy" for name in sizes), 3)
    head = {"mask_token_id": 3, "block_size": 4, "correction": correction, "feature_size": E}
    return load_mask(folder, make_entry(vocab_size=N, **head))


@pytest.mark.parametrize(
    ("rule", "table"), [(rule, table) for rule, tables in TABLES.items() for table in (*tables, "first axis")]
)
def test_tables_of_another_size_than_the_head_are_refused(rule: str, table: str, tmp_path: Path) -> None:
    sizes = TABLES[rule]
    assert set(load_tables(tmp_path, rule, sizes).correction.arrays) == set(sizes)
    if table == "first axis":
        second = list(sizes)[1]
        odd = sizes | {second: (N - 1, R)}
        table = second
    else:
        odd = sizes | {table: (*sizes[table][:-1], sizes[table][-1] + 1)}
    with pytest.raises(BundleError, match=r"the head's table .* of another size"):
        load_tables(tmp_path, rule, odd)
    if table in list(sizes)[:2]:
        with pytest.raises(BundleError, match=f"table {table} is missing"):
            load_tables(tmp_path, rule, {name: size for name, size in sizes.items() if name != table})


def npy(header: dict[str, Any], data: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


ENDLESS = {"descr": "<f4", "fortran_order": False, "shape": (1 << 58,)}


def test_a_map_is_not_unpacked_beyond_its_vocabularies(tmp_path: Path) -> None:
    draft = make_entry(vocab_size=N, token_map=TokenMapEntry("map.npz", 2, 0.5, 0.5, 0.5))
    ids = np.arange(N, dtype=np.int32)
    whole = TokenMap(ids, np.arange(N + 1, dtype=np.int32), ids, ids[:0], np.array(-1))
    whole.save(tmp_path / "map.npz")
    assert load_token_map(tmp_path, draft, make_entry(vocab_size=N)) is not None
    whole._replace(pieces=np.zeros(1 << 20, np.int32)).save(tmp_path / "map.npz")
    assert (tmp_path / "map.npz").stat().st_size < 10_000
    with pytest.raises(BundleError, match="unpacks to more"):
        load_token_map(tmp_path, draft, make_entry(vocab_size=N))
    with zipfile.ZipFile(tmp_path / "map.npz", "w") as archive:
        for name in TokenMap._fields:
            archive.writestr(f"{name}.npy", npy(ENDLESS))
    with pytest.raises(BundleError, match="cannot be read"):
        load_token_map(tmp_path, draft, make_entry(vocab_size=N))


@pytest.mark.parametrize("in_place", [False, True])
def test_an_array_that_says_it_is_endless_is_refused(tmp_path: Path, in_place: bool) -> None:
    (tmp_path / "a.npy").write_bytes(npy(ENDLESS))
    with pytest.raises(BundleError, match="cannot be read"):
        read_array(tmp_path / "a.npy", in_place=in_place)
