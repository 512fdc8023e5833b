"""Embeddings in, residual codebooks and one semantic id per item out.

::

    files ─ formats, tables ─> source ─ data ─> items ─ job ─> codes ─ ids ─> semantic ids ─ outputs ─> files
                                                                 └─ quality ──────┴──────────────────> quality.json

`formats` and `tables` open one file each way, `data` joins files and checks them, `grouping` and `ids` make every
item's id unique, `quality` measures the ids, `outputs` writes what comes out (through `atomic`).
"""
