"""Build small random models of every text family of `transformers`, without using theodolite.

A family's own default config is made small by the names of its fields. What that does not serve has a line in
`OVERRIDES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 300
LAYERS, HEADS, KEY_HEADS, HEAD_WIDTH = 4, 4, 2, 8

# The first pattern that a field's name matches says what a larger number becomes; others stay (kernels, periods).
SIZES: tuple[tuple[str, int], ...] = (
    (r"(max|n)_.*position.*|n_ctx|max_seq_len|model_max_length|max_(source|target)_positions", 128),
    (r"entity_emb_size", 32),
    (r"(image|crop)_size", 16),
    (r"(temporal_)?patch_size", 4),
    (r".*vocab.*", VOCABULARY),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|num_kv_shared_layers", 2),
    (r".*(num|n|encoder|decoder)_(hidden_|encoder_|decoder_)?(layers?|blocks)|depth", LAYERS),
    (r".*(key_value_heads|kv_heads|kv_n_heads|key_heads)", KEY_HEADS),
    (r".*(num|n)_.*heads?|.*attention_heads|num_heads", HEADS),
    (r"qk_head_dim", 2 * HEAD_WIDTH),
    (r".*(head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|headdim)|rotary_dim", HEAD_WIDTH),
    (r".*(experts_per_tok|experts_per_token|moe_topk|moe_top_k|moe_k)", 2),
    (r".*(_group|topk_group|n_groups|ngroups|o_groups)", 1),
    (r"(num|n)_shared_experts|moe_num_shared_experts", 1),
    (r".*experts?|zero_expert_num|expert_capacity", 4),
    (r".*(sliding_window|window_size|attention_window|local_attention|chunk_size|window_len)", 6),
    (r".*(state_size|d_state|lora_rank|dt_rank|time_step_rank|laurel_rank|adapter_rank|lowrank)", 8),
    (r".*(ffn|ff_dim|d_ff|dff|dim_ff|intermediate|feed_forward|mlp).*", 48),
    (r".*hidden_size_per_layer_input", 16),
    (
        r"(.*hidden_size.*|.*_embd?|.*embedding_(size|dim)|d_model|(emb|embed|hidden)_dim|dim|d_latents|lru_width)",
        32,
    ),
)
FILLED = {"head_dim": HEAD_WIDTH, "num_key_value_heads": KEY_HEADS}
"""Fields that some families leave to the checkpoint."""


@dataclass(frozen=True)
class Case:
    """One way in which a family reads text: its model type and class; `name` is unique."""

    name: str
    family: str
    model_class: str


_MAMBA = {"mamba_d_head": 16}  # times heads: as wide as the expanded stream
_GRANITE_SPEECH = {"encoder_config": {"context_size": 16, "max_pos_emb": 32}}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_QWEN4 = _INDEXER | {"indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOTS3 = {"head_dim": 3 * HEAD_WIDTH}  # of windowed layers, whose queries are wider
_CONV_THEN_ATTENTION = ["conv", "full_attention"] * 2
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"head_dim": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4, "pad_token_id": 1},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    # Its own "norm" of random weights makes logits so large that which of two tokens wins is rounding.
    "mobilebert": {"normalization_type": "layer_norm"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "lfm2": {"layer_types": _CONV_THEN_ATTENTION},
    "lfm2_moe": {"layer_types": _CONV_THEN_ATTENTION},
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "neomme": {"head_dim": 16},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"] * 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64}
    | {"attention_head_dim": 2 * HEAD_WIDTH},
}


WITHOUT_ATTENTION = {"falcon_mamba", "fnet", "mamba", "mamba2", "rwkv", "xlstm"}
"""Families whose models have no attention at all: nothing to survey."""


def cases() -> list[Case]:
    """List every text family: the class that fills in words or continues a text, of an encoder-decoder both."""
    causal, masked, both = (
        dict(getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES"))
        for kind in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    )
    found = []
    for family in sorted({*causal, *masked, *both}):
        if family in both:
            found.append(Case(family, family, _name(both[family])))
            if family in causal:
                found.append(Case(f"{family} (decoder alone)", family, _name(causal[family])))
        else:
            found.append(Case(family, family, _name(masked.get(family, causal.get(family)))))
    return found


def _name(classes: Any) -> str:
    return classes if isinstance(classes, str) else classes[0]


def build(case: Case, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a small random model, float32, evaluation mode; weights are not small, so that attention differs.

    `changes` are of the small config.
    """
    torch.manual_seed(seed)
    model_class = getattr(transformers, case.model_class)
    config = small_config(case)
    for name, value in changes.items():
        setattr(config, name, value)
    if not isinstance(config, model_class.config_class):  # the text side of a model of several kinds
        config = config.get_text_config()
    model: PreTrainedModel = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name.rsplit(".", 1)[-1], name, parameter, generator)
    return model.eval()


def _randomise(last: str, name: str, parameter: torch.nn.Parameter, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if parameter.ndim >= 2:
        # Convolutions keep what they have; by their inputs as `tests/checkpoints.py` does.
        if parameter.ndim == 2 or "expert" in name:
            parameter.copy_(noise * min(0.25, 1.4 / parameter.shape[-1] ** 0.5))
    elif "norm" in name.lower() and last == "weight":
        parameter.add_(0.2 * noise)
    elif last == "bias":
        parameter.copy_(0.3 * noise)


def small_config(case: Case) -> PreTrainedConfig:
    """Make the family's default config small."""
    config_class = CONFIG_MAPPING[case.family]
    given = OVERRIDES.get(case.family, {})
    try:
        default = config_class()
    except Exception:
        default = config_class(**given)
    return config_class(**_merged(small_fields(default), given))


def small_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Find the arguments that make a small config of the same class, also of the configs in it."""
    config.allow_global_per_layer_attribute_access = True
    fields = {
        name: getattr(config, name) for name in type(config).__dataclass_fields__ if hasattr(config, name)
    }
    small: dict[str, Any] = {}
    layers = _layer_count(config)
    of_layers = {
        name: value
        for name, value in fields.items()
        if layers > LAYERS and isinstance(value, (list, tuple)) and len(value) == layers
    }
    exceptions = {int(layer): given for layer, given in config.to_dict().get("per_layer_config", {}).items()}
    if exceptions:
        of_layers["per_layer_config"] = [exceptions.get(layer, {}) for layer in range(layers)]
    chosen = _chosen_layers(of_layers)
    if exceptions:
        given = of_layers.pop("per_layer_config")
        small["per_layer_config"] = {
            str(number): {name: _other_size(name, value, fields) for name, value in given[layer].items()}
            for number, layer in enumerate(chosen)
            if given[layer]
        }
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = small_fields(value) | {"model_type": value.model_type}
        elif name in of_layers:
            small[name] = [value[layer] for layer in chosen]
        elif isinstance(value, int) and not isinstance(value, bool):
            if (size := _small_size(name, value, fields)) != value:
                small[name] = size
        elif value is None and name in FILLED:
            small[name] = FILLED[name]
        elif re.search(r"_token_id$", name) and isinstance(value, (list, tuple)):
            small[name] = [token % VOCABULARY for token in value]
    return small


def _layer_count(config: PreTrainedConfig) -> int:
    try:
        return int(config.num_hidden_layers)
    except Exception:
        return 0


def _chosen_layers(of_layers: dict[str, Any]) -> list[int]:
    """Choose layers so that each kind is among them: the first of each, and then the first of all."""
    if not of_layers:
        return list(range(LAYERS))
    kinds = list(map(repr, zip(*of_layers.values(), strict=True)))
    first = list(map(kinds.index, dict.fromkeys(kinds)))
    rest = [layer for layer in range(len(kinds)) if layer not in first]
    return sorted((first[:LAYERS] + rest)[:LAYERS])


def _small_size(name: str, value: int, fields: dict[str, Any]) -> int:
    if re.search(r"_token_(id|index)$|_token$|_index$", name):
        return value % VOCABULARY if value > 0 else value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            queries = fields.get("num_attention_heads")
            if size == KEY_HEADS and "value" in name and value == queries:
                size = HEADS
            return min(value, size)
    return value


def _other_size(name: str, value: Any, fields: dict[str, Any]) -> Any:
    """Make a layer that is an exception: twice or half as large as others, as it was before."""
    usual = fields.get(name)
    if not isinstance(value, int) or not isinstance(usual, int):
        return value
    small = _small_size(name, usual, fields)
    return small * 2 if value > usual else small // 2 if value < usual else small


def _merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in given.items():
        inside = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if inside else value
    return merged
