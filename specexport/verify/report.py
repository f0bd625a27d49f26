"""The report of a verification: its JSON file, and the record in the bundle's manifest."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specexport.compare import OutputResult
from specexport.compile.bundle import write_bundle_json
from specexport.verify.goodness_of_fit import SamplingResult
from specexport.verify.greedy import GreedyResult
from specexport.verify.perplexity import PerplexityResult
from specexport_runtime.bundle.manifest import Manifest, load_manifest
from specexport_runtime.errors import BundleError, UserInputError

REPORT_NAME = "verify_report.json"
REPORT_VERSION = 2

PartStatus = Literal["passed", "failed", "skipped"]
Status = Literal["passed", "failed", "incomplete"]
Result = OutputResult | PerplexityResult | GreedyResult | SamplingResult


@dataclass(frozen=True)
class ReportPart:
    """One part of a verification."""

    name: str  # ``"tensors"``, ``"perplexity"``, ``"neighbours"``, ``"greedy"`` or ``"sampling"``
    status: PartStatus  # ``"skipped"`` says that something was not proven, never that it holds
    reason: str | None  # why it was skipped, or why it broke off
    results: tuple[Result, ...]  # at most one in ``greedy`` and ``sampling``, else one for each engine


@dataclass(frozen=True)
class VerifyReport:
    """A whole verification."""

    bundle: str  # its name
    build_key: str  # of the build that was verified
    date: str  # UTC, ISO 8601
    tools: Mapping[str, str]  # versions that it ran with
    options: Mapping[str, Any]  # what decides the result: prompts, tokens, samples, seed
    seconds: Mapping[str, float]  # of each stage
    # by perplexity only approximations are compared (all, if a text was given), by logits only the others
    parts: tuple[ReportPart, ...]

    @property
    def status(self) -> Status:
        """``"failed"`` if any part failed, else ``"incomplete"`` if any was skipped, else ``"passed"``."""
        found = {part.status for part in self.parts}
        return "failed" if "failed" in found else "incomplete" if "skipped" in found else "passed"

    @property
    def failed_parts(self) -> list[str]:
        """Names of the parts that failed."""
        return [part.name for part in self.parts if part.status == "failed"]

    def summary(self) -> dict[str, Any]:
        """The worst numbers on one level: what the manifest keeps. Numbers of parts that did not run are left out."""
        data: dict[str, Any] = {"status": self.status, "date": self.date}
        for part in self.parts:
            data[part.name] = part.status
        for part in self.parts:
            for result in part.results:
                data |= _worst_numbers(part.name, result)
        data |= {f"{name}_version": version for name, version in self.tools.items()}
        plain: dict[str, Any] = _to_json_value(data)
        return plain

    def to_json(self) -> dict[str, Any]:
        """JSON form; numbers are not rounded, and infinite and undefined ones become text."""
        parts = {
            part.name: {
                "status": part.status,
                "reason": part.reason,
                "results": [asdict(result) for result in part.results],
            }
            for part in self.parts
        }
        rest = {key: getattr(self, key) for key in ("bundle", "build_key", "date", "tools", "options", "seconds")}
        data = {"report_version": REPORT_VERSION, "status": self.status, "summary": self.summary(), "parts": parts}
        plain: dict[str, Any] = _to_json_value(data | rest)
        return plain


def _worst_numbers(part: str, result: Result) -> dict[str, Any]:
    if isinstance(result, OutputResult) and part == "neighbours":
        return {f"{result.role}_neighbours_max_relative": result.max_relative}
    if isinstance(result, OutputResult):
        return {f"{result.role}_max_abs": result.max_abs, f"{result.role}_max_relative": result.max_relative}
    if isinstance(result, PerplexityResult):
        return {
            f"{result.role}_perplexity": result.perplexity,
            f"{result.role}_reference_perplexity": result.reference_perplexity,
            f"{result.role}_perplexity_change": result.change,
        }
    if isinstance(result, GreedyResult):
        compared = sum(run.tokens_compared for run in result.runs)
        return {"greedy_tokens": compared, "greedy_near_ties": result.near_ties, "greedy_failures": result.failures}
    return {"sampling_min_p_value": result.min_p_value, "sampling_max_total_variation": result.max_total_variation}


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    return value


def record_report(bundle: Path, report: VerifyReport) -> Manifest:
    """Put the report into the bundle, which stays valid whenever this ends; the manifest is returned."""
    manifest = load_manifest(bundle)
    if manifest.build_key != report.build_key:
        raise BundleError(f"{bundle} was rebuilt while it was verified.", "run `specexport verify` again.")
    manifest = replace(manifest, verify=None)  # until the new report is there
    try:
        return write_bundle_json(
            bundle, manifest, REPORT_NAME, report.to_json(), lambda done: replace(done, verify=report.summary())
        )
    except OSError as error:
        raise UserInputError(
            f"the report cannot be recorded in {bundle} ({error.strerror}).", "make it writable, or pass --no-record."
        ) from error
