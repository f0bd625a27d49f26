"""A draft model made of its target's own layers: which stay, what it learns, its files, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specexport.checkpoint.load import load_checkpoint
from specexport.compile.pipeline import build_bundle
from specexport.recipe import BuildRecipe
from specexport.train import pruned, run
from specexport.train.lm_head import LmHead, chunked_cross_entropy, compare_distributions
from specexport.train.loop import Trainer
from specexport.train.options import TrainOptions
from specexport.train.pruned import Choice, PrunedPlan, likely_choices, measure_choices
from specexport.train.pruned_files import round_weights
from specexport.train.run import train_draft
from specexport.train.student import Batch
from specexport_runtime import SamplingParams, SpecEngine
from specexport_runtime.errors import InvalidRequestError, OutputExistsError, UnsupportedModelError
from tests.support.models.tiny_gguf import write_gguf
from tests.support.models.tiny_models import ARCHITECTURES, make_llama, make_model, save_checkpoint
from tests.support.models.tiny_packed import pack_checkpoint

LAYERS, IDLE = 5, (1, 2, 3)
"""Layers of the target, and those that do less than the others."""
SEEN = [f"{i} and {i * i} are {chr(65 + i % 26)}" for i in range(64)]
UNSEEN = [f"{i} or {i + 3} is {chr(97 + i % 26)}" for i in range(100, 108)]
K, NEW = 3, 32
VOCAB = 259
"""As many as the tokenizer has: a row of an LM head without a token is never drafted."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(seed=11, num_hidden_layers=LAYERS, vocab_size=VOCAB)
    for i in IDLE:
        for weight in (model.model.layers[i].self_attn.o_proj.weight, model.model.layers[i].mlp.down_proj.weight):
            weight.data *= 0.25
    return save_checkpoint(model, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in SEEN))
    return path


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    build_bundle(BuildRecipe(target=str(target), output=str(folder), max_model_len=128, check=False))
    return folder


def options(target: Path, prompts: Path, bundle: Path, output: Path, **changes: Any) -> TrainOptions:
    usual = {"kind": "pruned", "max_tokens": NEW, "batches": 12, "batch_tokens": 256, "threads": 1}
    return TrainOptions(str(target), output, (prompts,), bundle=bundle, **(usual | changes))


@pytest.fixture(scope="module")
def trained(target: Path, prompts: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trained") / "draft"
    return folder, train_draft(options(target, prompts, bundle, folder, batches=100))


def best_tokens(folder: Path, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(input_ids=torch.tensor([text])).logits[0].argmax(-1).tolist() for text in texts]


def foretold(guesses: Sequence[int], text: Sequence[int], num_prompt: int) -> tuple[int, int]:
    """Draft tokens, and how many of them are accepted, where a draft model of these guesses drafts ``K`` at a time."""
    drafted = accepted = 0
    done = num_prompt + 1  # the step that reads the prompt writes one token
    while done < len(text):
        count = min(K, len(text) - done - 1)  # the last token is the target's own
        right = 0
        while right < count and guesses[done + right - 1] == text[done + right]:
            right += 1
        drafted, accepted, done = drafted + count, accepted + right, done + right + 1
    return drafted, accepted


@pytest.mark.bundle
def test_what_is_accepted_is_what_its_guesses_foretell_and_more_than_before(target, trained, tmp_path):
    """Its files are a checkpoint as any: transformers' guesses of it are what the bundle accepts, token by token."""
    folder, result = trained
    build_bundle(
        BuildRecipe(target=str(target), draft=str(folder), output=str(tmp_path / "b"), max_model_len=128, check=False)
    )
    engine = SpecEngine.load(tmp_path / "b", num_threads=1, spin=False, adaptive=False)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    plain = engine.generate(UNSEEN, params, drafter="none")
    found = engine.generate(UNSEEN, params, drafter="draft-model", num_speculative_tokens=K)
    prompts = [engine.tokenizer.encode(prompt).ids for prompt in UNSEEN]
    engine.close()
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, plain, strict=True)]
    wanted = [
        foretold(*each, len(prompt)) for *each, prompt in zip(best_tokens(folder, texts), texts, prompts, strict=True)
    ]
    counts = [(each.stats.drafted, each.stats.accepted) for each in found]
    assert counts == wanted

    def agreement(draft: Path) -> float:
        pairs = zip(best_tokens(draft, texts), texts, prompts, strict=True)
        return float(np.mean([np.array(g[len(p) - 1 : -1]) == t[len(p) :] for g, t, p in pairs]))

    start = folder.with_name("draft.work") / "pruned-start"
    before, after = agreement(start), agreement(folder)
    assert after > before + 0.1, (before, after)
    assert result.curve[-1]["overlap"] > 0.8


@pytest.mark.bundle
def test_the_folder_is_an_ordinary_checkpoint(target: Path, trained: Any) -> None:
    folder, result = trained
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md", "config.json", "curve.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert len({path.stat().st_mode & 0o777 for path in folder.iterdir()}) == 1
    config, whole = (json.loads((place / "config.json").read_text()) for place in (folder, target))
    different = {key for key in config.keys() | whole.keys() if config.get(key) != whole.get(key)}
    assert different == {"num_hidden_layers", "dtype"}
    assert (config["num_hidden_layers"], config["dtype"]) == (2, "bfloat16")
    tensors, stored = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # these are the target's
        assert torch.equal(tensors[name], stored[name].bfloat16())
    assert not torch.equal(tensors["model.norm.weight"], stored["model.norm.weight"].bfloat16())
    loaded, given = load_checkpoint(str(folder)), load_checkpoint(str(target))
    assert loaded.eos_token_ids == given.eos_token_ids
    assert json.loads(loaded.tokenizer_json)["model"] == json.loads(given.tokenizer_json)["model"]
    assert loaded.special_tokens == given.special_tokens
    card = (folder / "README.md").read_text()
    assert f"2 of the {LAYERS} layers" in card
    assert "--draft FOLDER" in card
    assert result.flag == "--draft"


def test_the_choice_of_layers_is_measured(target: Path) -> None:
    """Layers that do less go first, and a choice costs what the model without the other layers costs."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(3, 259, 32).tolist() for _ in range(8)]
    model: Any = load_checkpoint(str(target)).model
    best, *others = measure_choices(model, 2, texts)
    assert best.kept == (0, 4)
    assert [each.loss for each in others] == sorted(each.loss for each in others)
    assert best.loss < others[0].loss - 0.05
    with torch.no_grad():
        ids = torch.tensor(texts)
        p = model(input_ids=ids).logits.softmax(-1)
        model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in best.kept])
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = number
        model.config.num_hidden_layers = 2
        loss = -(p * model(input_ids=ids).logits.log_softmax(-1)).sum(-1).mean()
    assert best.loss == pytest.approx(float(loss), rel=5e-3)  # the LM head is bfloat16


def test_likely_choices_leave_one_run_out_or_spread() -> None:
    assert list(likely_choices(4, 2)) == [(0, 1), (0, 3), (2, 3)]
    assert list(likely_choices(7, 3)) == [(0, 1, 2), (0, 1, 6), (0, 5, 6), (4, 5, 6), (0, 3, 6)]
    assert list(likely_choices(3, 1)) == [(0,), (2,)]


def test_the_loss_in_pieces_is_the_loss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from specexport.train import lm_head

    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(40, 16, generator=generator)
    hidden, wanted = (torch.randn(23, 16, generator=generator) for _ in range(2))

    def read(states: torch.Tensor) -> torch.Tensor:
        return 3.0 * torch.tanh(states @ rows.T / 3.0)

    grads, losses = [], []
    for held in (1 << 25, 40 * 5):
        monkeypatch.setattr(lm_head, "HELD_LOGITS", held)
        given = hidden.clone().requires_grad_()
        loss = 2 * chunked_cross_entropy(given, wanted, read, 40)
        loss.backward()
        grads.append(given.grad)
        losses.append(loss.detach())
    given = hidden.clone().requires_grad_()
    p, log_q = read(wanted).softmax(-1), read(given).log_softmax(-1)
    whole = -2 * (p * log_q).sum(-1).mean()
    whole.backward()
    for grad, loss in zip(grads, losses, strict=True):
        torch.testing.assert_close(loss, whole.detach())
        torch.testing.assert_close(grad, given.grad)
    found = compare_distributions(hidden, wanted, read, 40)
    q = read(hidden).softmax(-1)
    torch.testing.assert_close(found.overlap, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(2 * found.loss.mean(), whole.detach())
    assert found.drafted.tolist() == q.argmax(-1).tolist()
    assert found.best.tolist() == p.argmax(-1).tolist()


DEPTH = 4
KINDS_OF_LAYERS = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": {"first_k_dense_replace": 2}, "gpt2": {"n_layer": DEPTH}, "mixtral": {}, "llama_tied": {},
}  # fmt: skip


def plan_of(folder: Path, checkpoint: Path, **changes: Any) -> PrunedPlan:
    asked = TrainOptions(str(checkpoint), folder / "d", (folder / "p",), kind="pruned", **changes)
    asked.work_folder.mkdir(exist_ok=True)
    texts = [[(7 * i + 3 * j) % 250 + 4 for j in range(24)] for i in range(8)]
    return PrunedPlan(asked, load_checkpoint(str(checkpoint)), texts)


@pytest.mark.parametrize("name", KINDS_OF_LAYERS)
def test_layers_of_several_kinds_stay_what_they_are(name: str, tmp_path: Path) -> None:
    """A step of training reaches every layer that stays, and the files hold the model that was trained."""
    classes, config = ARCHITECTURES[name]
    depth = {} if name == "gpt2" else {"num_hidden_layers": DEPTH}
    save_checkpoint(make_model(classes, config | depth | KINDS_OF_LAYERS[name], seed=3), tmp_path / "t")
    plan = plan_of(tmp_path, tmp_path / "t")
    student = plan.make(lambda _: None)
    tokens = torch.tensor([[5, 9, 44, 7, 30, 12], [8, 61, 17, 5, 0, 0]])
    last = torch.randn(2, 6, student.model.get_output_embeddings().weight.shape[1])
    (loss,) = student.losses(Batch(tokens, [], last, torch.tensor([6, 4])), 3)
    loss.backward()
    grads = {name: each.grad for name, each in student.modules.named_parameters() if each.requires_grad}
    without = [name for name, grad in grads.items() if grad is None and "bias" not in name and "expert" not in name]
    assert not without
    with torch.no_grad():
        for each in student.modules.parameters():
            if each.grad is not None:
                each.sub_(0.1 * each.grad)
        round_weights(student.model)
        wanted = student.model(input_ids=tokens[:1]).logits
        plan.write(tmp_path / "d", student)
        found: Any = load_checkpoint(str(tmp_path / "d")).model
        assert torch.allclose(found(input_ids=tokens[:1]).logits, wanted, atol=1e-5)
    kept = student.describe()["layers"]
    told = json.loads((tmp_path / "d" / "config.json").read_text())
    for key, values in KINDS_OF_LAYERS[name].items():
        if isinstance(values, list):
            assert told[key] == [values[i] for i in kept]
    assert not any(path.name.startswith(".") for path in (tmp_path / "d").iterdir())


@pytest.mark.parametrize("form", ["gguf", "gptq"])
def test_a_target_with_quantized_weights_gives_a_draft_with_float_weights(form: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 160}
    model = make_model("Qwen2", ARCHITECTURES["qwen2"][1] | sizes, seed=3)
    path = tmp_path / ("t.gguf" if form == "gguf" else "t")
    if form == "gguf":
        write_gguf(model, path, kinds={"": "Q8_0"})
    else:
        pack_checkpoint(save_checkpoint(model, path), form)
    plan = plan_of(tmp_path, path)
    plan.write(tmp_path / "d", plan.make(lambda _: None))
    found, target = load_checkpoint(str(tmp_path / "d")), load_checkpoint(str(path))
    assert json.loads((tmp_path / "d" / "tokenizer.json").read_text()) == json.loads(target.tokenizer_json)
    assert (found.chat_template, found.eos_token_ids) == (target.chat_template, target.eos_token_ids)
    first, whole = (checkpoint.model.model.layers[0].mlp.up_proj.weight for checkpoint in (found, target))
    assert torch.equal(first, whole.bfloat16().float())
    assert "quantization_config" not in json.loads((tmp_path / "d" / "config.json").read_text())


def test_the_lm_head_alone_gives_the_models_logits() -> None:
    for name in ("gemma2", "granite", "cohere2", "phi"):
        model = make_model(*ARCHITECTURES[name], seed=4)
        tokens = torch.arange(3, 20)[None]
        with torch.no_grad():
            wanted = model(input_ids=tokens).logits[0]
            found = LmHead(model)(model.base_model(input_ids=tokens)[0][0]).float()
        assert float((found - wanted).abs().max()) < 0.03 * float(wanted.abs().max()), name


def test_what_no_configuration_can_describe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second layer of this model has experts: its configuration says so by a step, not by a list."""
    classes, config = ARCHITECTURES["qwen3_moe"]
    model = make_model(classes, config | {"num_hidden_layers": DEPTH, "decoder_sparse_step": 2}, seed=3)
    save_checkpoint(model, tmp_path / "t")
    monkeypatch.setattr(pruned, "measure_choices", lambda *_: [Choice((0, 2), 1.0)])
    with pytest.raises(UnsupportedModelError, match="no model that its configuration can describe"):
        plan_of(tmp_path, tmp_path / "t").make(lambda _: None)
    assert not (tmp_path / "d").exists()
    assert not list((tmp_path / "d.work").iterdir())


def test_a_model_whose_lm_head_asks_for_more_is_refused() -> None:
    model = make_model(*ARCHITECTURES["opt"], seed=3)
    with pytest.raises(UnsupportedModelError, match=r"no pruned draft can be made of opt .* cannot be run alone"):
        LmHead(model)


@pytest.mark.bundle
def test_a_run_that_ended_goes_on_with_its_layers_and_the_same_curve(target, prompts, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOOK_EVERY", 4)
    whole = train_draft(options(target, prompts, bundle, tmp_path / "whole"))
    step = Trainer.step

    def ended(trainer: Trainer) -> Any:
        if trainer.done == 10:
            raise KeyboardInterrupt
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", ended)
        with pytest.raises(KeyboardInterrupt):
            train_draft(options(target, prompts, bundle, tmp_path / "cut"))
    assert not (tmp_path / "cut").exists()
    notes: list[str] = []
    resumed = train_draft(
        options(target, prompts, bundle, tmp_path / "cut"), lambda event: notes.append(f"{event.stage} {event.message}")
    )
    assert [point["batch"] for point in resumed.curve] == [4, 8, 12]
    assert list(resumed.curve) == list(whole.curve)
    assert not any("stay" in note for note in notes)  # layers were chosen before
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(InvalidRequestError, match=r"was written with layers \[0, 4\], and now it is \[.*\]"):
        train_draft(options(target, prompts, bundle, tmp_path / "cut", keep_layers=3))


@pytest.mark.bundle
def test_what_cannot_be_is_told_before_the_texts(target: Path, prompts: Path, bundle: Path, tmp_path: Path) -> None:
    for kept in (LAYERS, LAYERS + 3):
        with pytest.raises(InvalidRequestError, match=f"a pruned draft of {kept} layers .* target that has {LAYERS}"):
            train_draft(options(target, prompts, bundle, tmp_path / "a", keep_layers=kept))
    assert not (tmp_path / "a.work").exists()
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    (tmp_path / "head" / "curve.json").write_text("[]")
    with pytest.raises(OutputExistsError, match="no pruned draft that was trained here"):
        train_draft(options(target, prompts, bundle, tmp_path / "head"))


def test_flags_of_another_kind_are_refused(tmp_path: Path, prompts: Path) -> None:
    for values, message in (
        ({"keep_layers": 0}, "keep_layers is 0"),
        ({"draft_vocab_size": 100}, "keeps the target's LM head"),
        ({"steps": 3}, "learns at every place of a text at once"),
        ({"kind": "eagle3", "keep_layers": 2}, "eagle3 keeps no layers of the target"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            TrainOptions("t", tmp_path, (prompts,), **({"kind": "pruned"} | values))
    asked = TrainOptions("t", tmp_path, (prompts,), kind="pruned")
    assert [asked.layers_kept(count) for count in (3, 8, 28)] == [2, 2, 7]
    with pytest.raises(InvalidRequestError, match="of a target that has 2"):
        asked.layers_kept(2)
