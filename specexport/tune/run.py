"""One run of ``specexport tune``: measure, make a table of each bundle, and pick a draft where there are several."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specexport.bench.subject import Subject
from specexport.progress import Progress
from specexport.tune.compare import Pick, pick_draft
from specexport.tune.measure import Tuner
from specexport.tune.options import TuneOptions
from specexport.tune.table import TuneTable
from specexport.tune.texts import TextCheck
from specexport_runtime.machine import machine_key

SCHEMA = "specexport.tune-comparison/2"


@dataclass(frozen=True)
class TuneResult:
    """What was found."""

    tables: Mapping[str, TuneTable]  # by the bundles' names
    checks: Mapping[str, TextCheck]  # of the texts of each bundle, by its name
    pick: Pick | None  # None for a single bundle

    def to_json(self) -> dict[str, Any]:
        """JSON form: the table of a single bundle; of several, all of them and the pick."""
        tables = {name: table.to_json() for name, table in self.tables.items()}
        if self.pick is None:
            return next(iter(tables.values()))
        return {"schema": SCHEMA, "tables": tables, "pick": self.pick.to_json()}


def run_tune(
    subjects: Mapping[str, Subject],  # the bundles by their names, one or more with the same target
    texts: Seq[str],  # prompts
    options: TuneOptions,
    progress: Progress | None = None,  # called before each run
    *,
    command: Seq[str] = (),  # the command line, for the record
    settings: Mapping[str, Any],  # what else it is measured with, for the record
) -> TuneResult:
    """Measure everything that ``options`` asks for; SpecexportError if loading or decoding fails."""
    tuner = Tuner(subjects, texts, options, progress)
    measured = tuner.run()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    common = {"tokens": options.tokens, "repeats": options.repeats, "num_prompts": options.num_prompts, **settings}
    tables = {
        name: TuneTable(
            bundle=subject.name,
            build_key=subject.details["build_key"],
            machine=machine_key(),
            date=date,
            command=tuple(command),
            settings={
                **common,
                "draft": subject.details["models"].get("draft", subject.details["models"].get("head")),
                "texts": tuner.checks[name].to_json(),
            },
            cells=measured[name],
        )
        for name, subject in subjects.items()
    }
    return TuneResult(tables, tuner.checks, pick_draft(measured) if len(subjects) > 1 else None)
