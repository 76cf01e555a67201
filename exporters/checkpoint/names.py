"""GGUF tensor names and metadata keys of each architecture, in Hugging Face terms. Only data.

Another family is one more `GgufArchitecture` in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How llama.cpp's converter names one family.

    Attributes:
        hf_class, model_type: of config.json.
        model: GGUF module -> Hugging Face module, for the whole model.
        layer: the same for a block; "blk.3." becomes "model.layers.3.".
        interleaved: block modules whose rows the converter reordered from rotary halves to
            interleaved pairs, with the config key that counts their heads.
        derived: tensors that repeat what the metadata says, not read.
        config: extra config.json keys with fixed values.
    """

    hf_class: str
    model_type: str
    model: Mapping[str, str]
    layer: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()
    config: Mapping[str, object] = field(default_factory=dict)


_LLAMA = GgufArchitecture(
    hf_class="LlamaForCausalLM",
    model_type="llama",
    model={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    derived=frozenset({"attn_rot_embd"}),
    config={"hidden_act": "silu"},
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = {"llama": _LLAMA}


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """Hugging Face name of a GGUF tensor; None where the architecture has no place for it."""
    module, dot, kind = name.rpartition(".")
    if not dot or kind not in ("weight", "bias"):
        return None
    if module in architecture.model:
        return f"{architecture.model[module]}.{kind}"
    if (block := block_module(name)) and block[1] in architecture.layer:
        return f"model.layers.{block[0]}.{architecture.layer[block[1]]}.{kind}"
    return None


def block_module(name: str) -> tuple[int, str] | None:
    """Layer number and module of a block's tensor: "blk.3.attn_q.weight" -> (3, "attn_q")."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    if str(int(parts[1][:9])) != parts[1]:  # "007" and absurdly long numbers
        return None
    return int(parts[1]), parts[2]
