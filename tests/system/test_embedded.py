"""Oracle: the model that is opened where none is named."""

import theodolite
from theodolite.models import open_weights
from theodolite.system import embedded


def test_the_embedded_model_has_one_name():
    assert theodolite.open_model().id == open_weights().id == embedded.NAME
    assert (embedded.FOLDER / "model.safetensors").is_file()
