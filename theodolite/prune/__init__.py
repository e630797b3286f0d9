"""Pruning: a matrix at a time, and whole models layer by layer."""

from theodolite.prune.methods import magnitude as magnitude
from theodolite.prune.methods import sparsegpt as sparsegpt
from theodolite.prune.methods import wanda as wanda
from theodolite.prune.model import prune_model as prune_model
from theodolite.prune.oats import SparseLowRank as SparseLowRank
from theodolite.prune.oats import oats as oats
from theodolite.prune.pruned import Pruned as Pruned
from theodolite.prune.pruned import load_factored as load_factored
from theodolite.prune.quantised import Quantised as Quantised
from theodolite.prune.quantised import gptq as gptq
from theodolite.prune.quantised import quantised_oats as quantised_oats
from theodolite.prune.quantised import round_to_nearest as round_to_nearest
from theodolite.system.choices import METHODS as METHODS
