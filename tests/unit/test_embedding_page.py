"""The page on embedding: its code runs, and what it says of imports and prints is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs_snippets import python_blocks, run_page
from package_fixtures import PackageMaker

from headrace.runtime.child import entry

ROOT = Path(__file__).resolve().parents[2]


def test_its_code_runs(
    tiny_package: PackageMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tiny_package("w8a8_row", "int8", forms=("ragged",))
    (tmp_path / "smollm2").symlink_to(package, target_is_directory=True)
    monkeypatch.setattr(entry, "_was_asked", False)
    names = run_page(ROOT / "docs" / "embedding.md", tmp_path, monkeypatch)
    assert names["answer"] and entry.was_asked()
    assert "cancelled" in capsys.readouterr().out


def test_lines_of_a_page_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("one\n\n```python\na = 1\n```\n```\nnot this\n```\n```python\n1 / 0\n```\n")
    first, second = python_blocks(page)
    assert (first.co_firstlineno, second.co_filename) == (1, str(page))
    with pytest.raises(ZeroDivisionError) as caught:
        exec(second, {})
    assert caught.traceback[-1].lineno == 9


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import headrace.runtime", ("numpy", "onnxruntime", "tokenizers", "jinja2", "asyncio")),
        ("from headrace.runtime import Runtime", ("onnxruntime", "tokenizers", "psutil")),
        (
            "from headrace.runtime import Runtime\n"
            "with Runtime.load(sys.argv[1], isolated=True) as r: r.generate('a', max_new_tokens=2)",
            ("onnxruntime",),
        ),
    ],
)
def test_importing_loads_little(
    code: str, absent: tuple[str, ...], tiny_package: PackageMaker
) -> None:
    package = tiny_package("w8a8_row", "int8", forms=("ragged",))
    code = f"import sys\n{code}\nprint([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
