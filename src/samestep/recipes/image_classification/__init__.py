"""Images in, a classifier trained by large-minibatch SGD and its figures on a test set out.

::

    idx, arrays, image_folder ─> source ─ data ─> training and test samples ─ augment ─┐
    spec ─ schedule (steps, rates, momentum, groups) ─────────────────────── job ─ loop ─ evaluate ─ results
                                                      models ────────────────┘

`idx`, `arrays` and `image_folder` open data one way each, `data` finds out which and splits off the test samples,
`schedule` turns settings into updates and rates, `models` has the networks, `evaluate` counts every test sample
once.
"""
