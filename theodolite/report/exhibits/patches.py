"""The exhibits of images: the positional basis over the patches, and sinks and norms on the pictures."""

from __future__ import annotations

from theodolite.measure.publications import DARCET, SONG
from theodolite.report.data import blocks, residual_layers
from theodolite.report.drawing import patches
from theodolite.report.exhibit import SurveyExhibit, by_layer_of

_BEFORE = "Cells above a picture: [CLS], then registers."

PATCH_EXHIBITS = [
    SurveyExhibit(
        "patch-components",
        "position",
        "The positional basis over rows and columns",
        ("arrays.example_picture", "arrays.positional_pca"),
        patches.patch_components,
        "The first three principal components of each layer's mean vector per patch, each on its own scale.",
        "smooth slopes and waves over rows and columns: neighbouring patches have similar vectors.",
        f"{SONG}, section 3, for a grid",
        "a chequered or speckled map: neighbouring patches have unrelated vectors.",
        by_layer_of(residual_layers, patches.patch_components),
        wide=True,
    ),
    SurveyExhibit(
        "patch-frequencies",
        "position",
        "Frequencies of the positional basis over rows and columns",
        ("arrays.example_picture", "arrays.dct"),
        patches.patch_frequencies,
        "The lowest 10 × 10 frequencies of the positions' directions over rows and columns (log scale).",
        "energy concentrated in the top left corner.",
        f"{SONG}, Fig. 3, right, for a grid",
        "energy far from the corner: a rough positional basis.",
        by_layer_of(residual_layers, patches.patch_frequencies),
    ),
    SurveyExhibit(
        "received-on-pictures",
        "sinks",
        "Sinks on the pictures",
        ("arrays.example_picture", "arrays.example_received"),
        patches.received_on_pictures,
        f"The mean attention that each token receives, for the head of the block where that is highest. {_BEFORE}",
        "a few patches of plain background that receive most of it; with registers, these instead.",
        DARCET,
        choice=by_layer_of(blocks, patches.received_on_pictures),
        wide=True,
    ),
    SurveyExhibit(
        "norms-on-pictures",
        "outliers",
        "Norms on the pictures",
        ("arrays.example_picture", "arrays.example_norm"),
        patches.norms_on_pictures,
        f"The norm of each token's hidden state over the median of these images' patches. {_BEFORE}",
        "single patches far above the others in the middle and late layers, where the picture shows nothing.",
        DARCET,
        choice=by_layer_of(residual_layers, patches.norms_on_pictures),
        wide=True,
    ),
]
