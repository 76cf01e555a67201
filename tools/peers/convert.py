"""The GGUF checkpoint in the forms that peers read; runs in the environment `torch`.

    python -m peers.convert FORM CHECKPOINT OUTPUT

FORM is `hugging_face` (float32 safetensors, from the GGUF file), or, from such a folder,
`genai_int4`, `genai_int8` or `ctranslate2`, by the converters that their users run.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path


def to_hugging_face(gguf: Path, output: Path) -> None:
    """The weights of a GGUF file as float32, which transformers does not save by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # they are not quantized any more
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(output)


def run_module(module: str, *arguments: str) -> None:
    """As `python -m module arguments`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(form: str, checkpoint: Path, output: Path) -> None:
    source, target = str(checkpoint), str(output)
    if form == "hugging_face":
        to_hugging_face(checkpoint, output)
    elif form == "ctranslate2":
        options = ["--model", source, "--output_dir", target, "--quantization", "int8"]
        run_module("ctranslate2.converters.transformers", *options)
    elif form.startswith("genai_"):
        with tempfile.TemporaryDirectory() as cache:
            options = ["-i", source, "-o", target, "-e", "cpu", "-c", cache]
            precision = form.removeprefix("genai_")
            run_module("onnxruntime_genai.models.builder", *options, "-p", precision)
    else:
        raise SystemExit(f"{form!r} is no form")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
