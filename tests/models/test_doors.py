"""The tap on every family: the model stays itself, and what is tapped gives the model's own attention."""

from __future__ import annotations

from theodolite.attention.inputs import attend
from theodolite.models.taps import tapped


def test_each_part_of_a_model_gets_its_own_implementation_back():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=20, **sizes),
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, **sizes),
        image_token_index=19,
    )
    model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    with tapped(model, lambda _, inputs: attend(inputs)):
        implementations = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert implementations == {"theodolite_with_masks"}  # the vision side says that it is not causal
    assert model.config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "sdpa"
    assert config.vision_config._attn_implementation == "eager"
    layers = model.model.vision_tower.modules()
    assert {m.config._attn_implementation for m in layers if hasattr(m, "config")} == {"eager"}
