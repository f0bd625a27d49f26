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
    """A mistake: ``old`` becomes ``new`` in a file of the runtime, and one of ``tests/runtime/test_….py`` fails."""

    file: str
    tests: str
    old: str
    new: str


MUTANTS = {
    "accept: a refusal is answered from the target, not from the residual": Mutant(
        "sampling/accept.py", "accept sampling_exact",
        'rest = normalised(target, residual(target, cast("Sequence[Distribution]", draft_distributions)[j]))',
        "rest = target",
    ),
    "accept: a copy is accepted by another number than plain decoding's": Mutant(
        "sampling/accept.py", "same_seed",
        "drawn = sample_token(target, draws(j).resample)",
        "drawn = sample_token(target, draws(j).accept)",
    ),
    "accept: one number serves both draws": Mutant(
        "sampling/accept.py", "sampling_exact",
        "if not draws(j).accept * draft_probability",
        "if not draws(j).resample * draft_probability",
    ),
    "accept: a greedy draft stays after a token that does not": Mutant(
        "sampling/accept.py", "accept",
        "        if token != (chosen := greedy(j)):\n            return Verdict(j,",
        "        if token != (chosen := greedy(j)) and not j:\n            return Verdict(j,",
    ),
    "block: chances grow beyond 1": Mutant(
        "sampling/block.py", "block",
        "chances.append(min(1.0, chance))",
        "chances.append(chance)",
    ),
    "tree: siblings are drawn with replacement": Mutant(
        "sampling/tree.py", "tree drawn_siblings",
        "rest[[token for token in tokens if token < len(rest)]] = 0.0",
        "pass",
    ),
    "tree mask: a branch sees the chain beside it": Mutant(
        "packing/batch.py", "batch tree_decoding tree_drafts",
        "buffers.parents[token] = distance",
        "buffers.parents[token] = 1",
    ),
    "rollback: what was written counts as committed": Mutant(
        "packing/kv.py", "kv decoder",
        '{self._written[row]} were written.")\n        self._kv_lens[row] = self._written[row] = kv_len',
        '{self._written[row]} were written.")\n        self._kv_lens[row] = self._written[row]',
    ),
    "rollback: padding keeps a refused token": Mutant(
        "packing/kv.py", "kv modes",
        "positions[positions >= kv_len] = PADDING",
        "positions[positions > kv_len] = PADDING",
    ),
    "rollback: drafts enter a state": Mutant(
        "packing/kv.py", "state_arena kv",
        "settled = min(for_good, known) - at",
        "settled = known - at",
    ),
    "packing: positions of the second row are those of the first": Mutant(
        "packing/batch.py", "batch decoder",
        "kv_lens = [self.kv.kv_len(first_row + i) for i in range(len(work))]\n            shifts",
        "kv_lens = [self.kv.kv_len(first_row) for i in range(len(work))]\n            shifts",
    ),
    "KV accounting: a row may be written one entry beyond its end": Mutant(
        "packing/kv.py", "kv",
        "if max(ends) > self.capacity:",
        "if max(ends) > self.capacity + 1:",
    ),
    "KV accounting: a request begins without room for itself": Mutant(
        "decoding/memory_budget.py", "memory_budget",
        "self.bytes_of(rows) + self.need(req).num_bytes <= self.limit",
        "self.bytes_of(rows) <= self.limit",
    ),
    "prefix keys: one owner goes on from another's text": Mutant(
        "decoding/rows.py", "prefixes lora_requests",
        "if kept.scope == req.row_scope:",
        "if kept.scope:",
    ),
    "prefix keys: one token too many is shared": Mutant(
        "decoding/prefixes.py", "prefixes",
        "return int(different.argmax()) if different.any() else size",
        "return int(different.argmax()) + 1 if different.any() else size",
    ),
    "sampling cuts: top-p keeps one token too few": Mutant(
        "sampling/truncation.py", "sampling",
        ".cumsum().searchsorted(params.top_p * total)) + 1]",
        ".cumsum().searchsorted(params.top_p * total)) or 1]",
    ),
    "sampling cuts: min-p forgets the temperature": Mutant(
        "sampling/min_p.py", "sampling",
        "return temperature * math.log(value)",
        "return math.log(value)",
    ),
    "controller: drafts that cost what they give": Mutant(
        "lookahead/rules.py", "goodput goodput_decoding replay",
        "best, counts = (1.0 + margin) * expected",
        "best, counts = (1.0 - 20 * margin) * expected",
    ),
    "controller: the chance of a token forgets those before it": Mutant(
        "lookahead/acceptance.py", "goodput goodput_learning replay",
        "left *= 1.0 - rates[slot]",
        "left = 1.0 - rates[slot]",
    ),
    "manifest: another version of the contract is read": Mutant(
        "bundle/manifest.py", "manifest_values",
        "if abi != ABI_VERSION:",
        "if abi > ABI_VERSION:",
    ),
    "hashes: an altered file is taken": Mutant(
        "bundle/files.py", "file_check",
        "if sha256_file(path) != sha256:",
        "if len(sha256_file(path)) != len(sha256):",
    ),
    "hashes: a file that was written over counts as checked": Mutant(
        "bundle/files.py", "file_check",
        "status.st_mtime_ns, status.st_ctime_ns, sha256]",
        "0, 0, sha256]",
    ),
}  # fmt: skip


def failing(folder: Path, tests: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "runtime")])
    given = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not whole and not annex"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, *(f"tests/runtime/test_{each}.py" for each in tests.split())],
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
