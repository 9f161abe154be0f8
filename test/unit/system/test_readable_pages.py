from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero_opt.errors import StorageFailed
from zero_opt.system.readable_pages import require_readable

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the kernel does not tell where files are")

MANY = 3_000  # more than are asked for one by one
NUMEL = 16


def _of_file(path: Path, count: int, *, cut: bool) -> list[Tensor]:
    """Tensors in a mapped file, which loses the page that the last of them lies on."""
    nbytes = -(-count * NUMEL * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
    path.write_bytes(bytes(nbytes))
    run = torch.from_file(str(path), shared=True, size=nbytes // 4)
    if cut:
        with path.open("r+b") as file:
            file.truncate(nbytes - mmap.PAGESIZE)
    return list(run[: count * NUMEL].split(NUMEL))


@pytest.mark.parametrize("others", [0, MANY])
def test_a_file_s_page_that_is_gone_is_found_among_many_tensors(tmp_path: Path, others: int) -> None:
    elsewhere = [torch.zeros(NUMEL) for _ in range(others)]
    require_readable(*elsewhere, *_of_file(tmp_path / "whole", 100, cut=False))
    gone = _of_file(tmp_path / "cut", 100, cut=True)
    with pytest.raises(StorageFailed, match="cannot be read from the file"):
        require_readable(*elsewhere, *gone)
    require_readable(*elsewhere, gone[0])


def test_other_files_may_have_any_name(tmp_path: Path) -> None:
    (odd := tmp_path / "ends\u2028 \udce9\n").write_bytes(b"0")
    gone = _of_file(tmp_path / "cut", MANY, cut=True)
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ), pytest.raises(StorageFailed):
        require_readable(*gone)


def test_many_tensors_of_a_file_are_read(tmp_path: Path) -> None:
    require_readable(*_of_file(tmp_path / "whole", MANY, cut=False))
    with pytest.raises(StorageFailed):
        require_readable(*_of_file(tmp_path / "cut", MANY, cut=True))
