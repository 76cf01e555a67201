"""How many drafts of a small model would be accepted, by how they are drawn and verified.

    python tools/bench/verification.py DIR DRAFT_DIR PROMPTS.jsonl [--temperature 0.8] [...]

A line of the file is `{"category": ..., "turns": [...]}` as in Spec-Bench. Both models read the
prompts; at each position it is asked how likely a draft of the small one is to be accepted, given
that all before it was:

    greedy      its most probable token, if it is what the large one draws
    coupled     what it draws with the uniform number of the large one, if that draws the same (what
                ships)
    rejection   what it draws by itself, by rejection sampling
    typical     its most probable token, by Medusa's rule with epsilon 0.09 (lossy)

All but the last leave the large model's distribution as it is.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import common
import numpy as np
from drafts import read_prompts
from numpy.typing import NDArray
from rejection import acceptance, filtered

from headrace.backends.base import Backend
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import KvRelease, Row, StepPlan
from headrace.runtime.sampling.candidates import Scratch
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.sampling.typical import is_typical

EPSILON = 0.09
RULES = ("greedy", "coupled", "rejection", "typical")
Logits = NDArray[np.float32]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("draft", type=Path, metavar="DRAFT_DIR")
    parser.add_argument("prompts_file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, its last")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    args = parser.parse_args()
    config = GenerationConfig(temperature=args.temperature, top_p=args.top_p, seed=1)
    backends = [
        common.load_backend(folder, slots=1, context_tokens=args.tokens, threads=args.threads)[0]
        for folder in (args.package, args.draft)
    ]
    cases = []
    for category, prompts in read_prompts(args.prompts_file, args.package, args.prompts).items():
        rates: list[dict[str, float]] = []
        for ids in prompts:
            large, small = (read(backend, ids[-args.tokens :]) for backend in backends)
            rates += [
                compare(*pair, config, i) for i, pair in enumerate(zip(large, small, strict=True))
            ]
        case = {rule: mean(rate[rule] for rate in rates) for rule in RULES}
        cases.append({"category": category, "positions": len(rates), **case})
    lines = [f"{'category':18}{'positions':>10}" + "".join(f"{rule:>11}" for rule in RULES)]
    for c in cases:
        shares = "".join(f"{c[rule]:11.1%}" for rule in RULES)
        lines.append(f"{c['category']:18}{c['positions']:10}{shares}")
    common.show(common.report({"cases": cases}), lines, as_json=args.json)


def read(backend: Backend, ids: list[int]) -> Logits:
    """Logits behind each token of a text, [tokens, vocab]."""
    row = Row(0, 0, 0, tuple(ids), len(ids))
    return backend.collect(backend.submit(StepPlan(0, (row,), (KvRelease(0),)))).logits.copy()


def compare(
    large: Logits, small: Logits, config: GenerationConfig, position: int
) -> dict[str, float]:
    """Chance of acceptance by each rule at one position; of `coupled` and `typical`, 0 or 1."""
    p, q, draft = filtered(large, config), filtered(small, config), int(small.argmax())
    drawn = []
    for logits in (large, small):
        sampler = Sampler(config, [0], [], config.seed or 0, Scratch(logits.size))
        drawn.append(sampler.sample(logits.copy(), position)[0])
    taken = is_typical(large, draft, 1 / config.temperature, EPSILON, Scratch(large.size))
    return {
        "greedy": float(p[draft]),
        "coupled": float(drawn[0] == drawn[1]),
        "rejection": acceptance(p, q),
        "typical": float(taken),
    }


if __name__ == "__main__":
    main()
