"""Whole training jobs, short enough to read: each recipe is one folder with its data, model and loop.

A recipe is an ordinary program on top of samestep's public names. There is no trainer class underneath, so it may
be copied out and changed.
"""
