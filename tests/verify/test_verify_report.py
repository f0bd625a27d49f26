"""Status, summary, and the record in the bundle, which stays valid whatever happens meanwhile."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from specexport.atomic import write_json
from specexport.compare import OutputCase, OutputResult
from specexport.compile.bundle import find_up_to_date
from specexport.inspect import describe as inspect_lines
from specexport.progress import StageClock
from specexport.verify.command import describe
from specexport.verify.greedy import check_greedy
from specexport.verify.parts import run_greedy, run_sampling
from specexport.verify.report import REPORT_NAME, ReportPart, VerifyReport, record_report
from specexport.verify.sampling import SETTINGS, check_sampling
from specexport_runtime.bundle.files import check_files, hash_files
from specexport_runtime.bundle.manifest import Manifest, VocabularyInfo, load_manifest
from specexport_runtime.errors import BundleError, UserInputError
from tests.support.fakes.submitted import raising
from tests.support.fakes.verify_fakes import PROMPTS, WidthDependent, make_engine, make_executor

GOOD = OutputResult(
    "target", (OutputCase("prefill", 9, 1e-6, 1e-7, 1e-8, 1e-8, 1.0, 3, True),), 1e-4, 1e-4, "all of it", True
)
FEW = {"num_samples": 100, "num_runs": 100, "num_contexts": 1}
BAD = OutputResult("draft", (OutputCase("ragged", 9, *[math.nan] * 4, 0.5, 0, False),), 1e-4, 1e-4, "all of it", False)


def make_report(*parts, date="2026-01-02T03:04:05+00:00"):
    parts = parts or (ReportPart("tensors", "passed", None, (GOOD,)), ReportPart("greedy", "passed", None, ()))
    return VerifyReport("demo", "k" * 64, date, {"numpy": "2.3"}, {"seed": 0}, {"greedy": 1.5}, parts)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    make_manifest(hash_files(folder, ["weights"])).write(folder)
    return folder


def make_manifest(files, build_key="k" * 64):
    vocabulary = VocabularyInfo(10, "0" * 64, None, ())
    return Manifest("demo", build_key, {}, {}, vocabulary, 64, 4, {}, files)


def test_a_skipped_part_is_never_a_pass():
    skipped = ReportPart("tensors", "skipped", "no checkpoint.", ())
    passed = ReportPart("greedy", "passed", None, ())
    failed = ReportPart("sampling", "failed", "the logits are NaN.", ())
    assert make_report(passed).status == "passed"
    assert make_report(skipped, passed).status == "incomplete"
    assert make_report(skipped, passed, failed).status == "failed"
    assert make_report(passed, failed).failed_parts == ["sampling"]
    text = "\n".join(describe(make_report(skipped, passed)))
    assert "tensors    skipped: no checkpoint." in text
    assert text.endswith("incomplete: not everything ran (2 s); exit code 0")
    assert make_report(skipped, passed).summary()["tensors"] == "skipped"


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({"tensors": "passed", "greedy": "passed", "sampling": "passed"},
         "greedy yes, sampled yes; weights as the checkpoint's: yes"),
        ({"tensors": "skipped", "perplexity": "passed", "greedy": "passed", "sampling": "failed"},
         "greedy yes, sampled NO; weights as the checkpoint's: not compared, because it is gone"),
        ({"perplexity": "failed", "tensors": "skipped", "neighbours": "failed", "greedy": "passed"},
         "greedy yes, sampled not compared, because it did not run; weights as the checkpoint's: NO; "
         "a token's logits the same in every step: NO"),
    ],
)  # fmt: skip
def test_the_first_line_is_a_verdict(statuses, said):
    reason = {"skipped": "it is gone. Fix: fetch it."}
    report = make_report(*[ReportPart(name, status, reason.get(status), ()) for name, status in statuses.items()])
    assert next(describe(report)) == f"lossless: {said}"
    code = 1 if "failed" in statuses.values() else 0
    assert list(describe(report))[-1].endswith(f"; exit code {code}")


def test_the_text_names_what_failed_and_where():
    wrong = make_engine("random", target=make_executor(WidthDependent, gap=0.5))
    greedy = check_greedy(wrong, PROMPTS[:2], max_tokens=8)
    sampling = check_sampling(make_engine(), PROMPTS, settings=SETTINGS[1:2], **FEW)
    report = make_report(
        ReportPart("greedy", "failed", None, (greedy,)), ReportPart("sampling", "passed", None, (sampling,))
    )
    text = "\n".join(describe(report))
    first = greedy.differences[0]
    assert f"FAILED {first.drafter}, K={first.lookahead}, prompt {first.prompt + 1}, token {first.position}" in text
    assert "acceptance, top-k 4: 1 x 100 draws" in text
    assert "control, every draft token accepted untested" in text
    assert report.summary()["greedy_failures"] == greedy.failures
    assert report.summary()["sampling_min_p_value"] == sampling.min_p_value
    json.dumps(report.to_json(), allow_nan=False)
    report = make_report(ReportPart("tensors", "failed", None, (GOOD, BAD)))
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (data["summary"]["draft_max_abs"], data["summary"]["target_max_abs"]) == ("nan", 1e-6)
    assert data["parts"]["tensors"]["results"][1]["cases"][0]["argmax_agreement"] == 0.5
    assert "FAILED draft, ragged" in "\n".join(describe(report))


def test_the_bundle_keeps_the_report_and_stays_up_to_date(bundle):
    for round_ in range(2):
        report = make_report(date=f"2026-01-0{round_ + 1}T00:00:00+00:00")
        done = record_report(bundle, report)
        manifest = load_manifest(bundle)
        assert manifest == done
        check_files(bundle, manifest.files)
        assert set(manifest.files) == {"weights", REPORT_NAME}
        assert manifest.verify["date"] == report.date
        assert manifest.verify["status"] == "passed"
        assert json.loads((bundle / REPORT_NAME).read_text()) == json.loads(json.dumps(report.to_json()))
        assert find_up_to_date(bundle, "k" * 64) == manifest
        assert f"date={report.date}" in "\n".join(inspect_lines(manifest))
    assert sorted(path.name for path in bundle.iterdir()) == ["manifest.json", REPORT_NAME, "weights"]


@pytest.mark.parametrize("after", ["hash_files", "write_json"])
def test_an_interrupted_record_leaves_a_valid_bundle(bundle, monkeypatch, after):
    """Once the new report is written, or the old record is taken back, and then nothing more."""
    record_report(bundle, make_report())
    monkeypatch.setattr(f"specexport.compile.bundle.{after}", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        record_report(bundle, make_report(date="2027-01-01T00:00:00+00:00"))
    manifest = load_manifest(bundle)
    check_files(bundle, manifest.files)
    assert manifest.verify is None


def test_a_bundle_that_was_rebuilt_or_cannot_be_written_is_not_touched(bundle, monkeypatch):
    monkeypatch.setattr(Manifest, "write", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(UserInputError, match="--no-record"):
        record_report(bundle, make_report())
    monkeypatch.undo()
    make_manifest(hash_files(bundle, ["weights"]), build_key="other").write(bundle)
    before = sorted(bundle.iterdir())
    with pytest.raises(BundleError, match="rebuilt"):
        record_report(bundle, make_report())
    assert sorted(bundle.iterdir()) == before
    with pytest.raises(UserInputError, match="cannot be written"):
        write_json(bundle / "missing" / "report.json", make_report().to_json())


def test_logits_that_are_not_numbers_fail_their_part():
    class Broken(type(make_executor())):
        def logits_after(self, tokens, mask=None):
            return super().logits_after(tokens, mask) * float("nan")

    engine = make_engine(target=make_executor(Broken))
    for part in (
        run_greedy(engine, PROMPTS, StageClock(None, 1), max_tokens=4),
        run_sampling(engine, make_manifest({}), PROMPTS, StageClock(None, 1), num_samples=1000, seed=0),
    ):
        assert part.status == "failed"
        assert "NaN" in part.reason


def test_a_target_that_is_certain_of_everything_is_not_proven(monkeypatch):
    monkeypatch.setattr("specexport.verify.parts.check_sampling", partial(check_sampling, settings=SETTINGS[1:2]))
    engine = make_engine(target=make_executor(sharpness=2000.0))
    part = run_sampling(engine, make_manifest({}), PROMPTS, StageClock(None, 1), num_samples=1000, seed=0)
    assert part.status == "skipped"
    assert "certain" in part.reason
    assert part.results[0].control_p_value is None
