"""Compare models: what of one run's mechanism survives in another, its page, and the models side by side."""

from theodolite.comparison.audit import Audit as Audit
from theodolite.comparison.audit import compare as compare
from theodolite.comparison.outputs import read_outputs as read_outputs
from theodolite.comparison.survival import Survival as Survival
