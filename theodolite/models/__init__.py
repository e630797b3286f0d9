"""Checkpoints: opening and tapping them, and reading their weights. The only place that knows `transformers`."""

from theodolite.models.head_weights import HeadWeights as HeadWeights
from theodolite.models.image_reading import image_reader as image_reader
from theodolite.models.lazy_weights import open_weights as open_weights
from theodolite.models.open import open_model as open_model
from theodolite.models.open import open_module as open_module
from theodolite.models.opened import OpenModel as OpenModel
from theodolite.models.streamed import open_streamed as open_streamed
