"""Checkpoints: opening and tapping them, and reading their weights. The only place that knows `transformers`."""

from theodolite.models.open import open_model as open_model
from theodolite.models.open import open_module as open_module
from theodolite.models.open import open_streamed as open_streamed
from theodolite.models.opened import OpenModel as OpenModel
from theodolite.models.texts import continued as continued
from theodolite.models.texts import image_reader as image_reader
from theodolite.models.texts import pictured_text_reader as pictured_text_reader
from theodolite.models.weights.head_weights import HeadWeights as HeadWeights
