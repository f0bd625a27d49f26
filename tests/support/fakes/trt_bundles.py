"""A bundle with engines of TensorRT."""

from specexport_runtime.bundle.entry import EngineFile
from specexport_runtime.bundle.files import hash_files
from specexport_runtime.bundle.manifest import Manifest, VocabularyInfo
from tests.support.fakes import engine
from tests.support.fakes.loop import MAX_MODEL_LEN, VOCAB
from tests.support.fakes.trt_fakes import make_entry

LOOKAHEAD, ROWS = 4, 4


def make_tokenizer():
    return engine.make_tokenizer(VOCAB, "t")


def write_bundle(folder, **changes):
    entries, names = {}, ["tokenizer.json"]
    for role in ("target", "draft"):
        engines = []
        for sm in ("sm89", "sm120"):
            name = f"{role}/model.{sm}.engine"
            (folder / role).mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(f"{role} {sm}".encode() * 50)
            engines.append(EngineFile(name, sm, "tensorrt-rtx", "1.7.1.116", 4096))
            names.append(name)
        fields = {"path": engines[0].path, "files": tuple(engines), **changes}
        entries[role] = make_entry(LOOKAHEAD, ROWS, MAX_MODEL_LEN, draft=role == "draft", **fields)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    Manifest(
        name="fake", build_key="", recipe={}, tools={}, vocabulary=VocabularyInfo(VOCAB, "", None, ()),
        max_model_len=MAX_MODEL_LEN, lookahead=LOOKAHEAD, models=entries, files=hash_files(folder, names),
    ).write(folder)  # fmt: skip
    return folder
