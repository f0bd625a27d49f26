"""A manifest, and files that say it."""

import json
from dataclasses import replace

from specexport_runtime.abi import LayerGeometry, StateGeometry
from specexport_runtime.bundle import entry
from specexport_runtime.bundle import manifest as module
from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.bundle.manifest import Manifest, VocabularyInfo
from specexport_runtime.bundle.profiles import Profile
from tests.support.cases.entries import make_entry

REPORT = entry.EngineReport(
    (("a", "b"),), 2, (entry.ProfileReport("decode 1x1", 40, 1, ("x",), 0, 1, 1),), "builder", 5, 9, 0.5, 7,
    {"engine": {"own": 3, "mapped": 4}},
)  # fmt: skip
ENTRY = make_entry(
    vocab_size=300, max_positions=512, source=entry.SourceEntry("tiny", "ab", "Tiny"),
    parameters=entry.Parameters(10**6, 900), states=(StateGeometry((3, 8), 8),), quantize="int8",
    attention=entry.AttentionEntry((LayerGeometry(1, 8, 8),), "float32", 4, (-1,)), rope=entry.Rope("longrope", 256),
    passes=(("constant-fold", 3),), path="target/model.onnx", inputs=("input_ids", "logit_rows"),
    padded=entry.PaddedGraph("target/model.padded.onnx", ("input_ids", "kv_positions")),
    files=(
        entry.EngineFile("target/sm89.engine", "sm89", "tensorrt", "10.0", 1000, REPORT),
        entry.EngineFile("target/sm120.engine", "sm120", "tensorrt", "10.0"),
    ),
    limits=entry.EngineLimits((Profile("decode", 1, 1, 1, 1),), 300, 4), obstacle="tied", fused=(("norm-fuse", 1),),
    weight_formats=(entry.WeightFormat("int8", 40, 42),), packed_bytes=(42, 160),
)  # fmt: skip
DRAFT = replace(
    ENTRY,
    cut_lm_head=entry.CutLmHead("draft/lm_head_ids.npy", 120),
    dropped_layers=(entry.DroppedLayer(2, 0.75), entry.DroppedLayer(0, -1.0)),
    parameters=entry.Parameters(10**6, 900, entry.ExpertSizes(600, 2, 8)),
    trial=entry.FormTrial(4, (entry.TriedForm("int8", 120, 0.5, 0.2, 1.5),)),
)
HEAD = make_entry(
    vocab_size=300, source=entry.SourceEntry("tiny", "ab", "Tiny"), parameters=entry.Parameters(900, 900),
    path="target/model.onnx", inputs=("input_ids",), feature_size=8,
    draft_head=entry.DraftHeadEntry("eagle3", (2, -1), 0.5, "otherwise", 3, 7, "head/mask.npy", 4, reads_draft=True),
)  # fmt: skip
FILES = (
    "draft/lm_head_ids.npy", "head/mask.npy", "target/model.onnx", "target/sm89.engine", "target/sm120.engine",
    "target/model.padded.onnx",
)  # fmt: skip
MANIFEST = Manifest(
    name="tiny", build_key="key", recipe={"lookahead": 4}, tools={"python": "3"},
    vocabulary=VocabularyInfo(290, "cd", 1, (2, 299), {"eos_token": "</s>"}), max_model_len=256, lookahead=4,
    models={"target": ENTRY, "draft": DRAFT, "head": HEAD},
    files={name: FileEntry("ef", 3) for name in (*FILES, "tokenizer.json")}, verify={"passed": True}, max_num_seqs=2,
    max_num_tokens=64,
)  # fmt: skip


def write(folder, data):
    data = {key: value for key, value in data.items() if key != "manifest_sha256"}
    data["manifest_sha256"] = module._digest(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    return folder
