"""Loading a checkpoint through transformers: safetensors or GGUF, no remote code unless asked for."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexport.checkpoint.config_checks import (
    check_layer_lists,
    check_no_bias_left,
    check_no_gguf_bias_left,
    check_no_layer_left,
    check_stated_ids,
    unknown_layer_kind_error,
)
from specexport.checkpoint.gguf_config import correct_config
from specexport.checkpoint.gguf_mapped import convert, has_tensor_mapping
from specexport.checkpoint.gguf_reader import architecture, open_reader
from specexport.checkpoint.gguf_rows import Conversion, check_experts, holds_experts
from specexport.checkpoint.gguf_shared import patch_gguf_readers
from specexport.checkpoint.gguf_tokenizer import apply_gguf_settings
from specexport.checkpoint.kept import check_formats, find_kept_weights
from specexport.checkpoint.lengths import find_full_attention_length, max_positions, plain_positions, unknown_rope_types
from specexport.checkpoint.loaded import Checkpoint
from specexport.checkpoint.packed import PackedCheckpoint, name_packed, read_packed
from specexport.checkpoint.source import PACKED_METHODS, Source, hash_source, resolve_source
from specexport.checkpoint.stored import Stored, StoredWeight
from specexport.checkpoint.streaming import load_all
from specexport.checkpoint.tagged import Tags, tag_gguf, tag_safetensors
from specexport.checkpoint.tokenizer import collect_eos_ids, load_tokenizer
from specexport_runtime.errors import CheckpointError, SpecexportError, UnsupportedModelError


def load_checkpoint(
    source: str,
    *,
    dtype: str = "float32",  # numpy name; smaller float types are widened without loss
    revision: str | None = None,  # of the hub
    trust_remote_code: bool = False,  # let Python code from the checkpoint run
    keep: bool = False,  # give the quantized weights too, as they are stored
    # Leave matrices in their files where that can be (``Checkpoint.stored``); only this package runs such a model
    stream: bool = False,
) -> Checkpoint:
    """Load a Hugging Face folder, a hub id or a ``.gguf`` file: weights from safetensors or GGUF, never from a pickle.

    Raises ``CheckpointError`` if it is missing, damaged, pickled, or quantized in a way that cannot be read or kept, or
    the hub cannot be reached; ``UnsupportedModelError`` if it is no causal language model that transformers knows.
    """
    found = resolve_source(source, revision, remote_code=trust_remote_code)
    reader = open_reader(found)
    if keep and reader is not None:
        check_formats(found, reader)
    with quiet_transformers(), patch_gguf_readers(found, reader):
        check_stated_ids(found)
        config = _load_config(found, trust_remote_code)
        config = correct_config(found, reader, config)
        tokenizer = apply_gguf_settings(found, reader, load_tokenizer(found, trust_remote_code=trust_remote_code))
        settings = _take_quantization_config(found, config)
        packed = PackedCheckpoint({}, {}) if settings is None else read_packed(found, settings)
        how = _LoadOptions(found, config, getattr(torch, dtype), trust_remote_code, settings is not None)
        model, stored, conversion = None, None, None
        experts = holds_experts(reader)
        whole = experts or (reader is not None and has_tensor_mapping(architecture(reader)))
        if stream or whole:
            conversion = None if reader is None else _conversion(how, reader)
            if experts:
                check_experts(found, reader, conversion)
            model, stored = _load_tagged(how, reader, conversion, packed)
        if experts:  # transformers itself would hold all of them as floats, and knows fewer models
            check_experts(found, reader, None if stored is None else conversion)
        if whole and not stream and stored is not None:
            load_all(model, stored)
            stored = {}
        if model is None or stored is None:
            del model
            model, stored = _load_model(how, packed.all_floats() if how.packed else None), {}
        if reader is not None:
            check_no_gguf_bias_left(found, reader, model, conversion)
        kept = name_packed(packed.weights, model, found.name) if keep else {}
        if keep and reader is not None:
            kept = find_kept_weights(found, reader, model, stored, conversion)
    if how.dtype == torch.float16:
        refuse_overflow(found.name, model, stored)
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None  # tokens of one image see one another; here all tokens are text
    return Checkpoint(
        source=found.name,
        source_sha256=hash_source(found),
        architecture=type(model).__name__,
        model=model,
        dtype=dtype,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        bos_token_id=getattr(text, "bos_token_id", None) if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        eos_token_ids=collect_eos_ids(model, tokenizer),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_positions=max_positions(model),
        plain_positions=min(
            (n for n in (plain_positions(model), find_full_attention_length(model)) if n is not None), default=None
        ),
        kept=kept,
        stored=stored,
    )


def count_layers(source: str) -> int:
    """How many decoder layers a checkpoint has, by its configuration alone; ``CheckpointError`` if that fails."""
    found = resolve_source(source, None)
    with quiet_transformers(), patch_gguf_readers(found, open_reader(found)):
        return int(_load_config(found, trust_remote_code=False).get_text_config().num_hidden_layers)


class _LoadOptions(NamedTuple):
    """How a model is loaded."""

    source: Source
    config: Any
    dtype: torch.dtype
    trust_remote_code: bool
    packed: bool  # its safetensors hold packed weights


def _load_tagged(
    how: _LoadOptions, reader: Any, conversion: Conversion | None, packed: PackedCheckpoint
) -> tuple[Any, dict[str, StoredWeight] | None]:
    """A model whose matrices stay in their files, and where they are; None where its weights are not those stored."""
    tags = Tags(how.dtype)
    if reader is not None:
        state = None if conversion is None else tag_gguf(how.source, reader, conversion, tags)
        if state is None:
            return None, None
        opened: Any = nullcontext()
    elif how.packed:
        state, opened = packed.tagged(tags), nullcontext()
    else:
        state, opened = None, tag_safetensors(how.source, tags)
    with opened, tags.patch_tie_check():
        model = _load_model(how, state)
    return model, tags.resolve_tags(model)


def _conversion(how: _LoadOptions, reader: Any) -> Conversion | None:
    """What transformers makes of a GGUF file, found with a model without data; None if there is no such model."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(how.config)
        return convert(reader, model)
    except Exception:
        return None


def _load_config(source: Source, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    named = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    if not source.gguf_file:
        check_layer_lists(source)
    try:
        config = AutoConfig.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=trust_remote_code, **named
        )
    except SpecexportError:
        raise
    except Exception as error:  # unreadable JSON, missing keys, values of the wrong type, unknown model types
        raise CheckpointError(
            f"{source.name}: the model configuration cannot be read ({_first_line(error)}).",
            "check that config.json is complete and that its model_type is one transformers knows.",
        ) from error
    return config


def _take_quantization_config(source: Source, config: Any) -> Mapping[str, Any] | None:
    """``quantization_config`` of a folder with packed weights, taken out of its config; None where there is none."""
    found = getattr(config, "quantization_config", None)
    if found is None or source.gguf_file:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    if method not in PACKED_METHODS:
        raise CheckpointError(
            f"{source.name} holds quantized weights ({method}).", "give the checkpoint it was quantized from."
        )
    del config.quantization_config
    return {**settings, "quant_method": method}


def _load_model(how: _LoadOptions, state: dict[str, torch.Tensor] | None) -> Any:
    """The model, with the weights of ``state``, or with those of the checkpoint's files."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    source, config = how.source, how.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be exported: it is an encoder-decoder model.", "use a decoder-only model."
        )
    place: Any = source.folder
    kind: dict[str, Any] = (
        {"gguf_file": source.gguf_file, "config": config} if source.gguf_file else {"use_safetensors": True}
    )
    loader: Any = AutoModelForCausalLM
    if state is not None:
        place, kind = None, {"state_dict": state, "config": config}
        if (source.folder / "generation_config.json").is_file() and not source.gguf_file:  # it names what ends a turn
            kind["generation_config"] = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        loader = AutoModelForCausalLM._model_mapping.get(type(config), None)
        if loader is None:
            raise UnsupportedModelError(
                f"{config.model_type} cannot be exported from packed weights: its code is not transformers' own.",
                "give the checkpoint that it was quantized from.",
            )
    try:
        model, report = loader.from_pretrained(
            place,
            dtype=how.dtype,
            local_files_only=True,
            trust_remote_code=how.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below with their names
            **kind,
        )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModelError(
                f"{config.model_type} cannot be exported: transformers has no causal language model for it.",
                "use a decoder-only language model.",
            ) from error
        raise _load_error(source, error) from error
    except Exception as error:  # damaged safetensors, shapes that do not fit, missing shards
        if unknown := unknown_rope_types(config):
            raise UnsupportedModelError(
                f"{config.model_type} cannot be exported: transformers knows no rope type {unknown[0]!r}.",
                "check rope_parameters (or rope_scaling) in config.json.",
            ) from error
        if unknown_layer := unknown_layer_kind_error(config, error):
            raise unknown_layer from error
        raise _load_error(source, error) from error
    if odd := sorted(report["mismatched_keys"]):
        name, stored, wanted = odd[0]
        raise CheckpointError(
            f"{source.name}: {len(odd)} weights have other shapes than the configuration says, for example {name}: "
            f"{list(stored)}, and not {list(wanted)}.",
            "give the config.json that belongs to the weights.",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills these with random numbers and carries on.
        raise CheckpointError(
            f"{source.name}: {len(missing)} weights are missing, for example {missing[0]}.",
            "give the complete checkpoint.",
        )
    if not source.gguf_file:
        check_no_layer_left(source, model, report["unexpected_keys"])
        check_no_bias_left(source, model, report["unexpected_keys"])
    _clear_quantizer_marks(model)
    return model.eval().requires_grad_(False)


def _load_error(source: Source, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{source.name}: the weights cannot be loaded ({_first_line(error)}).", "fetch or convert the checkpoint again."
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if len(lines) > 1 and lines[0].endswith(":"):  # what failed is said in the next one
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0][:600]}" if lines else type(error).__name__


def _clear_quantizer_marks(model: Any) -> None:
    """A GGUF model is dequantized by now, but still carries the marks of its quantizer."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers: what matters here is raised as an error."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    bar, gguf_utils.tqdm = gguf_utils.tqdm, lambda tensors, **_: tensors  # this one does not ask the logger
    try:
        yield
    finally:
        gguf_utils.tqdm = bar
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def round_weights(checkpoint: Checkpoint, dtype: str) -> None:
    """Give each weight the value that it has in ``dtype``; CheckpointError if float16 cannot hold one."""
    kind = getattr(torch, dtype)
    for parameter in checkpoint.model.parameters():
        if not parameter.is_meta:  # those are in ``stored``
            parameter.data = _rounded(parameter.data, kind)
    checkpoint.stored = {
        name: replace(weight, rows=partial(_rounded_rows, weight.rows, kind))
        for name, weight in checkpoint.stored.items()
    }
    if kind == torch.float16:
        refuse_overflow(checkpoint.source, checkpoint.model, checkpoint.stored)


def refuse_overflow(source: str, model: Any, stored: Stored) -> None:
    """Refuse (``CheckpointError``) weights beyond 65504, the end of float16, which have become infinite by now."""
    for name, weight in model.named_parameters():
        found = stored[name].parts() if name in stored else [weight]
        if not all(bool(torch.isfinite(part).all()) for part in found):
            raise CheckpointError(f"{source}: {name} holds values that float16 cannot.", "use --dtype bfloat16.")


def _rounded(values: Tensor, kind: torch.dtype) -> Tensor:
    return values.to(kind).to(values.dtype)


def _rounded_rows(rows: Any, kind: torch.dtype, start: int, stop: int) -> Tensor:
    return _rounded(rows(start, stop), kind)
