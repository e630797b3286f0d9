"""Oracle: the model that is opened where none is named."""

import theodolite
from theodolite.models import open_weights
from theodolite.models.open import EMBEDDED
from theodolite.passes.ray_survey import EMBEDDED_ID
from theodolite.system import embedded


def test_the_embedded_model_has_one_name():
    assert theodolite.open_model().id == open_weights().id == EMBEDDED_ID == embedded.ID
    assert EMBEDDED == embedded.FOLDER
