from pathlib import Path

import pytest

from specexport.backends.registry import BACKENDS
from specexport.recipe import (
    AUTO_MODEL_LEN,
    BuildRecipe,
    load_recipe_file,
    make_recipe,
    resolve_model_len,
    resolve_parts,
    resolve_settings,
)
from specexport_runtime.errors import RecipeError

RECIPES = Path(__file__).parents[2] / "engines" / "recipes"


RTX = {"backend": "tensorrt-rtx"}
TWO = ("sql=a", "poems=b")
WHOLE = {"draft": "d", "draft_quantize": "none", "draft_vocab_size": "all"}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'target = "/t"\noutput = "/o"\nlookahead = 3\nmax_model_len = 100\n')
    recipe = make_recipe({"lookahead": 5, "draft": None}, path)
    assert (recipe.target, recipe.output, recipe.lookahead, recipe.max_model_len) == ("/t", "/o", 5, 100)
    assert recipe.quantize is recipe.draft_quantize is None
    assert make_recipe({"kv_cache_dtype": "auto"}, path).kv_cache_dtype is None, "the dtype of the model"
    parts = resolve_parts(
        make_recipe({"draft": "d", "quantize": "int4", "draft_quantize": "int8"}, path),
        {"target": False, "draft": True},
    )
    assert {role: part.quantize for role, part in parts.items()} == {"target": "int4", "draft": "int8"}
    with pytest.raises(RecipeError, match="No such file"):
        make_recipe({}, tmp_path / "none.toml")


def test_paths_are_relative_to_the_recipe_file_and_hub_ids_stay_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    values = load_recipe_file(write(tmp_path, 'target = "../models/a"\ndraft = "org/model"\noutput = "out"\n'))
    places = [str(place) for place in (tmp_path.parent / "models" / "a", tmp_path / "org" / "model", tmp_path / "out")]
    assert [values[name] for name in ("target", "draft", "output")] == places
    settings = make_recipe(values).settings()
    assert settings["has_draft"] is True
    assert str(tmp_path) not in str(settings)
    values = load_recipe_file(write(tmp_path, 'target = "org/other"\ndraft = "gpt2"\noutput = "/o"\n'))
    assert (values["target"], values["draft"]) == ("org/other", "gpt2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('lokahead = 4\n', ["lokahead", "did you mean 'lookahead'"]),
        ('zebra = 4\n', ["zebra", "the keys are"]),
        ('lookahead = 4\nnum_speculative_tokens = 4\n', ["lookahead twice"]),
        ('lookahead = "4"\n', ["lookahead is '4', not a whole number"]),
        ('lookahead = \n', ["not valid TOML"]),
        ("lookahead = " + "[" * 10_000 + "]" * 10_000, ["nested too deeply"]),
        ('trust_remote_code = 1\n', ["trust_remote_code is 1, not true or false"]),
        ('head_revision = "main"\n', ["head_revision is given and head is not"]),
        ('head = "mtp"\nhead_revision = "main"\n', ["the head is in the target's own checkpoint"]),
        ('head = "h"\nhead_revision = 3\n', ["head_revision is 3, not text"]),
        ('max_model_len = "all"\n', ["max_model_len is 'all'"]),
    ],
)  # fmt: skip
def test_a_bad_recipe_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, 'target = "/t"\noutput = "/o"\n' + text)
    with pytest.raises(RecipeError) as caught:
        make_recipe({}, path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lookahead": 0}, "lookahead (K) is 0, outside 1 to 64"),
        ({"max_model_len": 3}, "max_model_len is 3, below 16"),
        ({"max_model_len": 10**9}, "max_model_len is 1000000000, above 16777216"),
        ({"backend": "openvino"}, "backend 'openvino' is not in this release"),
        ({"dtype": "float8"}, "dtype 'float8' cannot be built for backend ort-cpu"),
        ({"quantize": "int2"}, "quantize is 'int2'"),
        ({"quantize": "int8", "backend": "ort-cuda"}, "backend ort-cuda has int4 only"),
        ({"dtype": "fp32", "backend": "ort-cuda"}, "dtype 'float32' cannot be built for backend ort-cuda"),
        ({"draft_quantize": "int8"}, "draft_quantize is given and draft is not"),
        ({"draft": "d", "draft_quantize": "fp8"}, "draft_quantize is 'fp8'"),
        ({"quantize_lm_head": "no"}, "quantize_lm_head is 'no', not true or false"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"kv_cache_dtype": "int8", "backend": "ort-cuda"}, "kv_cache_dtype is given, and backend ort-cuda fixes"),
        ({"draft": "d", "draft_layers": 0}, "draft_layers is 0."),
        ({"draft": "d", "draft_layers": True}, "draft_layers is True, not a whole number"),
        ({"draft_layers": 1}, "draft_layers is given and draft is not"),
        ({"draft": "d", "draft_vocab_size": 0}, "draft_vocab_size is 0."),
        ({"draft": "d", "draft_vocab_size": "40"}, "draft_vocab_size is '40', not a whole number"),
        ({"draft": "d", "draft_vocab_size": 3.0}, "draft_vocab_size is 3.0, not a whole number"),
        ({"draft_vocab_size": 9}, "draft_vocab_size is given and draft is not"),
        ({"draft_vocab_texts": "x"}, "draft_vocab_texts is given and draft is not"),
        (WHOLE | {"draft_vocab_texts": "x"}, "draft_vocab_texts is given, and neither draft_vocab_size nor"),
        ({"head": "h", "draft": "d"}, "draft and head are both given"),
        ({"head": "h", "self_draft": True}, "head and self_draft are both given"),
        ({"head": "h", "draft_quantize": "keep"}, "draft heads hold float weights"),
        ({"lora": TWO, "lora_mode": "merge"}, "2 LoRA adapters are to be merged"),
        ({"lora": TWO[:1], "lora_mode": "blend"}, "lora_mode is 'blend'"),
        ({"lora_mode": "choose"}, "lora_mode is given and lora is not"),
        *(({"lora": TWO, "backend": name}, f"backend {name} cannot do that") for name in ("ort-cuda", "tensorrt")),
        (RTX | {"lora": TWO}, "backend tensorrt-rtx cannot do that"),
        (RTX | {"sm": "ninety"}, "sm 'ninety' is not a compute capability"),
        (RTX | {"sm": ["all"]}, "sm 'all'"),
        (RTX | {"self_draft": True}, "self_draft is given, and backend tensorrt-rtx"),
        ({"backend": "tensorrt", "self_draft": True}, "self_draft is given, and backend tensorrt"),
        (RTX | {"self_draft": "yes"}, "not true or false"),
        (RTX | {"lowering": "plugin"}, "lowering is given, and backend tensorrt-rtx fixes nothing of the kind"),
        ({"backend": "tensorrt", "lowering": "native"}, "lowering 'native' cannot be built for backend tensorrt"),
        (RTX | {"max_num_seqs": 0}, "max_num_seqs is 0, outside 1 to 256"),
        (RTX | {"max_num_tokens": 10**6}, "max_num_tokens is 1000000, outside"),
        (RTX | {"gpu_memory_gb": -1.0}, "gpu_memory_gb is -1.0"),
        ({"sm": "89"}, "sm is given, and backend ort-cpu fixes nothing of the kind"),
        ({"backend": "ort-cuda", "max_num_seqs": 0}, "max_num_seqs is 0, outside 1 to 4096"),
        ({"lowering": "plugin"}, "lowering is given"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe({"target": "t", "output": "o"} | values)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        ("auto", [None, None], AUTO_MODEL_LEN), ("auto", [512, 256], 256), ("auto", [32768, None], AUTO_MODEL_LEN),
        (300, [512], 300), (9000, [None], 9000),
    ],
)  # fmt: skip
def test_auto_is_resolved(asked: int | str, limits: list[int | None], expected: int) -> None:
    assert resolve_model_len(asked, limits) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_valid(path: Path) -> None:
    assert make_recipe({}, path).backend == ("ort-cuda" if "-cuda" in path.stem else "ort-cpu")


@pytest.mark.parametrize(
    ("given", "name", "backend"),
    [
        ("fp16", "float16", "ort-cuda"),
        ("FP16", "float16", "ort-cuda"),
        ("bf16", "bfloat16", "ort-cuda"),
        ("float", "float32", "ort-cpu"),
    ],
)
def test_other_names_of_a_dtype_are_kept_by_its_own(tmp_path: Path, given: str, name: str, backend: str) -> None:
    values = {"target": "/t", "output": "/o", "backend": backend}
    recipe = make_recipe(values | {"dtype": given}, None)
    assert recipe.dtype == name
    assert recipe.settings()["dtype"] == name
    assert make_recipe(values, write(tmp_path, f'dtype = "{given}"\n')) == recipe


@pytest.mark.parametrize("backend", ["ort-cpu", "ort-cuda"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_on_a_cpu_a_dtype_rounds_float_weights_and_nothing_else(backend: str, dtype: str) -> None:
    recipe = BuildRecipe(target="t", output="o", draft="d", backend=backend, dtype=dtype, draft_quantize="int4")
    on_cpu = backend == "ort-cpu"
    part = resolve_parts(recipe, {"target": False, "draft": False})["draft"]
    assert part.model_dtype == part.kv_cache_dtype == ("float32" if on_cpu else {"auto": "float16"}.get(dtype, dtype))
    assert part.rounding(None) == ("bfloat16" if on_cpu and dtype == "bfloat16" else None)
    assert part.rounding(part.quantize) is None


def test_what_a_recipe_leaves_open_is_settled_once() -> None:
    recipe = BuildRecipe(target="t", output="some/folder", draft="d")
    parts = resolve_parts(recipe, {"target": False, "draft": True})
    assert not any(None in vars(part).values() for part in parts.values())
    expected = {"dtype": "float32", "name": "folder", "lookahead": 8, "quantize": None, "draft_quantize": "keep"}
    assert resolve_settings(recipe, parts, max_model_len=99).items() >= (expected | {"max_model_len": 99}).items()
    for backend in BACKENDS:  # one adapter is merged anywhere
        assert BuildRecipe(target="t", output="o", backend=backend, lora=(("sql", "a"),)).lora
    head = resolve_parts(
        BuildRecipe(target="t", output="o", head="h", quantize="int4"), {"target": False, "head": True}
    )
    assert head["head"].quantize == "int8", "what is quantized for speed is drafted for in the same way"
