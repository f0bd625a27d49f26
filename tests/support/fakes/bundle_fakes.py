"""Bundles to compare that are only folders: what is in one follows from its name."""

from dataclasses import replace
from typing import NamedTuple

from tests.support.fakes.bench_fakes import make_subject

TARGET = {
    "source": "big", "source_sha256": "a" * 64, "backend": "ort-cpu", "dtype": "float32", "quantize": None,
    "engine_sha256": "b" * 64, "built_for": [],
}  # fmt: skip
DRAFT = {
    "source": "small", "dtype": "float32", "quantize": "int4", "num_layers": 3, "vocab_size": 17, "head_size": 17,
    "engine_bytes": 2_500_000,
}  # fmt: skip


class HeadEngine:
    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, drafter, **given):
        return self._engine.generate(*args, drafter="draft-model" if drafter == "head" else drafter, **given)


class Log(NamedTuple):
    entries: list
    name: str

    def append(self, entry):
        self.entries.append((*entry, self.name))


def open_fake(log, folder, options):
    """The subject of a folder.

    ``draft``: it has a draft model. ``exact``: that is like the target. ``short``: it was built for K up to 4, and for
    32 tokens. ``head``: it has a head, to which its target gives features. ``broken``: what lookup gives is not what
    plain decoding gives. ``int8``: the target is another one.
    """
    name = folder.name
    words = name.split("-")
    made = make_subject(
        Log(log, name), draft="draft" in words or "head" in words, noise=0.0 if "exact" in words else 0.4,
        broken="broken" in words, lookahead=4 if "short" in words else 8,
    )  # fmt: skip
    details = {
        "name": name,
        "max_model_len": options.max_model_len or (32 if "short" in words else 64),
        "build_key": "k" if len(words) == 1 else f"key of {name}",
        "tokenizer_sha256": "c" * 64,
        "models": {"target": TARGET | ({"quantize": "int8"} if "int8" in words else {})}
        | ({"draft": DRAFT} if "draft" in words else {}),
    }
    if "head" in words:
        details["models"]["target"] |= {"engine_sha256": f"hash of {name}", "feature_size": 8}
        details["models"]["head"] = DRAFT | {"source": "thin", "num_layers": 1}
        load = made.load
        made = replace(made, has_draft=False, has_head=True, load=lambda key: HeadEngine(load(key)))
    return replace(made, name=name, details=details)


def fake_bundles(monkeypatch):
    """Let ``specexport bench`` open fakes; what will be asked of their engines."""
    asked = []
    monkeypatch.setattr("specexport.bench.subject.open_subject", lambda *args: open_fake(asked, *args))
    return asked
