"""The extension as it is built everywhere: without debug information and symbols that nothing looks up."""

from __future__ import annotations

from pathlib import Path

from zero_opt.system.extension import native


def test_the_extension_is_stripped() -> None:
    built = Path(native.__file__).read_bytes()  # type: ignore[arg-type]
    assert [name for name in (b"\0.debug_info\0", b"\0.symtab\0") if name in built] == []
