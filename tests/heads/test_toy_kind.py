"""A kind of draft head takes a file and a line of the table: a copy of the sources with both, in another process."""

from pathlib import Path

import pytest

from tests.support.cases.edited_copy import changed_lines, copy_sources, edit, run_with
from tests.support.models.tiny_heads import HIDDEN, LAYER, LAYERS, tensors, write
from tests.support.models.tiny_models import make_llama, save_checkpoint

KIND = """
from functools import partial

from specexport.heads.layered import layered_kind, load_layered, read_layer_config, read_layered
from specexport.heads.modules import DraftHead, through_layer
from specexport_runtime.abi import AFTER_NORM


class SumHead(DraftHead):
    def hidden(self, embedded, features, run):
        state = embedded + features
        for layer in self.body.layers:
            state = through_layer(layer, state, run)
        return state


KIND = layered_kind(
    name="sum",
    called="a head that adds",
    recognizes=lambda files: files.values.get("adds") is True,
    read=lambda files, target: read_layered(files, target, "sum", read_layer_config(files), (AFTER_NORM,), "a test"),
    load=partial(load_layered, SumHead),
)
"""
PROGRAM = """
import json, sys
from specexport.compile.pipeline import build_bundle
from specexport.checkpoint.source import resolve_source
from specexport.heads import probe
from specexport.heads.config import TargetFacts
from specexport.heads.kinds import open_head, read_config
from specexport.inspect import describe
from specexport.recipe import BuildRecipe
from specexport.verify.greedy import check_greedy
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import UnsupportedModelError

target, head, strange, bundle = sys.argv[1:]
try:
    read_config(open_head(resolve_source(strange, None)), TargetFacts(6, 64, 320))
except UnsupportedModelError as error:
    refused = str(error)
probe.check_probe = lambda *_: None  # a random head guesses nothing
built = build_bundle(BuildRecipe(target=target, head=head, output=bundle, max_model_len=64), use_cache=False)
found = {"refused": refused, "error": built.max_abs_errors["head"]}
found["described"] = [line for line in describe(built.manifest) if "draft head" in line]
engine = SpecEngine.load(bundle, num_threads=1, spin=False, adaptive=False)
prompts = [[5, 6, 7, 7], [9, 8]]
assert check_greedy(engine, prompts, max_tokens=8).passed
params = SamplingParams(max_tokens=12, ignore_eos=True)
texts = engine.generate(prompts, params, drafter="head", num_speculative_tokens=3)
found["drafted"] = sum(text.stats.drafted for text in texts)
engine.close()
print(json.dumps(found))
"""


@pytest.mark.whole
@pytest.mark.bundle
def test_a_new_kind_is_one_file_and_one_line_of_the_table(tmp_path: Path) -> None:
    target = make_llama(seed=3, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    stored = tensors("eagle") | {"layers.0.input_layernorm.weight": tensors()["norm.weight"]}
    stored |= {"norm.weight": tensors()["norm.weight"]}
    own = {name: value for name, value in stored.items() if not name.startswith("fc.")}
    folders = [
        save_checkpoint(target, tmp_path / "target"),
        write(tmp_path / "head", LAYER | {"adds": True}, own),
        write(tmp_path / "strange", LAYER, own),
        tmp_path / "bundle",
    ]
    runtime = copy_sources(tmp_path / "copy")
    heads = runtime.parent / "specexport" / "heads"
    (heads / "adding.py").write_text(KIND)
    edit(
        heads / "kinds.py",
        {
            "import assistant, dflash,": "import adding, assistant, dflash,",
            "    eagle.EAGLE,\n": "    eagle.EAGLE,\n    adding.KIND,\n",
        },
    )
    assert changed_lines(runtime.parent) == {"specexport/heads/adding.py": 0, "specexport/heads/kinds.py": 1}
    found = run_with(runtime, PROGRAM, *folders)
    assert "a head that adds" in found["refused"]
    assert found["error"] < 1e-4
    assert "  draft head: sum" in "\n".join(found["described"])
    assert found["drafted"] > 20
