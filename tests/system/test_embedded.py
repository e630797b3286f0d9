"""Oracle: the model that is opened where none is named."""

import json

import theodolite
from theodolite.models import open_weights
from theodolite.papers.training.models import EmbeddedConfig, embedded_model
from theodolite.system import embedded


def test_the_embedded_model_has_one_name():
    assert theodolite.open_model().id == open_weights().id == embedded.NAME
    assert (embedded.FOLDER / "model.safetensors").is_file()


def test_the_trainer_s_defaults_are_of_the_shipped_model():
    """Oracle: what the folder and its card say."""
    defaults = EmbeddedConfig()
    shipped = json.loads((embedded.FOLDER / "config.json").read_text())
    built = embedded_model(defaults).config.to_dict()
    assert {name: built[name] for name in shipped if name in built} == {
        name: value for name, value in shipped.items() if name in built
    } | {name: built[name] for name in ("architectures", "dtype")}
    card = " ".join((embedded.FOLDER / "README.md").read_text().split())
    assert f"{defaults.steps:,} steps of {defaults.batch} contexts of {defaults.length} tokens" in card
    assert f"learning rate {defaults.learning_rate:g} with" in card
    assert f"weight decay {defaults.weight_decay:g} on matrices" in card
