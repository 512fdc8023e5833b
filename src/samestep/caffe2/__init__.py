"""Recipes of the Caffe2 era (Detectron, Large-Scale-VRD, self-supervision, nonlocal), read from their YAML files.

Only what decides the optimization is read: the SOLVER section, and the batch. `Recipe.build` gives an optimizer and
a scheduler that do what the original did, to the rounding of the updates; `Recipe.lr` is the rate that it used.
"""

from samestep.caffe2._keys import Family
from samestep.caffe2._recipe import FAITHFUL, GroupRules, Recipe, read_recipe

__all__ = ["FAITHFUL", "Family", "GroupRules", "Recipe", "read_recipe"]
