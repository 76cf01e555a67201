"""A folder that appears complete or not at all."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.runtime.errors import ExportError
from headrace.runtime.manifest import MANIFEST_FILE


@contextmanager
def atomic_folder(output: Path, *, overwrite: bool, keep: Path) -> Iterator[Path]:
    """A temporary folder that becomes `output` if the block succeeds and vanishes if not.

    Args:
        overwrite: replace an existing package as a whole; it stays if anything fails.
        keep: must not be inside of what is replaced.

    Raises:
        ExportError: `output` exists and may not be replaced, or writing fails.
    """
    try:
        str(output).encode("utf-8")  # ONNX Runtime takes no other paths
        output = output.resolve()  # a link stays one; "new/.." is not taken for a new folder
        _check_output(output, overwrite, keep)
        missing = [parent for parent in output.parents if not parent.exists()]
    except (OSError, ValueError) as error:  # ValueError: text that no file system can hold
        raise _cannot_write_beside(output, error) from None
    try:
        partial = _make_partial(output)
        try:
            yield partial
            partial.chmod(0o755)
            _move(partial, output, overwrite)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ExportError(
                    f"no space left for {output}; free some or choose another disk"
                ) from None
            raise ExportError(f"cannot write {output}: {error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        with suppress(OSError):  # not empty: it succeeded, or somebody else uses them
            for parent in missing:
                parent.rmdir()


def _make_partial(output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise _cannot_write_beside(output, error) from None


def _cannot_write_beside(output: Path, error: Exception) -> ExportError:
    return ExportError(f"cannot write beside {output}: {getattr(error, 'strerror', None) or error}")


def _check_output(output: Path, overwrite: bool, keep: Path) -> None:
    if not output.exists():
        files = [parent for parent in output.parents if parent.is_file()]
        if files:
            raise ExportError(f"cannot write {output}: {files[0]} is not a folder")
        return
    if not overwrite:
        raise ExportError(f"{output} exists already; choose another folder or --overwrite")
    if not (output / MANIFEST_FILE).is_file():
        raise ExportError(f"{output} is not a package, so it is not overwritten")
    if keep.resolve().is_relative_to(output.resolve()):
        raise ExportError(f"{keep} is inside of {output}, so that is not overwritten")


def _move(partial: Path, output: Path, overwrite: bool) -> None:
    if not (overwrite and output.exists()):  # fails if somebody else made it meanwhile
        partial.replace(output)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
    old = aside / "package"
    try:
        output.replace(old)
        partial.replace(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.replace(output)
        raise
    finally:
        if output.exists():  # else `old` is all there is
            shutil.rmtree(aside, ignore_errors=True)
