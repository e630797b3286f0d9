"""Files whose weights wait for a quantiser whom nothing names are refused; masks and old buffers are not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import edited, with_tensors
from theodolite.errors import WorkError
from theodolite.models import open_model
from theodolite.models.stored.lazy_weights import open_weights
from theodolite.passes.survey import spectra

Q = "model.layers.1.self_attn.q_proj"

Tensors = dict[str, torch.Tensor]


def written(source: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    return with_tensors(shutil.copytree(source, folder), change)


def stored_as(dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda weights: weights.update({f"{Q}.weight": weights[f"{Q}.weight"].to(dtype)})


def beside(name: str) -> Callable[[Tensors], object]:
    return lambda weights: weights.update({f"{Q}.{name}": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stored_as(torch.float8_e4m3fn), rf"tensor {Q}\.weight is F8_E4M3"),
        (stored_as(torch.int8), rf"tensor {Q}\.weight is I8"),
        (beside("weight_scale"), rf"tensor {Q}\.weight_scale scales {Q}\.weight"),
        (beside("SCB"), rf"tensor {Q}\.SCB scales"),
        (beside("scales"), rf"tensor {Q}\.scales scales"),
        (beside("weight_zero_point"), rf"tensor {Q}\.weight_zero_point scales"),
    ],
)
def test_a_checkpoint_without_a_quantization_config(change, said, checkpoint, tmp_path):
    folder = written(checkpoint("llama3"), tmp_path / "model", change)
    for opener in (open_model, open_weights):
        with pytest.raises(
            WorkError, match=f"{said}.* no quantization_config: give a dequantised copy"
        ) as refused:
            opener(folder)
        assert "\n" not in str(refused.value)


def test_a_pruned_model_s_own_names_are_no_exception(checkpoint, tmp_path):
    """The prefix of the backbone may be missing, and a mask is no weight, though its name ends as a bias does."""

    def bare(weights: Tensors) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)

    def old(weights: Tensors) -> None:
        bare(weights)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        weights["logit_scale"] = torch.ones(())

    def wrong(weights: Tensors) -> None:
        bare(weights)
        weights["h.0.attn.c_attn.bias"] = weights["h.0.attn.c_attn.bias"].to(torch.int8)

    expected = spectra(open_model(checkpoint("gpt2")))
    opened = open_model(written(checkpoint("gpt2"), tmp_path / "old", old))
    assert spectra(opened).heads.equals(expected.heads)
    with pytest.raises(WorkError, match=r"tensor h\.0\.attn\.c_attn\.bias is I8"):
        open_model(written(checkpoint("gpt2"), tmp_path / "wrong", wrong))


def test_eight_bits_with_blocks_of_scales_are_read_by_transformers(checkpoint, tmp_path):
    """DeepSeek's FP8. Oracle: each block of the stored numbers times its scale."""
    blocks, stored = {}, torch.float8_e4m3fn

    def eight_bits(weights: Tensors) -> None:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            by_block = weights[name].view(-1, 8, weights[name].shape[1] // 8, 8)
            scale = by_block.abs().amax((1, 3), keepdim=True) / torch.finfo(stored).max
            eight = (by_block / scale).to(stored)
            blocks[name] = (eight.float() * scale).view_as(weights[name])
            weights[name] = eight.view_as(weights[name])
            weights[name + "_scale_inv"] = scale[:, 0, :, 0].contiguous()

    folder = written(checkpoint("mistral"), tmp_path / "model", eight_bits)
    with pytest.raises(WorkError, match="no quantization_config"):
        open_model(folder)
    method = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    edited(folder, quantization_config=method)
    for opener in (open_model, open_weights):
        read = opener(folder).head_weights(1).w_q.mT.flatten(0, 1)
        torch.testing.assert_close(read, blocks[f"{Q}.weight"].double(), rtol=1e-6, atol=1e-9)
