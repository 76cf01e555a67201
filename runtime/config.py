"""What a user may set. Frozen, keyword-only, checked when made; unknown keys are refused.

`EngineConfig` is about the engine and the machine, `GenerationConfig` about one request. Names
follow the field's habits (transformers, vLLM); `docs/architecture.md` lists where they differ.
"""

from __future__ import annotations
