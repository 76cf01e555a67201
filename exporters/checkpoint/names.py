"""GGUF tensor names and metadata keys of each architecture, in Hugging Face terms. Only data.

Another family is one more `GgufArchitecture` in `ARCHITECTURES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How llama.cpp's converter names one family.

    Attributes:
        hf_class, model_type: of config.json.
        model: GGUF module -> Hugging Face module, for the whole model.
        layer: the same for a block; "blk.3." becomes "model.layers.3." (or another `layer_prefix`).
        transposed: block modules that the converter transposed.
        interleaved: block modules whose rows the converter reordered from rotary halves to
            interleaved pairs, with the config key that counts their heads.
        derived: tensors that repeat what the metadata says, not read.
        numbers: metadata keys, without the architecture before them, that not all families have,
            and the config keys that they become; `maybe_numbers` where they may be missing.
        gain_offset: the converter added this to gains of norms.
        present: config keys that are true where the file has a tensor.
        slides: a metadata key, likewise, with a flag for each layer: it sees only a window.
        stores_whole_attention_factor: the converter writes that of YaRN as config.json has it, not
            what is to be multiplied with the usual one.
        windowed: the family that the file is of where it says how wide windows of attention are.
        config: extra config.json keys with fixed values.
    """

    hf_class: str
    model_type: str
    model: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers"
    transposed: frozenset[str] = frozenset()
    interleaved: Mapping[str, str] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()
    numbers: Mapping[str, str] = field(default_factory=dict)
    maybe_numbers: Mapping[str, str] = field(default_factory=dict)
    gain_offset: float = 0.0
    present: Mapping[str, str] = field(default_factory=dict)
    slides: str | None = None
    stores_whole_attention_factor: bool = False
    windowed: GgufArchitecture | None = None
    config: Mapping[str, object] = field(default_factory=dict)


_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_INTERLEAVED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_SILU = {"hidden_act": "silu"}
_WINDOW = {"attention.sliding_window": "sliding_window"}

_LLAMA = GgufArchitecture(
    hf_class="LlamaForCausalLM",
    model_type="llama",
    model=_MODEL,
    layer=_LAYER,
    interleaved=_INTERLEAVED,
    derived=frozenset({"attn_rot_embd"}),
    numbers=_RMS,
    present={**_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    config=_SILU,
)
_QWEN2 = GgufArchitecture(
    hf_class="Qwen2ForCausalLM",
    model_type="qwen2",
    model=_MODEL,
    layer=_LAYER,
    numbers=_RMS,
    config=_SILU,
)
_QWEN3 = GgufArchitecture(
    hf_class="Qwen3ForCausalLM",
    model_type="qwen3",
    model=_MODEL,
    layer=_LAYER | _HEAD_NORMS,
    numbers=_RMS,
    present=_BIAS,
    config=_SILU,
)

_GEMMA = GgufArchitecture(
    hf_class="GemmaForCausalLM",
    model_type="gemma",
    model=_MODEL,
    layer=_LAYER,
    numbers=_RMS,
    gain_offset=1.0,
    config={"hidden_activation": "gelu_pytorch_tanh"},
)
_GEMMA2 = dataclasses.replace(
    _GEMMA,
    hf_class="Gemma2ForCausalLM",
    model_type="gemma2",
    layer=_LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    maybe_numbers={
        **_WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    hf_class="Gemma3ForCausalLM",
    model_type="gemma3_text",
    layer={**_GEMMA2.layer, **_HEAD_NORMS},
    maybe_numbers={
        **_GEMMA2.maybe_numbers,
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
)
_OLMO3 = GgufArchitecture(
    hf_class="Olmo3ForCausalLM",
    model_type="olmo3",
    model=_MODEL,
    layer=_LAYER
    | _HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    numbers=_RMS,
    maybe_numbers=_WINDOW,
    slides="attention.sliding_window_pattern",
    stores_whole_attention_factor=True,
    present=_BIAS,
    config=_SILU,
)
_OLMO2 = dataclasses.replace(
    _OLMO3,
    hf_class="Olmo2ForCausalLM",
    model_type="olmo2",
    maybe_numbers={},
    slides=None,
    windowed=_OLMO3,
)
_GRANITE = dataclasses.replace(
    _LLAMA,
    hf_class="GraniteForCausalLM",
    model_type="granite",
    maybe_numbers={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)
_PHI3 = GgufArchitecture(
    hf_class="Phi3ForCausalLM",
    model_type="phi3",
    model=_MODEL,
    layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    numbers=_RMS,
    maybe_numbers=_WINDOW,
    config=_SILU,
)
_STABLELM = GgufArchitecture(
    hf_class="StableLmForCausalLM",
    model_type="stablelm",
    model=_MODEL,
    layer=_LAYER,
    numbers={"attention.layer_norm_epsilon": "layer_norm_eps"},
    present={"use_qkv_bias": "blk.0.attn_q.bias"},
    config=_SILU,
)
_SMOLLM3 = dataclasses.replace(_LLAMA, hf_class="SmolLM3ForCausalLM", model_type="smollm3")
_ARCEE = dataclasses.replace(
    _LLAMA,
    hf_class="ArceeForCausalLM",
    model_type="arcee",
    layer={key: name for key, name in _LAYER.items() if key != "ffn_gate"},
    present={**_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
    config={"hidden_act": "relu2"},
)
_SEED_OSS = GgufArchitecture(
    hf_class="SeedOssForCausalLM",
    model_type="seed_oss",
    model=_MODEL,
    layer={key: name for key, name in _LAYER.items() if key != "ffn_norm"}
    | {"post_attention_norm": "post_attention_layernorm"},
    numbers=_RMS,
    present={**_BIAS, "attention_out_bias": "blk.0.attn_output.bias"},
    config=_SILU,
)
_STARCODER2 = GgufArchitecture(
    hf_class="Starcoder2ForCausalLM",
    model_type="starcoder2",
    model=_MODEL,
    layer={key: name for key, name in _LAYER.items() if key != "ffn_gate"}
    | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    numbers={"attention.layer_norm_epsilon": "norm_epsilon"},
    present={"use_bias": "blk.0.attn_q.bias"},
    config={"hidden_act": "gelu_pytorch_tanh"},
)
_GPT2 = GgufArchitecture(
    hf_class="GPT2LMHeadModel",
    model_type="gpt2",
    model={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layer_prefix="transformer.h",
    transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    numbers={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    config={"activation_function": "gelu_new"},
)

# By `general.architecture`.
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "olmo2": _OLMO2,
    "granite": _GRANITE,
    "phi3": _PHI3,
    "stablelm": _STABLELM,
    "gpt2": _GPT2,
    "smollm3": _SMOLLM3,
    "arcee": _ARCEE,
    "seed_oss": _SEED_OSS,
    "starcoder2": _STARCODER2,
}


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """Hugging Face name of a GGUF tensor; None where the architecture has no place for it."""
    module, dot, kind = name.rpartition(".")
    if not dot or kind not in ("weight", "bias"):
        return None
    if module in architecture.model:
        return f"{architecture.model[module]}.{kind}"
    if (block := block_module(name)) and block[1] in architecture.layer:
        return f"{architecture.layer_prefix}.{block[0]}.{architecture.layer[block[1]]}.{kind}"
    return None


def block_module(name: str) -> tuple[int, str] | None:
    """Layer number and module of a block's tensor: "blk.3.attn_q.weight" -> (3, "attn_q")."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    if str(int(parts[1][:9])) != parts[1]:  # "007" and absurdly long numbers
        return None
    return int(parts[1]), parts[2]
