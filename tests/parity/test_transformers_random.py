"""Random small models of every architecture against transformers, logit by logit, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_models
from architectures import CONFIGS, CONTEXTS, config_of

from headrace.exporters.package import export_package

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, tmp_path: Path) -> None:
    model = random_models.save(
        transformers.AutoConfig.for_model(**config_of(name)), tmp_path / "hf"
    )
    package = tmp_path / "package"
    export_package(tmp_path / "hf", package, precision="fp32", kv_cache="fp32")
    random_models.check_parity(package, model, context_tokens=CONTEXTS.get(name))
