"""A mistake in what the proofs are about is noticed by the tests that every change runs: ``make mutants``.

Each mistake is made in a copy of the sources; the named tests, those of ``make test`` alone, must fail over it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cases.edited_copy import ROOT, edit

pytestmark = pytest.mark.whole
COPIED = ("specexport", "runtime", "tests", "tools")
LINKED = ("examples", "docs", "docker", "engines", "README.md", "pyproject.toml", "Makefile")


class Mutant(NamedTuple):
    """A mistake: ``old`` becomes ``new`` in a file of the runtime, and one of ``tests`` (of ``tests/``) fails."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = {
    "accept: a refusal is answered from the target, not from the residual": Mutant(
        "sampling/accept.py",
        "rest = normalised(target, surplus(target, draft, drafted[j]))",
        "rest = target",
        ("runtime/test_accept.py", "runtime/test_sampling_exact.py"),
    ),
    "accept: one number serves both draws": Mutant(
        "sampling/accept.py",
        "if not draws(j).accept * draft_probability",
        "if not draws(j).resample * draft_probability",
        ("runtime/test_sampling_exact.py",),
    ),
    "accept: a greedy draft stays behind a token that does not": Mutant(
        "sampling/accept.py",
        "        if token != target_tokens[j]:\n            return Verdict(j,",
        "        if token != target_tokens[j] and not j:\n            return Verdict(j,",
        ("runtime/test_accept.py",),
    ),
    "block: chances grow beyond 1": Mutant(
        "sampling/block.py",
        "chances.append(min(1.0, chance))",
        "chances.append(chance)",
        ("runtime/test_block.py",),
    ),
    "tree: siblings are drawn with replacement": Mutant(
        "sampling/tree.py",
        "rest[[token for token in tokens if token < len(rest)]] = 0.0",
        "pass",
        ("runtime/test_tree.py", "runtime/test_drawn_siblings.py"),
    ),
    "tree mask: a branch sees the chain beside it": Mutant(
        "packing/batch.py",
        "buffers.parents[token] = distance",
        "buffers.parents[token] = 1",
        ("runtime/test_batch.py", "runtime/test_tree_decoding.py", "runtime/test_tree_drafts.py"),
    ),
    "rollback: what was written counts as committed": Mutant(
        "packing/kv.py",
        '{self._written[row]} were written.")\n        self._kv_lens[row] = self._written[row] = kv_len',
        '{self._written[row]} were written.")\n        self._kv_lens[row] = self._written[row]',
        ("runtime/test_kv.py", "runtime/test_decoder.py"),
    ),
    "rollback: padding keeps a refused token": Mutant(
        "packing/kv.py",
        "positions[positions >= kv_len] = PADDING",
        "positions[positions > kv_len] = PADDING",
        ("runtime/test_kv.py", "runtime/test_modes.py"),
    ),
    "rollback: drafts enter a state": Mutant(
        "packing/kv.py",
        "settled = min(for_good, known) - at",
        "settled = known - at",
        ("runtime/test_state_arena.py", "runtime/test_kv.py"),
    ),
    "packing: positions of the second row are those of the first": Mutant(
        "packing/batch.py",
        "kv_lens = [self.kv.kv_len(first_row + i) for i in range(len(work))]\n            shifts",
        "kv_lens = [self.kv.kv_len(first_row) for i in range(len(work))]\n            shifts",
        ("runtime/test_batch.py", "runtime/test_decoder.py"),
    ),
    "KV accounting: a row may be written one entry beyond its end": Mutant(
        "packing/kv.py",
        "if max(ends) > self.capacity:",
        "if max(ends) > self.capacity + 1:",
        ("runtime/test_kv.py",),
    ),
    "KV accounting: a request begins without room for itself": Mutant(
        "decoding/memory_budget.py",
        "self.bytes_of(rows) + self.need(req).num_bytes <= self.limit",
        "self.bytes_of(rows) <= self.limit",
        ("runtime/test_memory_budget.py",),
    ),
    "prefix keys: one owner goes on from another's text": Mutant(
        "decoding/rows.py",
        "if kept.scope == req.row_scope:",
        "if kept.scope:",
        ("runtime/test_prefixes.py", "runtime/test_lora_requests.py"),
    ),
    "prefix keys: one token too many is shared": Mutant(
        "decoding/prefixes.py",
        "return int(different.argmax()) if different.any() else size",
        "return int(different.argmax()) + 1 if different.any() else size",
        ("runtime/test_prefixes.py",),
    ),
    "sampling cuts: top-p keeps one token too few": Mutant(
        "sampling/truncation.py",
        ".cumsum().searchsorted(params.top_p * total)) + 1]",
        ".cumsum().searchsorted(params.top_p * total)) or 1]",
        ("runtime/test_sampling.py",),
    ),
    "sampling cuts: min-p forgets the temperature": Mutant(
        "sampling/min_p.py",
        "return temperature * math.log(value)",
        "return math.log(value)",
        ("runtime/test_sampling.py",),
    ),
    "controller: drafts that cost what they give": Mutant(
        "lookahead/rules.py",
        "best, counts = (1.0 + margin) * expected",
        "best, counts = (1.0 - 20 * margin) * expected",
        ("runtime/test_goodput.py", "runtime/test_goodput_decoding.py", "runtime/test_replay.py"),
    ),
    "controller: the chance of a token forgets those before it": Mutant(
        "lookahead/acceptance.py",
        "left *= 1.0 - rates[slot]",
        "left = 1.0 - rates[slot]",
        ("runtime/test_goodput.py", "runtime/test_goodput_learning.py", "runtime/test_replay.py"),
    ),
    "manifest: another version of the contract is read": Mutant(
        "bundle/manifest.py",
        "if abi != ABI_VERSION:",
        "if abi > ABI_VERSION:",
        ("runtime/test_bundle_refusals.py", "runtime/test_manifest_values.py"),
    ),
    "hashes: an altered file is taken": Mutant(
        "bundle/files.py",
        "if sha256_file(path) != sha256:",
        "if len(sha256_file(path)) != len(sha256):",
        ("runtime/test_bundle_refusals.py", "runtime/test_file_check.py"),
    ),
    "hashes: a file that was written over counts as checked": Mutant(
        "bundle/files.py",
        "status.st_mtime_ns, status.st_ctime_ns, sha256]",
        "0, 0, sha256]",
        ("runtime/test_file_check.py",),
    ),
}


def failing(folder: Path, tests: tuple[str, ...]) -> str:
    """What pytest prints of tests that must fail over the copy in ``folder``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "runtime")])
    given = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not whole and not annex"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, *(f"tests/{each}" for each in tests)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    for part in COPIED:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in LINKED:
        (tmp_path / part).symlink_to(ROOT / part)
    edit(tmp_path / "runtime" / "specexport_runtime" / mutant.file, {mutant.old: mutant.new})
    failed = failing(tmp_path, mutant.tests)
    assert " failed" in failed
    assert "ImportError" not in failed
